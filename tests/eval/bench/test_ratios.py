"""Ratios and intervals of hand-made rounds."""

from __future__ import annotations

import math

import pytest

from eval.bench.ratios import estimate, geometric_mean, log_ratios, quantile, t975


def test_only_rounds_that_both_have_are_paired():
    logs = log_ratios({0: 20.0, 1: 30.0, 3: 5.0}, {0: 10.0, 1: 10.0, 2: 7.0})
    assert logs == pytest.approx([math.log(2), math.log(3)])


def test_a_machine_that_slows_both_down_leaves_no_trace():
    found = estimate(log_ratios({0: 20.0, 1: 10.0, 2: 2.0}, {0: 10.0, 1: 5.0, 2: 1.0}))
    assert (found.ratio, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert found.n_rounds == 3


def test_the_interval_is_students():
    # Logs 0, 0.1, 0.2: mean 0.1, standard error 0.1 / sqrt(3), two degrees of freedom.
    found = estimate([0.0, 0.1, 0.2])
    half = 4.303 * 0.1 / math.sqrt(3)
    assert math.log(found.ratio) == pytest.approx(0.1)
    assert math.log(found.low) == pytest.approx(0.1 - half)
    assert math.log(found.high) == pytest.approx(0.1 + half)


def test_one_round_has_no_interval_and_none_has_no_ratio():
    found = estimate([math.log(3)])
    assert found.ratio == pytest.approx(3.0)
    assert (found.low, found.high, found.n_rounds) == (None, None, 1)
    assert estimate([]) is None
    assert geometric_mean([[0.1], []]) is None
    assert geometric_mean([]) is None


def test_every_workload_weighs_the_same():
    found = geometric_mean([[math.log(4)] * 2, [0.0] * 10])
    assert found.ratio == pytest.approx(2.0)
    assert found.n_rounds == 12


def test_unlike_workloads_do_not_widen_the_interval_and_noisy_rounds_do():
    steady = geometric_mean([[1.0, 1.01], [0.0, 0.01]])
    noisy = geometric_mean([[1.0, 1.4], [0.0, 0.4]])
    assert steady.high / steady.low < 1.1
    assert noisy.high / noisy.low > 1.5


def test_two_groups_of_equal_spread_have_the_degrees_of_both():
    # Variance 0.02 each, two rounds each: standard error sqrt(2 * 0.02 / 2 / 4), two degrees of freedom.
    found = geometric_mean([[0.0, 0.2], [1.0, 1.2]])
    assert math.log(found.high / found.low) == pytest.approx(2 * 4.303 * math.sqrt(0.005))


def test_the_ninety_five_percent_interval_covers_as_often_as_it_says():
    import random

    rng = random.Random(7)
    covered = 0
    for _ in range(1000):
        found = geometric_mean([[rng.gauss(0.3, 0.1 * (1 + group)) for _ in range(6)] for group in range(5)])
        covered += found.low <= math.exp(0.3) <= found.high
    assert 930 <= covered <= 985


@pytest.mark.parametrize(
    ("degrees", "point"), [(1, 12.706), (1.9, 12.706), (30, 2.042), (31, 1.96), (0.5, 12.706)]
)
def test_degrees_are_rounded_towards_the_wider_interval(degrees, point):
    assert t975(degrees) == point


def test_quantiles_are_values_that_occurred():
    values = [float(value) for value in range(100, 0, -1)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert quantile([], 0.5) == 0.0
