"""Wherever a slot is taken back to, target, drafter and token list arrive together, and the text is right."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from spec_server.engine.base import Finished
from spec_server.engine.checkpoints import CheckpointOptions
from spec_server.engine.core import EngineCore
from spec_server.engine.slot import SlotState
from spec_server.runtime import _native
from spec_server.runtime.batch import Batch
from spec_server.runtime.context import Context
from spec_server.runtime.errors import LlamaError, RewindError
from tests.engine.harness import (
    HYBRID,
    WINDOW,
    Prompt,
    Setup,
    Turn,
    chat,
    chat_prompts,
    core_of,
    drain,
    filler,
    greedy,
    model_of,
    request,
    run,
    serve,
    smollm2,
    submit,
)
from tests.fakes_engine import always_wrong, mixed, oracle, scripted

pytestmark = pytest.mark.model

OPTIONS = CheckpointOptions(min_step=128)
KINDS = {
    "hybrid": Setup(HYBRID, n_ubatch=128, checkpoints=OPTIONS),
    "hybrid-snapshots": Setup(HYBRID, n_ubatch=128, n_rs_seq=4, checkpoints=OPTIONS),
    "window": Setup(WINDOW, n_ubatch=32, checkpoints=OPTIONS),
}
ALL = {**KINDS, "full attention": Setup(smollm2(), n_ctx=512, n_ubatch=128)}
FLOORS = [("window", n) for n in (10, 63, 64, 65, 66, 300, 700)]
FLOORS += [("hybrid", 66), ("hybrid-snapshots", 66), ("full attention", 10)]


@pytest.fixture(params=KINDS)
def setup(request: pytest.FixtureRequest) -> Setup:
    return KINDS[request.param]


@contextmanager
def refused_removals() -> Iterator[list[int]]:
    """llama answers every removal of a tail with False and does nothing; the lengths it was asked for."""
    asked: list[int] = []
    real = _native.seq_rm

    def stub(memory: object, seq_id: int, first: int, end: int) -> bool:
        if first <= 0:
            return bool(real(memory, seq_id, first, end))
        asked.append(first)
        return False

    _native.seq_rm = stub
    try:
        yield asked
    finally:
        _native.seq_rm = real


# -- llama says no


@pytest.mark.parametrize("kind", ALL)
def test_a_refused_removal_costs_time_only(kind: str) -> None:
    setup = ALL[kind]
    prompt = filler(model_of(setup.path), 50, 1).tokens
    other = (*prompt[:30], *filler(model_of(setup.path), 40, 2).tokens)
    want = greedy(setup.path, [Prompt(other)], 12, n_ubatch=setup.n_ubatch)[0]
    with core_of(setup) as core:
        run(core, request(Prompt(prompt, (20,)), 4))
        with refused_removals() as asked:
            turn = run(core, request(other, 12))[0]
        assert asked
        assert turn.counts[:2] == (0, len(other))
        assert turn.tokens == want
        again = run(core, request(other, 12))[0]
        assert again.tokens == want
        assert again.timings.cache_n >= len(other) - 4


def test_a_refused_removal_of_a_draft_costs_time_only(setup: Setup) -> None:
    prompt = filler(model_of(setup.path), 100, 1)
    said = greedy(setup.path, [prompt], 24, n_ubatch=setup.n_ubatch)[0]
    plan = mixed({prompt.tokens: said}, model_of(setup.path).n_vocab)
    with core_of(setup.but(n_max=4, drafter=scripted(plan, 4))) as core:
        with refused_removals() as asked:
            turn = run(core, request(prompt, 16))[0]
        assert asked
        assert turn.tokens == said[:16]
        assert 0 < turn.timings.draft_n_accepted < turn.timings.draft_n


def test_a_regenerated_ending_reads_as_in_a_fresh_process(setup: Setup) -> None:
    model = model_of(setup.path)
    prompt = [*filler(model, 1000, 1).tokens, *filler(model, 40, 2).tokens]
    changed = [*prompt[:-30], *filler(model, 30, 3).tokens]
    with core_of(setup) as core:
        run(core, request(prompt, 20))
        turn = run(core, request(changed, 20))[0]
        assert turn.timings.cache_kind == "checkpoint"
        assert turn.timings.cache_n >= 896
    assert turn.tokens == greedy(setup.path, [Prompt(tuple(changed))], 20, n_ubatch=setup.n_ubatch)[0]


# -- only what a restored copy can do too


@pytest.mark.parametrize(("kind", "n_tokens"), FLOORS)
def test_a_copy_by_state_has_the_same_prefix_floor(kind: str, n_tokens: int) -> None:
    """And that floor can be reached by both, to right logits."""
    setup = ALL[kind].but(n_ctx=1024)
    prompt = filler(model_of(setup.path), n_tokens, 1)
    with core_of(setup) as core, core_of(setup) as other:
        run(core, request(prompt, 1))
        state = core.target.read_state(
            0, memoryview(bytearray(core.target.state_size(0, partial=False))), partial=False
        )
        other.target.write_state(0, state, n_tokens, partial=False)
        floor = core.target.prefix_floor(0)
        assert floor == other.target.prefix_floor(0)
        assert floor >= max(core.target.rewind_floor(0), other.target.rewind_floor(0))
        rows = []
        for target in (core.target, other.target):
            target.truncate(0, floor)
            rows.append(logits_after(target, floor, prompt.tokens[0]))
        # cells that lie in another order round otherwise; a window with a hole is off by more
        np.testing.assert_allclose(rows[0], rows[1], atol=0.5)


def logits_after(target: Context, n_tokens: int, token: int) -> np.ndarray:
    batch = Batch(8)
    batch.add(0, [token], n_tokens, output="last")
    target.decode(batch)
    return np.array(target.logits(0, 1))


# -- the end of a generation


@pytest.mark.parametrize("right", [0, 1, 8])
def test_a_save_right_behind_a_rejected_draft_holds_the_accepted_tip(
    setup: Setup, right: int, tmp_path: Path
) -> None:
    """The last round's rollback may still be pending inside llama when the state is read."""
    model = model_of(setup.path)
    prompt = filler(model, 100, 1)
    follow = filler(model, 20, 2).tokens
    said = greedy(setup.path, [prompt], 24, n_ubatch=setup.n_ubatch)[0]

    def plan(r: object) -> list[int]:
        n = len(r.tokens) + 1 - len(prompt)  # type: ignore[attr-defined]
        rest = said[n : n + 4]
        return [*rest[:right], *(5 for _ in rest[right:])]

    drafting = setup.but(n_max=4, drafter=scripted(plan, 4))

    async def main() -> None:
        async with serve(drafting, tmp_path) as server:
            first = await server.ask(request(prompt, 10))
            assert first.tokens == said[:10]
            await server.save(0, "a.bin")
            append = request([*prompt.tokens, *said[:9], *follow], 8)
            live = await server.ask(append)
            assert live.timings.cache_n == 109
            await server.restore(0, "a.bin")
            restored = await server.ask(append)
            assert (restored.counts, restored.tokens) == (live.counts, live.tokens)
            cold = greedy(setup.path, [Prompt(tuple(append.prompt))], 8, n_ubatch=setup.n_ubatch)[0]
            assert live.tokens == cold

    asyncio.run(main())


def until_behind(core: EngineCore) -> None:
    """Step until the slot's target lacks tokens of its list."""
    for _ in range(100):
        core.step()
        if core.target.n_tokens(0) < len(core.slots[0].tokens):
            return
    raise AssertionError("never behind")


def behind_setup() -> tuple[Setup, Prompt, list[int]]:
    setup = KINDS["hybrid"]
    prompt = filler(model_of(HYBRID), 100, 1)
    said = greedy(HYBRID, [prompt], 40, n_ubatch=128)[0]
    plan = mixed({prompt.tokens: said}, model_of(HYBRID).n_vocab)
    return setup.but(n_max=4, drafter=scripted(plan, 4, needs_checkpoints=True)), prompt, said


def test_a_cancelled_request_leaves_a_whole_slot() -> None:
    setup, prompt, said = behind_setup()
    with core_of(setup) as core:
        turn = submit(core, request(prompt, 30))
        until_behind(core)
        task = core.slots[0].task
        assert task is not None
        task.cancelled = True
        drain(core)
        core.check_invariants()
        n = len(core.slots[0].tokens)
        assert core.slots[0].state is SlotState.IDLE
        assert core.target.n_tokens(0) == core.drafter.n_tokens(0) == n
        follow = run(core, request([*prompt.tokens, *said[: n - 99]], 8))[0]
        assert follow.timings.cache_n == n
        assert [*turn.tokens, *follow.tokens][: len(said)][-8:] == follow.tokens
        assert follow.tokens == said[n - 99 : n - 91]


def test_a_slot_that_ends_behind_costs_its_neighbour_nothing() -> None:
    """Catching up decodes, maybe in the step in which the neighbour's first token is about to be read."""
    setup, prompt, said = behind_setup()
    model = model_of(HYBRID)
    other = filler(model, 60, 3)
    want = greedy(HYBRID, [other], 6, n_ubatch=128)[0]
    n_together = 0
    with core_of(setup.but(n_slots=2)) as core:
        for n_said in range(6, 12):
            stop = (model.detokenize(said[:n_said]).decode(),)
            for n_steps in range(8):
                first = submit(core, request(prompt, 30, id_slot=0, stop=stop, cache_prompt=False))
                for _ in range(n_steps):
                    core.step()
                second = submit(core, request(other, 6, id_slot=1, cache_prompt=False))
                while not second.events and second.error is None:
                    was_running = core.slots[0].task is not None
                    core.step()
                n_together += was_running and core.slots[0].task is None
                drain(core)
                assert first.finished.stop_type == "word"
                assert second.tokens == want
    assert n_together > 5


def test_tokens_that_cannot_be_caught_up_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, prompt, said = behind_setup()
    with core_of(setup) as core:
        submit(core, request(prompt, 30))
        until_behind(core)
        held = core.target.n_tokens(0)
        task = core.slots[0].task
        assert task is not None
        task.cancelled = True
        real = core.target.decode

        def fail(batch: Batch) -> None:
            raise LlamaError("no")

        monkeypatch.setattr(core.target, "decode", fail)
        drain(core)
        monkeypatch.setattr(core.target, "decode", real)
        core.check_invariants()
        assert len(core.slots[0].tokens) == held
        assert core.drafter.n_tokens(0) <= held
        turn = run(core, request(prompt, 8))[0]
        assert turn.tokens == said[:8]


def test_a_tip_that_is_lost_ends_the_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, prompt, said = behind_setup()
    with core_of(setup.but(n_slots=2)) as core:
        lost = submit(core, request(prompt, 30, id_slot=0))
        other = submit(core, request(filler(core.model, 40, 3), 30, id_slot=1))
        refused = core.target.write_state

        def refuse(seq_id: int, state: memoryview, n_tokens: int, *, partial: bool) -> None:
            refused(seq_id, state[:20], n_tokens, partial=partial)

        def no_decode(slot: object) -> bool:
            return False

        monkeypatch.setattr(core.target, "write_state", refuse)
        monkeypatch.setattr(core.rollback, "catch_up", no_decode)
        while lost.error is None:
            core.step()
        monkeypatch.undo()
        drain(core)
        assert "cannot be taken back" in str(lost.error)
        assert isinstance(other.events[-1], Finished)
        assert len(core.slots[0].tokens) == core.target.n_tokens(0) == 0
        assert run(core, request(prompt, 8, id_slot=0))[0].tokens == said[:8]


# -- end tokens inside an accepted block


ENDS_SOON = 70  # of the chat prompts: both tiny models end their answer to it after some twenty tokens


@lru_cache
def ends_by_itself(path: Path, n_ubatch: int) -> tuple[Prompt, list[int]]:
    """A prompt whose greedy answer ends with an end token; the answer, end token included."""
    prompt = chat(model_of(path), chat_prompts(ENDS_SOON + 1)[-1])
    with core_of(Setup(path, n_ubatch=n_ubatch)) as core:
        turn = run(core, request(prompt, 80, ignore_eos=False))[0]
    assert turn.finished.stop_type == "eos"
    return prompt, turn.tokens


def test_nothing_behind_an_end_token_stays(setup: Setup) -> None:
    model = model_of(setup.path)
    prompt, said = ends_by_itself(setup.path, setup.n_ubatch)
    answer, end = said[:-1], said[-1]
    assert model.is_eog(end)
    plan = oracle({prompt.tokens: [*said, *[end] * 48]})
    for n_max in (1, 2, 3, 5):  # the end token comes as a drafted one and as the round's own
        with core_of(setup.but(n_max=n_max, drafter=scripted(plan, n_max))) as core:
            turn = run(core, request(prompt, 80, ignore_eos=False))[0]
            assert turn.tokens == said
            assert turn.timings.predicted_n == len(said)
            assert turn.timings.draft_n_accepted < len(said)
            n = len(core.slots[0].tokens)
            assert n == core.target.n_tokens(0) == core.drafter.n_tokens(0) == len(prompt) + len(answer)
            follow = [*prompt.tokens, *answer, *filler(model, 20, 2).tokens]
            second = run(core, request(follow, 8))[0]
            assert second.timings.cache_n == len(prompt) + len(answer)
            assert second.tokens == greedy(setup.path, [Prompt(tuple(follow))], 8, n_ubatch=setup.n_ubatch)[0]


def test_a_draft_of_nothing_but_end_tokens_gives_one(setup: Setup) -> None:
    prompt, said = ends_by_itself(setup.path, setup.n_ubatch)
    whole = [*prompt.tokens, *said[:-1]]
    end = said[-1]
    with core_of(setup.but(n_max=4, drafter=scripted(lambda r: [end] * 48, 4))) as core:
        turn = run(core, request(whole, 20, ignore_eos=False))[0]
        assert turn.timings.predicted_n <= 1
        assert turn.timings.draft_n_accepted == 0
        assert len(core.slots[0].tokens) == len(whole)


def test_a_stop_string_and_a_limit_cut_an_accepted_block(setup: Setup) -> None:
    model = model_of(setup.path)
    prompt = filler(model, 100, 1)
    said = greedy(setup.path, [prompt], 40, n_ubatch=setup.n_ubatch)[0]
    plan = oracle({prompt.tokens: said})
    text = model.detokenize(said[:30]).decode()
    word = text[len(text) // 2 : len(text) // 2 + 5]
    with core_of(setup.but(n_max=4, drafter=scripted(plan, 4))) as core:
        for n in range(1, 14):
            turn = run(core, request(prompt, n))[0]
            assert turn.tokens == said[:n]
            assert core.target.n_tokens(0) == 100 + n - 1
        stopped: Turn = run(core, request(prompt, 40, stop=(word,)))[0]
        assert stopped.finished.stop_type == "word"
        assert stopped.text == text[: text.index(word)]
        assert core.target.n_tokens(0) == 100 + stopped.timings.predicted_n - 1


def test_a_rewind_below_the_floor_is_never_asked_for(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rewind per decode: whatever the drafts, truncate never has to say no."""
    model = model_of(setup.path)
    prompt = filler(model, 300, 1)
    said = greedy(setup.path, [prompt], 80, n_ubatch=setup.n_ubatch)[0]
    for plan in (
        mixed({prompt.tokens: said}, model.n_vocab),
        always_wrong({prompt.tokens: said}, model.n_vocab),
    ):
        with core_of(setup.but(n_max=4, drafter=scripted(plan, 4))) as core:
            refused: list[int] = []
            real = core.target.truncate

            def watched(
                seq_id: int, n_tokens: int, real: object = real, refused: list[int] = refused
            ) -> None:
                try:
                    real(seq_id, n_tokens)  # type: ignore[operator]
                except RewindError:
                    refused.append(n_tokens)
                    raise

            monkeypatch.setattr(core.target, "truncate", watched)
            assert run(core, request(prompt, 60))[0].tokens == said[:60]
            assert refused == []
