"""The two-sample tests: silent for one distribution, loud for two."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from eval.distributions import chi_squared_tail, compare


def lot(weights: list[float], n: int, seed: int) -> Counter[object]:
    return Counter(random.Random(seed).choices(range(len(weights)), weights, k=n))


WEIGHTS = [0.5, 0.2, 0.1, 0.1, 0.05, *[0.005] * 10]


RARE = [0.2, *[0.001] * 800]


@pytest.mark.parametrize("weights", [WEIGHTS, RARE])
def test_lots_of_one_distribution_pass(weights: list[float]) -> None:
    p_values = [compare(lot(weights, 500, i), lot(weights, 700, 1000 + i)).p_value for i in range(200)]
    assert min(p_values) > 1e-4
    # and they are spread as p values are
    assert 0.35 < sum(p < 0.5 for p in p_values) / 200 < 0.65


def test_total_variation_of_one_distribution_is_about_what_is_expected() -> None:
    found = [compare(lot(WEIGHTS, 500, i), lot(WEIGHTS, 500, 1000 + i)) for i in range(100)]
    ratio = sum(c.variation for c in found) / sum(c.expected_variation for c in found)
    assert 0.9 < ratio < 1.1


def test_lots_of_two_distributions_are_told_apart() -> None:
    other = [0.3, 0.4, *WEIGHTS[2:]]
    assert compare(lot(WEIGHTS, 500, 1), lot(other, 500, 2)).p_value < 1e-4


def test_what_differs_among_rare_texts_alone_is_seen() -> None:
    other = [0.2, *[0.002, 0.0] * 400]
    assert compare(lot(RARE, 1000, 1), lot(other, 1000, 2)).p_value < 1e-4


def test_texts_that_only_one_side_says_are_told_apart() -> None:
    assert compare(Counter({"a": 100}), Counter({"b": 100})).p_value < 1e-9


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ValueError, match="no texts"):
        compare(Counter(), Counter({"a": 1}))


@pytest.mark.parametrize(
    ("chi", "freedom", "tail"),
    [(3.841, 1, 0.05), (18.307, 10, 0.05), (135.807, 100, 0.01), (59.703, 30, 0.001)],
)
def test_the_tail_is_the_tables(chi: float, freedom: int, tail: float) -> None:
    assert chi_squared_tail(chi, freedom) == pytest.approx(tail, rel=0.1)
