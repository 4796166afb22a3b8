"""Which drafted tokens stand, and which token follows them. Pure: numpy, and nothing of ours but keyed numbers.

A round has k drafted tokens and k + 1 target distributions; row i follows the first i drafted tokens. A
distribution is a pair (ids [n], probs [n]): the candidates that the request's sampler chain leaves, ids
ascending, probs summing to 1. `target(i)` gives row i; rules ask for no more rows than they need. Every rule
returns the accepted tokens and one more: recovered from a rejection, or the bonus behind a draft that stands whole.

Each rule is lossless: whatever the drafter, the text is distributed as the target's own. `accept_tokens` and
`accept_block` need drafted[i] to be drawn from proposals[i], and numbers that had no say in the draw. A draft
may end anywhere, by any rule that looks at the tokens in it and at distributions; not by one that draws a
token and then drops it, since what is kept is then no longer drawn from the proposal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spec_server.runtime.keyed_random import keyed_uniform, keyed_uniforms

Ids = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
Distribution = tuple[Ids, Doubles]
Target = Callable[[int], Distribution]
Uniform = Callable[[int], float]  # in [0, 1); number i judges drafted[i], number k draws

# Streams of keyed numbers: what draws a draft, what judges it, and the noise that a coupling shares.
_DRAFT, _ACCEPT, _COUPLED = 1, 2, 3
_N_STREAMS = 4
_MANY = 1024  # candidates from which on a table of the vocabulary is quicker than a search


# -- the rules


def match(target: Target, drafted: Sequence[int], pick: Callable[[int, Distribution], int]) -> list[int]:
    """The target picks row by row, by `pick(i, row i)`, as without drafts; a drafted token that is picked stands.

    With `race` as the pick of both sides this is the coupling: target and draft look at the same noise and
    mostly agree, and no text depends on what was drafted.
    """
    tokens: list[int] = []
    for i in range(len(drafted) + 1):
        tokens.append(pick(i, target(i)))
        if i < len(drafted) and tokens[i] != drafted[i]:
            break
    return tokens


def accept_tokens(
    target: Target, drafted: Sequence[int], proposals: Sequence[Distribution], uniform: Uniform
) -> list[int]:
    """Token by token: accept x with min(1, p(x) / q(x)), else draw from max(p - q, 0) and end.

    Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023
    (arXiv:2211.17192), algorithm 1; Chen et al., arXiv:2302.01318.
    """
    k = len(drafted)
    for i, token in enumerate(drafted):
        p, q = target(i), proposals[i]
        if uniform(i) * probability(q, token) >= probability(p, token):
            return [*drafted[:i], draw(residual(p, q), uniform(k))]
    return [*drafted, draw(target(k), uniform(k))]


def accept_block(
    target: Target, drafted: Sequence[int], proposals: Sequence[Distribution], uniform: Uniform
) -> list[int]:
    """The block as a whole: the longest prefix that stands, found from the end.

    Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami, Suresh, "Block Verification Accelerates Speculative
    Decoding", ICLR 2025 (arXiv:2403.10444), algorithm 2. On average it accepts at least as many tokens as
    `accept_tokens`, since a likely token makes up for an unlikely one before it.
    """
    k = len(drafted)
    weights, chances = block_chances(target, drafted, proposals)
    for n in range(len(chances), 0, -1):
        if uniform(n - 1) < chances[n - 1]:
            break
    else:
        n = 0
    if n == k:
        return [*drafted, draw(target(k), uniform(k))]
    return [*drafted[:n], draw(residual(target(n), proposals[n], weights[n]), uniform(k))]


def block_chances(
    target: Target, drafted: Sequence[int], proposals: Sequence[Distribution]
) -> tuple[list[float], list[float]]:
    """(weights, chances): chances[n - 1] that the first n tokens stand, given that no longer prefix does.

    weights[n] is the probability that at least n stand, given those n; weights[0] = 1. Both end where a
    weight is 0: nothing stands from there on. With w = weights[n] and the overlap a = sum(min(w p, q)) of row
    n, a longer prefix stands with probability a, so w = a + (1 - a) * chance gives the chance.
    """
    k = len(drafted)
    weights, chances = [1.0], []
    for i, token in enumerate(drafted):
        q_x = probability(proposals[i], token)
        w = min(1.0, weights[i] * probability(target(i), token) / q_x) if q_x > 0.0 else 0.0
        weights.append(w)
        if w == 0.0:
            break
        if i + 1 == k:
            chances.append(w)
            break
        rest = 1.0 - overlap(target(i + 1), proposals[i + 1], w)
        # Where w is 1 and row i + 1 the same on both sides the next token always stands; this is never used.
        chances.append(1.0 - (1.0 - w) / rest if rest > 1.0 - w else 0.0)
    return weights, chances


# -- distributions


def point(token: int) -> Distribution:
    """What a drafter proposes that cannot propose anything else."""
    return np.array([token]), np.array([1.0])


def probability(distribution: Distribution, token: int) -> float:
    ids, probs = distribution
    at = int(ids.searchsorted(token))
    return float(probs[at]) if at < len(ids) and ids[at] == token else 0.0


def residual(p: Distribution, q: Distribution, weight: float = 1.0) -> Distribution:
    """max(weight * p - q, 0) over p's candidates, not normalised; p itself where rounding leaves nothing."""
    ids, probs = p
    rest = np.maximum(weight * probs - _at(ids, q), 0.0)
    return (ids, rest) if rest.any() else p


def overlap(p: Distribution, q: Distribution, weight: float) -> float:
    """sum(min(weight * p, q))."""
    ids, probs = p
    return float(np.minimum(weight * probs, _at(ids, q)).sum())


def draw(distribution: Distribution, uniform: float) -> int:
    """By inverting the cumulative sum; probs need not be normalised, and one of 0 never comes out."""
    ids, probs = distribution
    sums = probs.cumsum()
    return int(ids[min(int(sums.searchsorted(uniform * sums[-1], side="right")), _last(probs))])


def _last(probs: Doubles) -> int:
    """The last candidate that can come out."""
    return len(probs) - 1 if probs[-1] > 0.0 else int(probs.nonzero()[0][-1])


def _at(ids: Ids, other: Distribution) -> Doubles:
    """The other distribution's probabilities of `ids`, [n], 0 where it lacks one."""
    other_ids, probs = other
    if len(ids) * len(other_ids) > _MANY**2:
        dense = np.zeros(max(int(ids[-1]), int(other_ids[-1])) + 1)
        dense[other_ids] = probs
        found: Doubles = dense[ids]
        return found
    at = np.minimum(other_ids.searchsorted(ids), len(other_ids) - 1)
    return np.where(other_ids[at] == ids, probs[at], 0.0)


# -- keyed numbers


def race(distribution: Distribution, seed: int, position: int) -> int:
    """argmax(log p + g) with a Gumbel number g for each token id at this position, keyed by the seed.

    Gumbel-max sampling, written as argmax(log(u) / p): the same token by one logarithm. Another distribution
    picks the same token by the same numbers with a probability of at least (1 - d) / (1 + d), d being their
    total variation distance (Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant
    Speculative Decoding", arXiv:2408.07978).
    """
    ids, probs = distribution
    if len(ids) == 1:
        return int(ids[0])
    with np.errstate(divide="ignore"):
        return int(ids[(np.log(keyed_uniforms(seed, position, ids, _COUPLED)) / probs).argmax()])


def draft_number(seed: int, position: int, i: int) -> float:
    """What draws drafted[i] of a round that begins at `position`.

    Keyed by the round, not by the token's own position: a rejected token's place comes again in the next
    round, and must not meet the numbers that had a say in the rejection.
    """
    return keyed_uniform(seed, position, _DRAFT + _N_STREAMS * i)


def accept_number(seed: int, position: int, i: int) -> float:
    """Number i that judges such a round, as `Uniform` has it."""
    return keyed_uniform(seed, position, _ACCEPT + _N_STREAMS * i)
