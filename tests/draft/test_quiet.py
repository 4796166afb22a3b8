"""Steps before which nobody is asked: more of them the longer nothing was found, none once something was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.quiet import QuietSteps

MOST = 15


def after(n_in_vain: int) -> QuietSteps:
    quiet = QuietSteps()
    for _ in range(n_in_vain):
        quiet.step(1)
        quiet.in_vain()
    return quiet


@pytest.mark.parametrize(
    ("n_in_vain", "n_quiet"), [(0, 0), (14, 0), (15, 1), (30, 1), (31, 2), (111, 7), (1000, 15)]
)
def test_how_many_steps_are_quiet_goes_by_how_long_nothing_was_found(n_in_vain: int, n_quiet: int) -> None:
    assert after(n_in_vain).in_vain() == n_quiet


def test_what_stood_ends_it() -> None:
    quiet = after(200)
    quiet.stood()
    assert quiet.in_vain() == 0


def test_a_new_request_is_looked_at_more_often() -> None:
    quiet = after(200)
    quiet.request_begins()
    assert 0 < quiet.in_vain() < MOST


@given(st.lists(st.integers(1, 3), min_size=1, max_size=40), st.integers(1, MOST))
def test_steps_are_quiet_while_the_same_number_of_slots_decodes(n_slots: list[int], n_steps: int) -> None:
    quiet = after(100)
    quiet.begin(n_steps)
    same = n_slots.index(next((n for n in n_slots if n != 1), 0)) if set(n_slots) != {1} else len(n_slots)
    said = [quiet.step(n) for n in n_slots]
    assert said == [i < min(same, n_steps) for i in range(len(n_slots))]


def test_prompt_tokens_end_it() -> None:
    quiet = after(100)
    quiet.begin(5)
    assert quiet.step(1)
    quiet.interrupted()
    assert not quiet.step(1)
