"""The parts that acceptance rules are made of, on distributions small enough to check by hand and on large ones."""

from __future__ import annotations

import numpy as np
import pytest

from spec_server.engine import verify
from spec_server.engine.verify import Distribution


def dist(**probs: float) -> Distribution:
    """dist(t2=0.5, t7=0.5)."""
    return np.array([int(name[1:]) for name in probs]), np.array(list(probs.values()))


P = dist(t1=0.5, t4=0.3, t9=0.2)
Q = dist(t1=0.1, t5=0.6, t9=0.3)


def test_probability_is_zero_for_what_is_no_candidate() -> None:
    assert [verify.probability(P, t) for t in (0, 1, 4, 5, 9, 10)] == [0.0, 0.5, 0.3, 0.0, 0.2, 0.0]


def test_the_residual_is_what_the_proposal_leaves_over() -> None:
    ids, rest = verify.residual(P, Q)
    assert ids.tolist() == [1, 4, 9]
    assert rest == pytest.approx([0.4, 0.3, 0.0])
    assert verify.residual(P, Q, 0.5)[1] == pytest.approx([0.15, 0.15, 0.0])


def test_the_residual_of_equal_distributions_is_the_distribution() -> None:
    # Rounding may ask for it all the same.
    assert verify.residual(P, P) is P


def test_the_overlap_is_what_both_sides_have() -> None:
    assert verify.overlap(P, Q, 1.0) == pytest.approx(0.3)
    assert verify.overlap(P, Q, 0.5) == pytest.approx(0.2)
    assert verify.overlap(P, P, 1.0) == pytest.approx(1.0)


def test_large_distributions_are_compared_as_small_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    big = []
    for _ in range(2):
        ids = np.sort(rng.choice(9000, 3000, replace=False))
        probs = rng.random(3000)
        big.append((ids, probs / probs.sum()))
    fast = verify.residual(big[0], big[1])[1], verify.overlap(big[0], big[1], 0.7)
    monkeypatch.setattr(verify, "_MANY", 10**6)
    assert (verify.residual(big[0], big[1])[1] == fast[0]).all()
    assert verify.overlap(big[0], big[1], 0.7) == fast[1]


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.49, 1), (0.5, 4), (0.79, 4), (0.81, 9), (1 - 1e-16, 9)]
)
def test_a_draw_inverts_the_cumulative_sum(uniform: float, token: int) -> None:
    assert verify.draw(P, uniform) == token


def test_a_candidate_of_probability_zero_never_comes_out() -> None:
    edges = dist(t1=0.0, t2=0.7, t3=0.0, t4=0.0)
    assert {verify.draw(edges, u) for u in (0.0, 0.3, 0.999999, 1.0)} == {2}


@pytest.mark.parametrize("accept", [verify.accept_tokens, verify.accept_block])
def test_what_the_target_excludes_is_never_accepted(accept: verify.Any) -> None:
    for n_wrong in range(3):
        drafted = [1, 1, 1]
        drafted[n_wrong] = 5
        tokens = accept(lambda i: P, drafted, [Q] * 3, lambda i: 0.0)
        assert 5 not in tokens
        assert len(tokens) <= n_wrong + 1


@pytest.mark.parametrize("accept", [verify.accept_tokens, verify.accept_block])
def test_an_empty_draft_gives_one_token_of_the_target(accept: verify.Any) -> None:
    assert accept(lambda i: P, [], [], lambda i: 0.6) == [4]


def test_no_row_behind_a_rejection_is_computed() -> None:
    asked: list[int] = []

    def target(i: int) -> Distribution:
        asked.append(i)
        return P

    assert verify.accept_tokens(target, [1, 5, 1], [Q] * 3, lambda i: 0.0)[:1] == [1]
    assert max(asked) == 1
    asked.clear()
    verify.accept_block(target, [1, 5, 1], [Q] * 3, lambda i: 0.0)
    assert max(asked) == 1


def test_a_weight_is_the_probability_that_at_least_so_many_stand() -> None:
    drafted = [1, 9, 1]
    weights, chances = verify.block_chances(lambda i: P, drafted, [Q] * 3)
    at_least = [0.0] * 5
    none_longer = 1.0
    for n in (3, 2, 1):
        at_least[n] = at_least[n + 1] + none_longer * chances[n - 1]
        none_longer *= 1.0 - chances[n - 1]
    # Over what is drafted behind n tokens, not for this draft alone, so that only the last is equal.
    assert at_least[3] == pytest.approx(weights[3])
    assert weights == pytest.approx([1.0, 1.0, 0.2 / 0.3, 1.0])


# -- keyed numbers


def test_a_race_picks_with_the_distributions_probabilities() -> None:
    n = 20_000
    picked = np.array([verify.race(P, seed, 3) for seed in range(n)])
    for token, p in zip(*P, strict=True):
        assert abs((picked == token).mean() - p) < 4 * np.sqrt(p * (1 - p) / n)


def test_a_race_is_won_by_the_same_token_whoever_else_runs() -> None:
    """A winner wins among any of those it beat: that is what couples a draft with the target."""
    rng = np.random.default_rng(2)
    ids, probs = np.arange(50), rng.random(50)
    for seed in range(200):
        winner = verify.race((ids, probs), seed, 1)
        some = np.union1d(rng.choice(50, 10, replace=False), [winner])
        assert verify.race((some, probs[some]), seed, 1) == winner


def test_races_at_different_positions_have_nothing_to_do_with_each_other() -> None:
    equal = sum(verify.race(P, s, 1) == verify.race(P, s, 2) for s in range(4000)) / 4000
    assert abs(equal - float((P[1] ** 2).sum())) < 0.04


def test_what_draws_a_draft_says_nothing_of_what_judges_it() -> None:
    n = 4000
    draws = np.array([[verify.draft_number(s, 9, i) for i in range(3)] for s in range(n)])
    judges = np.array([[verify.accept_number(s, 9, i) for i in range(4)] for s in range(n)])
    both = np.concatenate([draws, judges], axis=1)
    assert abs(np.corrcoef(both.T) - np.eye(7)).max() < 0.07
    assert abs(both.mean(axis=0) - 0.5).max() < 0.02
