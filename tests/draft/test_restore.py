"""Saving never changes the future: live, restored, and restored in another process draft and accept the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from spec_server.engine.base import RestoreResult
from tests.draft.setups import ALL, CHAIN, FULL, FULL_CHAIN, MOD, MTP, RECURRENT, Kind, repeating, setup
from tests.engine.harness import (
    HYBRID,
    WINDOW,
    Prompt,
    Server,
    Setup,
    Turn,
    chat,
    chat_prompts,
    model_of,
    request,
    serve,
)

KINDS = pytest.mark.parametrize("kind", [*ALL, FULL, FULL_CHAIN], ids=lambda kind: kind.id)
N = 32  # tokens of each answer


def on(how: Setup, directory: Path, work: Callable[[Server], Awaitable[None]]) -> None:
    """A server of its own for the time of `work`."""

    async def serving() -> None:
        async with serve(how, directory) as server:
            await work(server)

    asyncio.run(serving())


def conversation(kind: Kind, index: int) -> Prompt:
    if index == 0:
        return repeating(kind)
    return chat(model_of(kind.path), chat_prompts(index + 1)[index])


async def first(server: Server, kind: Kind, index: int, id_slot: int) -> Turn:
    await server.erase(id_slot)
    return await server.ask(request(conversation(kind, index), N, id_slot=id_slot))


async def second(server: Server, kind: Kind, index: int, answer: Turn, id_slot: int) -> Turn:
    model = model_of(kind.path)
    more = model.tokenize(
        "<|im_end|>\n<|im_start|>user\nGo on, please.<|im_end|>\n<|im_start|>assistant\n", False, True
    )
    text = (*conversation(kind, index).tokens, *answer.tokens, *more)
    return await server.ask(request(text, N, id_slot=id_slot))


def same(a: Turn, b: Turn) -> bool:
    return (a.tokens, a.counts, a.timings.draft_prompt_n) == (b.tokens, b.counts, b.timings.draft_prompt_n)


@KINDS
def test_restored_turns_count_as_live_ones_also_after_a_restart(kind: Kind, tmp_path: Path) -> None:
    live: list[tuple[Turn, Turn]] = []

    async def before(server: Server) -> None:
        for i in range(3):
            one = await first(server, kind, i, 0)
            live.append((one, await second(server, kind, i, one, 0)))
        for i in range(3):
            one = await first(server, kind, i, 0)
            assert same(one, live[i][0])
            saved = await server.save(0, f"{i}.bin")
            assert saved.draft.restored, saved.draft.reason
            await server.erase(0)
            await check(server, i)

    async def after(server: Server) -> None:
        for i in range(3):
            await check(server, i)

    async def check(server: Server, i: int) -> None:
        restored = await server.restore(0, f"{i}.bin")
        assert restored.draft.restored
        assert restored.draft.reason == ""
        two = await second(server, kind, i, live[i][0], 0)
        assert same(two, live[i][1])
        assert two.timings.cache_n == live[i][1].timings.cache_n

    on(setup(kind), tmp_path, before)
    on(setup(kind), tmp_path, after)
    assert sum(two.timings.draft_n_accepted for _, two in live) > 0


@pytest.mark.parametrize("kind", [MTP, MOD, CHAIN], ids=lambda kind: kind.id)
def test_four_slots_saved_at_once_go_crosswise_into_other_slots_and_fewer(kind: Kind, tmp_path: Path) -> None:
    live: list[tuple[Turn, Turn]] = []

    async def before(server: Server) -> None:
        ones = await asyncio.gather(*[first(server, kind, i, i) for i in range(4)])
        await asyncio.gather(*[server.save(i, f"{i}.bin") for i in range(4)])
        live.extend([(one, await second(server, kind, i, one, i)) for i, one in enumerate(ones)])
        for i in range(4):
            restored = await server.restore(3 - i, f"{i}.bin")
            assert restored.draft.restored
        for i in range(4):
            assert same(await second(server, kind, i, ones[i], 3 - i), live[i][1])

    async def after(server: Server) -> None:
        for i in range(4):
            await server.restore(0, f"{i}.bin")
            assert same(await second(server, kind, i, live[i][0], 0), live[i][1])

    on(setup(kind, n_slots=4), tmp_path, before)
    on(setup(kind), tmp_path, after)


def dropped(how: Kind, to: Setup, tmp_path: Path) -> tuple[Turn, Turn, RestoreResult]:
    """A conversation saved under `how` and restored where its draft block does not fit: live turn, that one, answer."""
    seen: list[object] = []

    async def before(server: Server) -> None:
        one = await first(server, how, 1, 0)
        await server.save(0, "a.bin")
        seen.extend([one, await second(server, how, 1, one, 0)])

    async def after(server: Server) -> None:
        seen.append(await server.restore(0, "a.bin"))
        seen.append(await second(server, how, 1, seen[0], 0))  # type: ignore[arg-type]

    on(setup(how), tmp_path, before)
    on(to, tmp_path, after)
    _, live, restored, two = seen
    return live, two, restored  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (MTP, {"type_k": "q8_0"}, "type_k"),
        (RECURRENT, {"type_v": "q8_0"}, "type_v"),
        (Kind(("draft-simple",), HYBRID, WINDOW), {"type_k": "q8_0"}, "type_k"),
    ],
    ids=["mtp", "recurrent", "window"],
)
def test_trouble_with_the_draft_costs_the_draft_and_never_the_prefix(
    kind: Kind, options: dict[str, object], why: str, tmp_path: Path
) -> None:
    other = Kind(kind.types, kind.path, kind.draft, options=options)
    live, two, restored = dropped(kind, setup(other), tmp_path)
    assert not restored.draft.restored
    assert why in restored.draft.reason
    assert two.tokens == live.tokens
    assert two.counts[:2] == live.counts[:2]  # cache_n and prompt_n
    assert two.timings.draft_n > 0


def test_a_draft_context_too_small_for_the_stored_one_is_named(tmp_path: Path) -> None:
    kind = RECURRENT
    long = Kind(kind.types, kind.path, kind.draft)

    async def before(server: Server) -> None:
        await server.ask(request(repeating(kind, 24), 32, id_slot=0))
        await server.save(0, "long.bin")

    async def after(server: Server) -> None:
        restored = await server.restore(0, "long.bin")
        assert "draft context too small" in restored.draft.reason
        assert restored.n_reusable == restored.n_restored
        turn = await server.ask(request([*repeating(kind, 24).tokens], 32, id_slot=0))
        assert turn.timings.draft_n > 0

    on(setup(long), tmp_path, before)
    on(setup(long, n_ctx_draft=256), tmp_path, after)


def test_a_member_that_does_not_fit_is_named_and_the_rest_restored(tmp_path: Path) -> None:
    other = Kind(CHAIN.types, options={"type_k": "q8_0"})
    live, two, restored = dropped(CHAIN, setup(other), tmp_path)
    assert restored.draft.restored
    assert two.tokens == live.tokens
    assert two.timings.cache_n == live.timings.cache_n
