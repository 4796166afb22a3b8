"""Sums and comparisons of hand-made turns."""

from __future__ import annotations

import dataclasses

import pytest

from eval.client import Turn
from eval.measure import summarise

ONE = Turn("a", 10, 90, 64, 30, 20, 10, 5.0, 500.0, 12.0)
TWO = Turn("b", 20, 80, 60, 40, 30, 20, 6.0, 600.0, 20.0)
THREE = Turn("c", 30, 70, 50, 30, 10, 30, 7.0, 700.0, 13.0)


def test_counts_are_summed_and_times_are_medians():
    summary = summarise([ONE, TWO, THREE], [ONE, TWO, THREE])
    assert (summary.prompt_n, summary.cache_n, summary.predicted_n) == (60, 240, 174)
    assert (summary.draft_n, summary.draft_n_accepted) == (100, 60)
    assert summary.draft_prompt_n == 60
    assert summary.acceptance_rate == 0.6
    assert summary.first_token_ms == 13.0
    assert (summary.n_equal_counts, summary.n_equal_texts) == (3, 3)


@pytest.mark.parametrize("name", ["prompt_n", "cache_n", "draft_n", "draft_n_accepted", "draft_prompt_n"])
def test_one_count_that_differs_is_seen(name):
    other = dataclasses.replace(TWO, **{name: getattr(TWO, name) + 1})
    summary = summarise([ONE, other, THREE], [ONE, TWO, THREE])
    assert (summary.n_equal_counts, summary.n_equal_texts) == (2, 3)


def test_errors_that_cancel_in_the_sums_are_seen():
    up, down = dataclasses.replace(ONE, draft_n=31), dataclasses.replace(TWO, draft_n=39)
    summary = summarise([up, down], [ONE, TWO])
    assert summary.draft_n == 70
    assert summary.n_equal_counts == 0


def test_a_text_that_differs_is_seen():
    other = dataclasses.replace(TWO, text="b ")
    summary = summarise([ONE, other], [ONE, TWO])
    assert (summary.n_equal_counts, summary.n_equal_texts) == (2, 1)


def test_nothing_drafted_has_no_rate():
    plain = dataclasses.replace(ONE, draft_n=0, draft_n_accepted=0)
    assert summarise([plain], [plain]).acceptance_rate is None


def test_rows_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="longer"):
        summarise([ONE], [ONE, TWO])
    with pytest.raises(ValueError, match="without turns"):
        summarise([], [])
