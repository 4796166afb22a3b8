"""The guard against simulated machines whose drafting costs what no table of step costs foresees."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from draft.guard import DraftGuard


def rate(tokens_per_ms: Callable[[float, bool], float], n_steps: int = 20_000, seed: int = 0) -> float:
    """Tokens per ms over a run; `tokens_per_ms(t_ms, drafting)` is what the machine makes then."""
    guard, rng = DraftGuard(), random.Random(seed)
    ms = tokens = 0.0
    for _ in range(n_steps):
        drafting = guard.allows(1)
        n = rng.choice((1, 2, 3)) if drafting else 1
        step = n / tokens_per_ms(ms, drafting) * rng.uniform(0.9, 1.1)
        guard.observe(1, 4 if drafting else 1, n, step)
        ms, tokens = ms + step, tokens + n
    return tokens / ms


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_drafting_that_is_slower_than_none_costs_next_to_nothing(share: float) -> None:
    assert rate(lambda t, drafting: 0.1 * (share if drafting else 1.0)) >= 0.98 * 0.1


@pytest.mark.parametrize("gain", [1.0, 1.1, 1.5, 3.0])
def test_drafting_that_gains_is_left_alone(gain: float) -> None:
    """A plain block of six steps in every hundred and sixty is what looking costs."""
    assert rate(lambda t, drafting: 0.1 * (gain if drafting else 1.0)) >= 0.96 * 0.1 * gain


def test_drafting_comes_back_when_it_gains_again() -> None:
    half = 60_000.0
    made = rate(lambda t, drafting: 0.1 * ((0.8 if t < half else 2.0) if drafting else 1.0))
    assert made > 1.3 * 0.1


def test_a_few_long_drafts_that_fail_do_not_stop_drafting() -> None:
    """Each takes twenty plain steps; the rule has seen by then what they are worth."""
    guard, n_drafting = DraftGuard(), 0
    for i in range(1000):
        drafting = guard.allows(1)
        n_drafting += drafting
        fails = drafting and i < 12 and i % 2
        guard.observe(1, 49 if fails else 1, 1, 200.0 if fails else 10.0)
    assert n_drafting > 900


def test_a_longer_text_which_makes_every_step_slower_is_no_fault_of_drafting() -> None:
    """Drafting gains a tenth throughout; in every second text all steps take two thirds longer."""
    guard, n_drafting = DraftGuard(), 0
    for i in range(4000):
        drafting = guard.allows(1)
        n_drafting += drafting
        step = (10.0 if (i // 1000) % 2 == 0 else 17.0) / (1.1 if drafting else 1.0)
        guard.observe(1, 2 if drafting else 1, 1, step)
    assert n_drafting > 3600


def test_a_draft_that_could_not_gain_if_all_of_it_stood_is_not_made_for_long() -> None:
    guard, n_drafting = DraftGuard(), 0
    for _ in range(2000):
        drafting = guard.allows(8)
        n_drafting += drafting
        guard.observe(8, 20 if drafting else 8, 12 if drafting else 8, 60.0 if drafting else 5.0)
    assert n_drafting < 40


def test_numbers_of_slots_are_judged_apart() -> None:
    guard = DraftGuard()
    drafted = {1: 0, 8: 0}
    for _ in range(1000):
        for n_slots in drafted:
            drafting = guard.allows(n_slots)
            drafted[n_slots] += drafting
            with_drafts = 1.0 if n_slots == 1 else 20.0
            guard.observe(
                n_slots, 2 * n_slots if drafting else n_slots, n_slots, with_drafts if drafting else 2.0
            )
    assert drafted[1] > 900
    assert drafted[8] < 50
