"""What should never happen, happens: whoever waits hears of it, and the engine goes on."""

from __future__ import annotations

import asyncio
from operator import attrgetter
from pathlib import Path

import pytest

from spec_server.engine.errors import GenerationFailed
from tests.engine.harness import WINDOW, Setup, request, serve

PROMPT = list(range(300, 340))
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def broken(*_: object, **__: object) -> None:
    raise TypeError("broken on purpose")


@pytest.mark.parametrize(
    "names",
    [
        ("step",),
        ("say",),
        ("speculation.add",),
        ("speculation.add", "finisher.fail"),
        ("speculation.add", "drafter.truncate"),
        ("say", "finisher.fail"),
        ("finisher.say",),
        ("line.take",),
    ],
    ids="+".join,
)
async def test_an_internal_error_ends_the_request_and_not_the_engine(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(Setup(WINDOW, n_slots=2), tmp_path) as server:
        good = (await server.ask(request(PROMPT, 8))).tokens
        with monkeypatch.context() as patch:
            for name in names:
                owner, _, attribute = f"core.{name}".rpartition(".")
                patch.setattr(attrgetter(owner)(server), attribute, broken)
            for _ in range(2):
                both = asyncio.gather(
                    *[server.ask(request(PROMPT, 8)) for _ in range(2)], return_exceptions=True
                )
                failed = await asyncio.wait_for(both, 10)
                assert [type(one) for one in failed] == [GenerationFailed] * 2
        assert (await asyncio.wait_for(server.ask(request(PROMPT, 8)), 10)).tokens == good
        await asyncio.wait_for(server.erase(0), 10)


async def test_nobody_who_waits_in_line_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(Setup(WINDOW, n_slots=2), tmp_path) as server:
        monkeypatch.setattr("spec_server.engine.admit.choose_slot", broken)
        asked = asyncio.gather(*[server.ask(request(PROMPT, 8)) for _ in range(4)], return_exceptions=True)
        assert [type(one) for one in await asyncio.wait_for(asked, 10)] == [GenerationFailed] * 4


async def test_a_save_that_waits_for_such_a_slot_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(Setup(WINDOW), tmp_path) as server:
        asked = asyncio.ensure_future(server.ask(request(PROMPT, 2000)))
        while not server.core.slots[0].task:
            await asyncio.sleep(0.01)
        erased = asyncio.ensure_future(server.erase(0))
        await asyncio.sleep(0.05)
        assert not erased.done()
        monkeypatch.setattr(server.core, "step", broken)
        monkeypatch.setattr(server.core.finisher, "fail", broken)
        with pytest.raises(GenerationFailed):
            await asyncio.wait_for(asked, 10)
        await asyncio.wait_for(erased, 10)
