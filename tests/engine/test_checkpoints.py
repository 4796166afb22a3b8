"""Checkpoints are where they are wanted, within their limits, and change how much is processed, never what is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from persistence.snapshot import Checkpoint, SequenceState
from spec_server.engine.base import SpeculativeParams
from spec_server.engine.checkpoints import CheckpointOptions, closest
from spec_server.engine.core import EngineCore
from spec_server.engine.report import counters, slot_facts
from tests.engine.harness import (
    HYBRID,
    WINDOW,
    Prompt,
    Setup,
    Turn,
    chat,
    chat_prompts,
    core_of,
    filler,
    greedy,
    model_of,
    request,
    run,
    smollm2,
)
from tests.fakes_engine import mixed, scripted

pytestmark = pytest.mark.model

STEP = 64
KINDS = {
    "hybrid": Setup(HYBRID, n_ubatch=STEP, checkpoints=CheckpointOptions(min_step=STEP)),
    "hybrid-snapshots": Setup(
        HYBRID, n_ubatch=STEP, n_rs_seq=4, checkpoints=CheckpointOptions(min_step=STEP)
    ),
    "window": Setup(WINDOW, n_ubatch=32, checkpoints=CheckpointOptions(min_step=STEP)),
}
ANSWER = 16


@pytest.fixture(
    params=[pytest.param("hybrid", marks=pytest.mark.slow), "hybrid-snapshots", "window"], scope="module"
)
def setup(request: pytest.FixtureRequest) -> Setup:
    return KINDS[request.param]


@lru_cache(maxsize=64)
def cold(path: Path, prompt: tuple[int, ...], n: int, n_ubatch: int) -> list[int]:
    return greedy(path, [Prompt(prompt)], n, n_ubatch=n_ubatch)[0]


def ends(core: EngineCore, id_slot: int = 0) -> list[int]:
    return [c.n_tokens for c in core.slots[id_slot].checkpoints]


# -- which prefix a new prompt finds


@dataclass(frozen=True)
class Case:
    """`next` makes the second prompt of the first one (344 tokens, checkpoints every 64 and at 340) and its answer."""

    next: Callable[[list[int], list[int], list[int]], list[int]]
    cache_n: int
    kind: str


CASES = {
    "before the oldest checkpoint": Case(lambda a, _, other: a[:50] + other[:80], 0, "none"),
    "exactly at a checkpoint": Case(lambda a, _, other: a[:128] + other[:80], 128, "checkpoint"),
    "one token before a checkpoint": Case(lambda a, _, other: a[:127] + other[:80], 64, "checkpoint"),
    "one token after a checkpoint": Case(lambda a, _, other: a[:129] + other[:80], 128, "checkpoint"),
    "inside the answer": Case(lambda a, said, other: a + said[:10] + other[:80], 340, "checkpoint"),
    "inside the last draft": Case(lambda a, said, other: a + said[:14] + other[:80], 340, "checkpoint"),
    "a changed last token": Case(lambda a, _, other: a[:343] + other[:1], 340, "checkpoint"),
    "a strict prefix": Case(lambda a, _, __: a[:200], 192, "checkpoint"),
    "a strict prefix one past a checkpoint": Case(lambda a, _, __: a[:193], 192, "checkpoint"),
    "the identical prompt": Case(lambda a, _, __: a, 340, "checkpoint"),
    "an exact append": Case(lambda a, said, other: a + said + other[:80], 344 + ANSWER - 1, "prefix"),
}


def ask_both(setup: Setup, case: Case, **second: object) -> tuple[Turn, list[int], list[int]]:
    """The second prompt's turn after the first one; the second prompt; the checkpoints before it."""
    model = model_of(setup.path)
    a, other = list(filler(model, 344, 1).tokens), list(filler(model, 100, 3).tokens)
    with core_of(setup) as core:
        first = run(core, request(a, ANSWER))[0]
        before = ends(core)
        b = case.next(a, first.tokens, other)
        return run(core, request(b, ANSWER, **second))[0], b, before


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_prompt_finds_the_newest_checkpoint_before_it_parts(setup: Setup, case: Case) -> None:
    turn, b, before = ask_both(setup, case)
    assert before == [64, 128, 192, 256, 320, 340]
    timings = turn.timings
    assert (timings.cache_n, timings.prompt_n) == (case.cache_n, len(b) - case.cache_n)
    assert timings.cache_kind == case.kind
    assert timings.n_checkpoint == (case.cache_n if case.kind == "checkpoint" else 0)
    assert turn.tokens == cold(setup.path, tuple(b), ANSWER, setup.n_ubatch)


def test_without_checkpoints_all_is_processed_and_the_words_are_the_same(setup: Setup) -> None:
    off = setup.but(checkpoints=CheckpointOptions(n_max=0))
    case = CASES["one token after a checkpoint"]
    turn, b, before = ask_both(off, case)
    assert before == []
    assert turn.counts[:2] == (0, len(b))
    assert turn.tokens == ask_both(setup, case)[0].tokens


def test_a_window_that_still_holds_everything_needs_no_checkpoint() -> None:
    model = model_of(WINDOW)
    with core_of(KINDS["window"]) as core:
        a = list(filler(model, 40, 1).tokens)
        said = run(core, request(a, 20))[0].tokens  # 59 tokens in the target, the window is 64
        assert run(core, request([*a, *said[:5], 7, 8], 1))[0].counts[:2] == (45, 2)
        said = run(core, request(a, 40))[0].tokens  # 79: beyond it a saved copy could not go back either
        assert run(core, request([*a, *said[:5], 7, 8], 1))[0].timings.cache_kind == "checkpoint"


def test_full_attention_takes_none() -> None:
    with core_of(Setup(smollm2(), n_ctx=512)) as core:
        prompt = list(filler(core.model, 60, 1).tokens)
        run(core, request(Prompt(tuple(prompt), (30,)), 2))
        assert ends(core) == []
        assert run(core, request([*prompt[:40], 5], 2))[0].counts[:2] == (40, 1)


def test_speculation_changes_neither_counts_nor_words(setup: Setup) -> None:
    model = model_of(setup.path)
    case = CASES["inside the last draft"]
    plain, b, _ = ask_both(setup, case)
    a = list(filler(model, 344, 1).tokens)
    said = greedy(setup.path, [Prompt(tuple(a)), Prompt(tuple(b))], ANSWER + 8, n_ubatch=setup.n_ubatch)
    plan = mixed({tuple(a): said[0], tuple(b): said[1]}, model.n_vocab)
    drafting = setup.but(n_max=4, drafter=scripted(plan, 4, needs_checkpoints=setup.path == HYBRID))
    turn, _, before = ask_both(drafting, case)
    assert before == [64, 128, 192, 256, 320, 340]
    assert turn.counts[:2] == plain.counts[:2]
    assert turn.tokens == plain.tokens
    assert 0 < turn.timings.draft_n_accepted < turn.timings.draft_n


# -- where they are


def test_one_lies_before_the_last_user_message_and_one_near_the_end(setup: Setup) -> None:
    model = model_of(setup.path)
    talk = chat_prompts(1)[0]
    with core_of(setup.but(checkpoints=CheckpointOptions())) as core:
        first = chat(model, talk)
        answer = run(core, request(first, 24, ignore_eos=False))[0]
        assert ends(core) == [*first.boundaries, len(first) - 4]
        talk = [*talk, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "Why?"}]
        second = chat(model, talk)
        run(core, request(second, 8))
        changed = chat(model, [*talk[:-1], {"role": "user", "content": "How so, and since when?"}])
        turn = run(core, request(changed, 8))[0]
        assert turn.timings.cache_n == second.boundaries[0]
        assert turn.timings.prompt_n == len(changed) - second.boundaries[0]


def test_ten_turns_keep_more_and_more(setup: Setup) -> None:
    model = model_of(setup.path)
    talk: list[dict[str, str]] = []
    kept = []
    with core_of(setup) as core:
        for i in range(10):
            talk.append({"role": "user", "content": f"Tell me {i + 1} things about the sea."})
            prompt = chat(model, talk)
            turn = run(core, request(prompt, 20, ignore_eos=False))[0]
            timings = turn.timings
            assert timings.cache_n + timings.prompt_n == len(prompt)
            kept.append(timings.cache_n)
            talk.append({"role": "assistant", "content": turn.text})
            assert len(set(ends(core))) == len(ends(core))
    assert kept == sorted(set(kept))
    assert kept[-1] >= len(prompt) - 60


@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("k", [1, 2, 8])
def test_prompts_around_a_multiple_of_the_step_end(setup: Setup, k: int, shift: int) -> None:
    n = k * STEP + shift
    prompt = filler(model_of(setup.path), n, 3)
    with core_of(setup) as core:
        for expected in (0, n - 4):
            turn = run(core, request(prompt, 4))[0]  # drain raises where a step makes no progress
            assert turn.counts[:2] == (expected, n - expected)
            assert ends(core) == sorted({*range(STEP, n - 4, STEP), n - 4})
            assert core.target.n_decodes < n // setup.n_ubatch + 40


def test_a_boundary_that_is_no_place_for_one_is_passed_over(setup: Setup) -> None:
    prompt = Prompt(filler(model_of(setup.path), 50, 1).tokens, (0, 20, 20, 46, 50, 90))
    with core_of(setup) as core:
        assert run(core, request(prompt, 2))[0].counts[:2] == (0, 50)
        assert ends(core) == [20, 46]


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_the_shortest_prompts_are_served(setup: Setup, n: int) -> None:
    with core_of(setup) as core:
        prompt = filler(core.model, n, 1)
        turns = [run(core, request(prompt, 3))[0] for _ in range(2)]
        assert turns[0].tokens == turns[1].tokens
        assert ends(core) == ([1] if n == 5 else [])


# -- limits


def test_the_automatic_step_is_as_close_as_the_limits_allow() -> None:
    def taken(**options: int) -> list[int]:
        setup = Setup(WINDOW, n_ubatch=32, n_ctx=4096, checkpoints=CheckpointOptions(**options))
        with core_of(setup) as core:
            run(core, request(filler(core.model, 1100, 1), 1))
            return ends(core)

    assert taken() == [256, 512, 768, 1024, 1096]
    assert taken(n_max=8) == [512, 1024, 1096]
    # one is about 82 kB, so eight fit this budget: every 512 of 4096 once its size is known
    assert taken(ram_bytes=8 * 83_000) == [256, 768, 1096]


def test_the_number_per_slot_is_bounded_and_the_rest_stays_spread() -> None:
    options = CheckpointOptions(n_max=4, min_step=32)
    with core_of(Setup(WINDOW, n_ubatch=32, checkpoints=options)) as core:
        run(core, request(filler(core.model, 1028, 1), 1))
        kept = ends(core)
        assert len(kept) == 4
        assert kept[-1] == 1024
        assert max(np.diff([0, *kept])) <= 512
        assert core.checkpoints.counts.taken == 32
        assert core.checkpoints.counts.evicted == 28


def test_the_budget_is_over_all_slots_and_every_slot_keeps_its_newest() -> None:
    size = 448_684
    options = CheckpointOptions(min_step=128, ram_bytes=6 * size)
    with core_of(Setup(HYBRID, n_slots=3, n_ubatch=128, checkpoints=options)) as core:
        for id_slot in range(3):
            prompt = filler(core.model, 516, 1 + id_slot)
            run(core, request(prompt, 1, id_slot=id_slot))
            assert ends(core, id_slot)[-1] == 512
            assert sum(len(s.checkpoints) for s in core.slots) <= 6
        # least recently used gave first
        assert [len(s.checkpoints) for s in core.slots] == [1, 1, 4]
        assert counters(core)["checkpoint_bytes_memory"] == 6 * size


def test_one_that_alone_is_over_the_budget_is_not_taken() -> None:
    with core_of(KINDS["hybrid"].but(checkpoints=CheckpointOptions(ram_bytes=100_000))) as core:
        prompt = filler(core.model, 300, 1)
        first = run(core, request(prompt, 4))[0]
        assert ends(core) == []
        again = run(core, request(prompt, 4))[0]
        assert (again.timings.cache_kind, again.tokens) == ("none", first.tokens)


@pytest.mark.parametrize(
    ("at", "candidates", "dropped"),
    [
        ([100, 200, 210, 350], range(3), 1),  # 100..210 is the smallest hole
        ([10, 200, 300], range(2), 0),  # the first one's neighbour is the beginning
        ([100, 200, 300], [2], 2),
        ([100, 200, 205], range(3), 2),
    ],
)
def test_the_one_that_leaves_the_smallest_hole_goes(
    at: list[int], candidates: list[int], dropped: int
) -> None:
    checkpoints = [Checkpoint(n, 0, n - 1, SequenceState(b"")) for n in at]
    assert closest(checkpoints, candidates) == dropped


# -- what is told, what is freed


def test_slots_and_counters_tell_number_places_and_bytes(setup: Setup) -> None:
    with core_of(setup) as core:
        prompt = filler(core.model, 300, 1)
        run(core, request(prompt, 2))
        run(core, request(prompt, 2))
        facts = slot_facts(core, core.slots[0])
        told = facts["checkpoints"]
        assert isinstance(told, list)
        assert [c["n_tokens"] for c in told] == [64, 128, 192, 256, 296]
        assert [c["pos_max"] for c in told] == [63, 127, 191, 255, 295]
        assert {c["in"] for c in told} == {"memory"}
        total = sum(c["n_bytes"] for c in told)
        assert total == sum(c.state.n_bytes for c in core.slots[0].checkpoints)
        assert (facts["checkpoint_bytes_memory"], facts["checkpoint_bytes_files"]) == (total, 0)
        values = counters(core)
        assert values["checkpoints"] == 5
        assert values["checkpoint_bytes_memory"] == total
        assert (values["checkpoints_taken_total"], values["checkpoints_applied_total"]) == (5, 1)


def test_an_emptied_slot_holds_none(setup: Setup) -> None:
    with core_of(setup) as core:
        run(core, request(filler(core.model, 300, 1), 4))
        core.rollback.clear(core.slots[0])
        assert ends(core) == []
        assert len(core.slots[0].tokens) == core.target.n_tokens(0) == 0
        assert counters(core)["checkpoint_bytes_memory"] == 0


def test_checkpoints_past_the_new_prompt_are_void(setup: Setup) -> None:
    model = model_of(setup.path)
    a, other = filler(model, 344, 1).tokens, filler(model, 80, 2).tokens
    with core_of(setup) as core:
        run(core, request(a, 2))
        run(core, request([*a[:200], *other], 2))
        assert ends(core) == [64, 128, 192, 256, 276]
        # what lay at 256 and behind it was the other text's: it must not be found again
        assert run(core, request(a, 2))[0].timings.cache_n == 192


def test_a_request_without_cache_starts_from_nothing(setup: Setup) -> None:
    with core_of(setup) as core:
        prompt = filler(core.model, 300, 1)
        first = run(core, request(prompt, 8))[0]
        again = run(core, request(prompt, 8, cache_prompt=False))[0]
        assert again.counts[:2] == (0, 300)
        assert again.tokens == first.tokens


def test_drafting_off_for_one_request_leaves_the_next_ones_alone(setup: Setup) -> None:
    model = model_of(setup.path)
    prompt = filler(model, 300, 1)
    said = greedy(setup.path, [prompt], 24, n_ubatch=setup.n_ubatch)[0]
    plan = mixed({prompt.tokens: said}, model.n_vocab)
    drafting = setup.but(n_max=4, drafter=scripted(plan, 4, needs_checkpoints=True))
    with core_of(drafting) as core:
        off = run(core, request(prompt, 16, speculative=SpeculativeParams(type="none")))[0]
        on = run(core, request(prompt, 16))[0]
    assert off.timings.draft_n == 0
    assert on.timings.draft_n > 0
    assert off.tokens == on.tokens == said[:16]
