"""What steps teach: plain ones together as much as one by one, and drafting only in its own step."""

from __future__ import annotations

import pytest

from draft.pace import Pace
from draft.step_costs import StepCosts


def test_plain_steps_together_teach_as_much_as_one_by_one() -> None:
    pace, one_by_one = Pace(), StepCosts()
    for ms in [10.0] * 200 + [20.0] * 40:
        pace.begin_step(1)
        pace.end_step(1, ms, ms + 1.0, 1)
        one_by_one.observe(1, ms)
    assert pace.costs.ms(1) == pytest.approx(one_by_one.ms(1), rel=0.03)
    assert pace.own_ms[0] == pytest.approx(1.0, abs=0.02)
    assert 1 / 23 < pace.rate < 1 / 18


@pytest.mark.parametrize("n_drafts", [1, 20])
def test_drafting_beside_a_prompt_is_not_charged_to_the_next_step(n_drafts: int) -> None:
    pace = Pace()
    known = list(pace.own_ms)
    for _ in range(n_drafts):
        pace.begin_step(2)
        pace.drafted("model", 2, 5.0, 2.0)  # the step reads a prompt too, so nothing else is learnt from it
        pace.begin_step(2)
        learnt = pace.end_step(3, 10.0, 10.0 + known[True], 3)
        assert learnt is not None
    assert pace.own_ms == pytest.approx(known)


def test_a_step_with_a_draft_is_learnt_from_at_once_and_a_first_plain_one_too() -> None:
    pace = Pace()
    learnt = []
    for n_tokens in (1, 3, 1, *[1] * 16, 3):
        pace.begin_step(1)
        steps = pace.end_step(n_tokens, 10.0 * n_tokens, 10.0 * n_tokens, 1)
        learnt.append((steps.n, steps.n_tokens) if steps else None)
    assert learnt == [(1, 1), (1, 3), (1, 1), *[None] * 15, (16, 1), (1, 3)]


@pytest.mark.parametrize("n_slots", [1, 3])
def test_a_curve_is_what_steps_of_its_sizes_cost(n_slots: int) -> None:
    """Between the sizes seen, and beyond the largest."""
    costs = StepCosts()
    assert costs.curve(n_slots, 4).tolist() == [0.0] * 5
    for size in (1, 2, 5, 12):
        for _ in range(6):
            costs.observe(size, 10.0 + size)
    curve = costs.curve(n_slots, 20)
    assert curve == pytest.approx([costs.ms(n_slots * (1 + k)) for k in range(21)])
    assert curve[-1] > curve[0] > 0.0


def test_fast_steps_are_learnt_from_in_larger_groups() -> None:
    """What is learnt at once would take a good part of a step."""
    for ms, together in ((20.0, 16), (1.25, 20), (0.1, 32)):
        pace = Pace()
        taught = []
        for _ in range(200):
            pace.begin_step(1)
            learnt = pace.end_step(1, 0.9 * ms, ms, 1)
            taught.append(0 if learnt is None else learnt.n)
        assert set(taught[-100:]) == {0, together}
