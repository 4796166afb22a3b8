"""The draft length rule in the engine: it changes how much is drafted, never what is said."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from draft.guard import DraftGuard
from draft.pace import Pace
from draft.step_costs import StepCosts
from draft.window import LengthPolicy
from spec_server.engine.core import EngineCore
from spec_server.engine.warmup import measure_step_costs
from tests.draft.setups import CHAIN, MTP, SIMPLE, Kind, drafting, prompts, repeating, room
from tests.engine.harness import HYBRID, WINDOW, request, run

MODEL = Kind(("draft-simple",), WINDOW, WINDOW)  # its own draft model: every draft stands
KINDS = (MTP, SIMPLE, CHAIN, MODEL, Kind(("draft-simple",), HYBRID, WINDOW))


def ruled(kind: Kind, policy: LengthPolicy) -> Kind:
    return replace(kind, options={"policy": policy})


def with_rule(core: EngineCore, policy: LengthPolicy) -> None:
    core.speculation.policy = policy
    measure_step_costs(core.target, policy.pace.costs)


class FakeCosts(StepCosts):
    """A step over n tokens takes 1 + marginal (n - 1) times 10 ms, whatever the clock says."""

    def __init__(self, marginal: float, change_ms: float = 0.0) -> None:
        super().__init__()
        self.marginal = marginal
        self.change_takes((change_ms, 0.0))

    def observe(self, n_tokens: int, ms: float, n_steps: int = 1) -> None:
        pass

    def ms(self, n_tokens: int) -> float:
        return 10.0 * (1 + self.marginal * (n_tokens - 1))

    def curve(self, n_slots: int, n_draft: int) -> npt.NDArray[np.float64]:
        return np.array([self.ms(n_slots * (1 + k)) for k in range(n_draft + 1)])


class FakeGuard(DraftGuard):
    """Never in the way."""

    def allows(self, n_slots: int) -> bool:
        return True


class FakePace(Pace):
    """A machine of the test's making, which makes a token in 10 ms, whatever the clock says."""

    def end_step(self, n_tokens: int, target_ms: float, wall_ms: float, n_gained: int) -> None:
        pass

    def drafted(self, drafter: str, n_steps: int, ms: float, last_ms: float, lag_ms: float = 0.0) -> None:
        pass


def machine(marginal: float, change_ms: float = 0.0) -> LengthPolicy:
    costs = FakeCosts(marginal, change_ms)
    return LengthPolicy(FakePace(costs, draft_ms={"draft-simple": 1.0}, rate=0.1), FakeGuard())


def recorded_sizes(core: EngineCore) -> list[int]:
    """Grows by the batch size of every step that only decodes."""
    sizes: list[int] = []
    end_step = core.speculation.end_step

    def record(n_tokens: int, *rest: float) -> None:
        sizes.append(n_tokens)
        end_step(n_tokens, *rest)  # type: ignore[arg-type]

    core.speculation.end_step = record  # type: ignore[method-assign]
    return sizes


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
def test_text_is_the_same_with_the_rule_as_without_a_drafter(kind: Kind) -> None:
    with drafting(Kind(("none",), kind.path)) as core:
        plain = [run(core, request(p, 48))[0].text for p in prompts(kind, 4)]
    policy = LengthPolicy()
    with drafting(ruled(kind, policy), n_max=8) as core:
        with_rule(core, policy)
        assert [run(core, request(p, 48))[0].text for p in prompts(kind, 4)] == plain


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
@pytest.mark.parametrize("n_slots", [1, 3])
def test_where_changes_are_dear_all_drafts_are_filled_up_to_one_length(kind: Kind, n_slots: int) -> None:
    """What fills them is never part of the text."""
    asked = prompts(kind, 3)
    with drafting(Kind(("none",), kind.path), n_slots=n_slots) as core:
        plain = [done.text for done in run(core, *(request(p, 64) for p in asked))]
    policy = machine(0.02, change_ms=40.0)
    with drafting(ruled(kind, policy), n_max=8, n_slots=n_slots) as core:
        with_rule(core, policy)
        policy.pace.costs = FakeCosts(0.02, change_ms=40.0)
        policy.steady.n = 4
        sizes = recorded_sizes(core)
        done = run(core, *(request(p, 64) for p in asked))
    assert [d.text for d in done] == plain
    if kind is MODEL:  # n-grams may be longer, and recurrent memory first reads what it took back
        assert sum(a != b for a, b in pairwise(sizes)) < 0.3 * len(sizes)
        assert max(sizes) > 2 * n_slots
    assert all(d.timings.draft_n <= 8 * d.timings.n_decodes for d in done)


def test_where_every_draft_stands_and_verifying_is_cheap_drafts_are_long() -> None:
    policy = machine(0.02)
    with drafting(ruled(MODEL, policy), n_max=8) as core:
        core.speculation.policy = policy
        timings = run(core, request(prompts(MODEL, 1)[0], 96))[0].timings
    assert timings.draft_n_accepted / timings.n_drafts > 5


def test_where_verifying_costs_as_much_as_a_step_drafts_are_rare() -> None:
    policy = machine(1.0)
    with drafting(ruled(MODEL, policy), n_max=8) as core:
        core.speculation.policy = policy
        timings = run(core, request(prompts(MODEL, 1)[0], 96))[0].timings
    assert timings.draft_n <= 0.1 * timings.predicted_n


def test_a_slot_that_rests_catches_up_without_counting_it_as_a_lost_state() -> None:
    policy = machine(1.0)
    with drafting(ruled(MODEL, policy), n_max=8) as core:
        core.speculation.policy = policy
        prompt = prompts(MODEL, 1)[0]
        run(core, request(prompt, 40))
        lagging = core.drafter.n_tokens(0) < len(core.slots[0].tokens)
        policy.pace.costs = FakeCosts(0.02)
        timings = run(core, request((*core.slots[0].tokens.view().tolist(), 300), 40))[0].timings
    assert lagging
    assert timings.draft_n > 0
    assert timings.draft_prompt_n == 0


@pytest.mark.parametrize("kind", [MTP, MODEL, CHAIN], ids=lambda kind: kind.id)
def test_what_was_learnt_travels_with_the_draft_state(kind: Kind) -> None:
    policy = machine(0.02)
    with drafting(ruled(kind, policy), n_max=8) as core:
        core.speculation.policy = policy
        run(core, request(repeating(kind), 64))
        drafter, tokens = core.drafter, core.slots[0].tokens.view().copy()
        state = drafter.capture(0, room(drafter.state_size(0, partial=False)), partial=False)
        fit, state = drafter.fit(0), replace(state, context=bytes(state.context), spec=bytes(state.spec))
        taught = drafter._pack(0)  # type: ignore[attr-defined]
    with drafting(kind, n_max=8) as core:  # fixed lengths: the block fits all the same
        fresh = core.drafter._pack(0)  # type: ignore[attr-defined]
        assert core.drafter.unfit(fit, len(tokens), len(state.context), len(state.spec)) is None
        core.drafter.apply(0, state, tokens, partial=False)
        assert core.drafter._pack(0) == taught != fresh  # type: ignore[attr-defined]


def test_a_draft_that_the_end_of_the_answer_cuts_is_no_rejection() -> None:
    """The drafter is the target itself, so nothing it drafts is ever wrong."""
    policy = machine(0.02)
    with drafting(ruled(MODEL, policy), n_max=8) as core:
        core.speculation.policy = policy
        prompt = prompts(MODEL, 1)[0]
        text = run(core, request(prompt, 48))[0].text
        for at in range(10, 40, 3):
            core.finisher.release(core.slots[0])
            run(core, request(prompt, 48, stop=(text[at : at + 4],)))
        calibration = core.drafter._overall["draft-simple"]  # type: ignore[attr-defined]
    assert sum(calibration._seen) > 30
    assert sum(calibration._accepted) == sum(calibration._seen)


def test_a_restore_without_a_draft_forgets_what_the_former_text_taught() -> None:
    with drafting(MODEL, n_max=8) as core:
        drafter = core.drafter
        fresh = drafter._pack(0)  # type: ignore[attr-defined]
        drafter._calibrations[0]["draft-simple"]._seen = [100.0] * 40  # type: ignore[attr-defined]
        drafter.truncate(0, 0)
        assert drafter._pack(0) == fresh  # type: ignore[attr-defined]
