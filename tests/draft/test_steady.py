"""Machines on which another number of tokens makes a step slow: one length is kept, and changed where that pays."""

from __future__ import annotations

from statistics import mean

import pytest

from draft.calibration import Calibration
from draft.length import DraftLength
from draft.pace import Pace
from draft.step_costs import StepCosts
from draft.window import LengthPolicy
from tests.draft.simulation import FakeGuard, Simulation

# One H200, SmolLM2-135M: milliseconds by tokens in the batch, replayed; what the first two steps of a size take longer.
_REPLAYED = (1.1, 1.32, 1.4, 1.45, 1.5, 1.53, 1.58, 1.62, 3.6)
CHANGE_MS = (3.3, 5.5)


def captured(n_tokens: int) -> float:
    return _REPLAYED[n_tokens - 1] if n_tokens <= 9 else 3.6 + 0.03 * (n_tokens - 9)


def simulations(acceptance: float, n_rounds: int = 3000) -> list[Simulation]:
    return [
        Simulation(
            captured, lambda i: acceptance, draft_ms=0.3, n_rounds=n_rounds, seed=seed, change_ms=CHANGE_MS
        )
        for seed in range(3)
    ]


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.5, 0.6, 0.8, 0.95])
def test_near_the_best_fixed_length_and_never_slower_than_none(acceptance: float) -> None:
    machines = simulations(acceptance)
    fixed = [mean(s.fixed(k) for s in machines) for k in range(8)]
    adaptive = mean(s.adaptive() for s in machines)
    assert adaptive >= 0.98 * fixed[0]
    # A change must pay for itself soon, and to find out that it would takes drafts that are not verified.
    assert adaptive >= 0.85 * max(fixed)


def test_the_first_answers_of_a_process_lose_little() -> None:
    machines = simulations(0.3, n_rounds=600)
    assert mean(s.adaptive() for s in machines) >= 0.96 * mean(s.fixed(0) for s in machines)


def test_costs_of_a_change_are_told_apart_from_costs_of_the_size() -> None:
    costs = StepCosts()
    for n in (1, 2, 4, 8) * 3:
        costs.observe(n, captured(n))
    costs.change_takes(CHANGE_MS)
    for _ in range(100):
        for n in (1, 4):
            costs.observe(n, captured(n) + CHANGE_MS[0])
            costs.observe(n, captured(n) + CHANGE_MS[1])
            costs.observe(n, captured(n))
    assert [costs.ms(n) for n in (1, 2, 4)] == pytest.approx([captured(n) for n in (1, 2, 4)], rel=0.05)
    assert costs.change_ms == pytest.approx(sum(CHANGE_MS), rel=0.1)


def test_a_few_slow_steps_over_few_tokens_make_no_larger_batch_dear() -> None:
    costs = StepCosts()
    for n in (1, 2, 4, 8) * 3:
        costs.observe(n, captured(n))
    for _ in range(200):
        costs.observe(8, captured(8))
    for _ in range(3):
        costs.observe(6, 12.0)
    assert costs.ms(8) == pytest.approx(captured(8), rel=0.15)


def with_length(n: int) -> tuple[LengthPolicy, DraftLength]:
    """A policy in the middle of a text, whose steady length is n."""
    policy = LengthPolicy(Pace(rate=0.8, draft_ms={"": 0.3}), FakeGuard())
    for size in (1, 2, 4, 8, 9, 16, 48) * 3:
        policy.pace.costs.observe(size, captured(size))
    policy.pace.costs.change_takes(CHANGE_MS)
    policy.steady.n = n
    policy.begin_step(1)
    policy.steady.n = policy.steady.filled = n
    return policy, DraftLength(policy, {"": Calibration()}, 0)


@pytest.mark.parametrize("confidence", [0.01, 0.99])
def test_drafts_have_the_steady_length_whatever_the_confidence(confidence: float) -> None:
    policy, length = with_length(3)
    assert length.opens("")
    assert [length.goes_on(confidence) for _ in range(3)] == [True, True, False]
    assert length.keeps([1, 1, 1]) == 3
    assert policy.fill(3) == 3


def test_shorter_drafts_are_filled_up() -> None:
    policy, _ = with_length(3)
    assert [policy.fill(n) for n in (1, 0, 3)] == [3, 3, 3]


@pytest.mark.parametrize(("confidence", "n"), [(0.99, 40), (0.7, 0)])
def test_a_draft_from_text_alone_changes_the_length_only_where_that_pays(confidence: float, n: int) -> None:
    policy, length = with_length(0)
    assert length.chooses("", [1] * 40, confidence) == n
    assert policy.fill(n) == n


def test_a_long_draft_is_followed_by_one_of_its_length_at_no_charge() -> None:
    policy, length = with_length(0)
    policy.fill(40)
    assert length.chooses("", [1] * 12, 0.9) == 12
    assert policy.fill(12) == 40
    assert policy.fill(0) == 0


def test_another_number_of_slots_is_a_change_that_comes_anyway() -> None:
    policy, length = with_length(0)
    for _ in range(60):
        length._calibration = length._calibrations[""]
        length._calibration.drafted(0, 0.85)
        length._calibration.learn([0.85, 0.85], 2)
    for n_slots, expected in ((1, 0), (2, 8)):
        policy._drafting = {0: (length._calibrations[""], "")}
        policy.begin_step(n_slots)
        assert (policy.steady.n > 0) == (expected > 0)
