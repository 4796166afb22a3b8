"""Keyed random numbers: the same for the same key, and as good as independent for others."""

from __future__ import annotations

import numpy as np
import pytest

from spec_server.runtime.keyed_random import keyed_uniform, keyed_uniforms

N = 20_000
GOLDEN = [0.5790249744468666, 0.5393434884677732, 0.1752956097232744, 0.7762817045395104]
GOLDEN_IDS = [0.31476001213883686, 0.6434991795945307]


def test_the_key_alone_decides() -> None:
    assert keyed_uniform(7, 3) == keyed_uniform(7, 3)
    ids = np.array([9, 4, 9, 0], np.int32)
    numbers = keyed_uniforms(7, 3, ids)
    assert numbers[0] == numbers[2]
    assert keyed_uniforms(7, 3, ids[1:2])[0] == numbers[1]
    others = {keyed_uniform(8, 3), keyed_uniform(7, 4), keyed_uniform(7, 3, 1), *numbers.tolist()}
    assert keyed_uniform(7, 3) not in others
    assert len(others) == 6


def test_the_numbers_stay() -> None:
    """Stored conversations rely on them."""
    assert [
        keyed_uniform(s, p, t) for s, p, t in ((0, 0, 0), (42, 1, 0), (42, 1, 1), (-1, 2**40, 0))
    ] == GOLDEN
    assert keyed_uniforms(42, 1, np.array([0, 49151], np.int32)).tolist() == GOLDEN_IDS


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**63, -5])
def test_they_look_uniform_and_independent(seed: int) -> None:
    series = {
        "positions": np.array([keyed_uniform(seed, i) for i in range(N)]),
        "seeds": np.array([keyed_uniform(seed + i, 5) for i in range(N)]),
        "streams": np.array([keyed_uniform(seed, 5, i) for i in range(N)]),
        "ids": keyed_uniforms(seed, 5, np.arange(N, dtype=np.int32)),
    }
    for name, u in series.items():
        assert u.min() >= 0, name
        assert u.max() < 1, name
        counts, _ = np.histogram(u, 50, (0, 1))
        chi_square = float(((counts - N / 50) ** 2 / (N / 50)).sum())
        assert 15 < chi_square < 100, name  # 49 degrees of freedom: one in 10^5 outside
        for lag in (1, 2, 7):
            assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 5 / N**0.5, name
    names = list(series)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert abs(np.corrcoef(series[a], series[b])[0, 1]) < 5 / N**0.5, (a, b)


def test_draws_follow_the_distribution() -> None:
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    draws = np.searchsorted(np.cumsum(probs), [keyed_uniform(3, i) for i in range(N)], side="right")
    observed = np.bincount(draws, minlength=4) / N
    np.testing.assert_allclose(observed, probs, atol=0.015)
