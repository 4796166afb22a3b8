"""Toy models whose every text has a probability that can be computed, and two ways to run a sampler on them.

A model is a function from the text so far to a distribution over N_VOCAB tokens, through a sampler chain
written here in plain numpy. `exact` follows every branch of an acceptance rule and multiplies; `simulate`
draws texts by the samplers themselves, with their keyed numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from draft.base import Distribution, Draft, DraftRequest
from draft.growing import GrowingDraft
from spec_server.engine import verify
from spec_server.engine.sample import AcceptSampler, MatchSampler

N_VOCAB = 5
Text = tuple[int, ...]
Model = Callable[[Text], Distribution]
Drafter = Callable[[Text], Distribution | None]  # None: the draft ends here
Accept = Callable[..., list[int]]


# -- models


@dataclass(frozen=True)
class Chain:
    """A request's sampling parameters; `penalty` is taken off the logit of every token that the text holds."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: float = 0.0

    def distribution(self, logits: np.ndarray, text: Text) -> Distribution:
        x = logits.astype(float)
        x[list(set(text))] -= self.penalty
        order = np.argsort(-x)
        if self.top_k:
            order = order[: self.top_k]
        p = np.exp(x[order] - x[order[0]])
        p /= p.sum()
        n_top_p = int(np.searchsorted(np.cumsum(p), self.top_p)) + 1
        keep = (np.arange(len(p)) < n_top_p) & (p >= self.min_p * p[0])
        order = np.sort(order[keep])
        q = np.exp((x[order] - x[order].max()) / self.temperature)
        return order, q / q.sum()


CHAINS = {
    "cold": Chain(0.3),
    "top_k": Chain(0.7, top_k=3),
    "top_p": Chain(1.0, top_p=0.8),
    "min_p": Chain(1.2, min_p=0.2),
    "penalties": Chain(1.5, penalty=1.0),
    "all": Chain(0.8, top_k=4, top_p=0.95, min_p=0.05, penalty=0.5),
}


def model(
    seed: int, chain: Chain, *, spread: float = 1.5, near: int | None = None, noise: float = 0.0
) -> Model:
    """A Markov model of order one with random logits; with `near` those of that seed, shaken by `noise`."""
    table = np.random.default_rng(seed if near is None else near).normal(0.0, spread, (N_VOCAB, N_VOCAB))
    if near is not None:
        table = table + np.random.default_rng(seed).normal(0.0, noise, table.shape)
    return lru_cache(maxsize=None)(lambda text: chain.distribution(table[text[-1] if text else 0], text))


def drafters(target: Model, chain: Chain) -> dict[str, Drafter]:
    """Good, bad and hostile ones."""

    def hostile(text: Text) -> Distribution:
        """Most of its weight where the target has least, none where the target has most."""
        ids, probs = target(text)
        q = np.full(N_VOCAB, 1.0)
        q[ids] = (1.0 - probs) ** 8 / 8
        q[ids[probs.argmax()]] = 0.0
        left = q.nonzero()[0]
        return left, q[left] / q[left].sum()

    def certain(text: Text) -> Distribution:
        return verify.point((3 * sum(text) + len(text)) % N_VOCAB)

    def fickle(text: Text) -> Distribution | None:
        """Ends behind some tokens, and before some distributions."""
        q = near(text)
        return None if text and (text[-1] == 2 or q[1].max() > 0.8) else q

    near = model(11, chain, near=1, noise=0.5)
    return {
        "same": target,
        "near": near,
        "far": model(12, replace(chain, top_p=1.0, min_p=0.0)),
        "hostile": hostile,
        "certain": certain,
        "fickle": fickle,
    }


def text_probabilities(target: Model, n_tokens: int) -> dict[Text, float]:
    """Of every text of that length, by plain sampling."""
    known: dict[Text, float] = {(): 1.0}
    for _ in range(n_tokens):
        known = {
            (*text, int(token)): weight * p
            for text, weight in known.items()
            for token, p in zip(*target(text), strict=True)
        }
    return known


# -- following every branch


class _Branches:
    """Runs a function once per way that its chances may fall; the weights of the runs add up to 1."""

    def __init__(self) -> None:
        self._plan: list[bool] = []
        self._taken: list[tuple[bool, bool]] = []  # (what was decided, whether it is the second way)
        self.weight = 1.0

    def decide(self, p: float) -> bool:
        if p <= 0.0 or p >= 1.0:
            return p >= 1.0
        at = len(self._taken)
        yes = self._plan[at] if at < len(self._plan) else True
        self._taken.append((yes, not yes))
        self.weight *= p if yes else 1.0 - p
        return yes

    def runs(self, function: Callable[[], Any]) -> Iterator[tuple[float, Any]]:
        while True:
            self._taken, self.weight = [], 1.0
            result = function()
            yield self.weight, result
            while self._taken and self._taken[-1][1]:
                self._taken.pop()
            if not self._taken:
                return
            self._plan = [yes for yes, _ in self._taken[:-1]] + [False]


@dataclass(frozen=True)
class _Number:
    """A uniform number times `scale`, known only by its comparisons."""

    branches: _Branches
    scale: float = 1.0

    def __mul__(self, factor: float) -> _Number:
        return _Number(self.branches, self.scale * factor)

    def __lt__(self, bound: float) -> bool:
        return self.branches.decide(bound / self.scale if self.scale > 0.0 else float(bound > 0.0))

    def __ge__(self, bound: float) -> bool:
        return not self < bound


def round_outcomes(
    accept: Accept, target: Model, text: Text, drafted: Text, proposals: Sequence[Distribution]
) -> dict[Text, float]:
    """What one round makes of a draft: every list of tokens with its probability."""
    branches = _Branches()
    outcomes: Counter[Text] = Counter()
    last: list[Distribution] = []

    def judge() -> list[int]:
        rows = lambda i: target((*text, *drafted[:i]))  # noqa: E731
        return accept(rows, list(drafted), proposals, lambda i: _Number(branches))

    with pytest.MonkeyPatch.context() as patch:
        # The token that is drawn at the end stays a distribution.
        patch.setattr(verify, "draw", lambda distribution, _: last.append(distribution) or -1)
        for weight, tokens in branches.runs(judge):
            ids, probs = last.pop()
            for token, p in zip(ids, probs / probs.sum(), strict=True):
                outcomes[(*tokens[:-1], int(token))] += weight * float(p)
    return outcomes


def drafts(drafter: Drafter, text: Text, n_max: int) -> Iterator[tuple[float, Text, list[Distribution]]]:
    """Every draft behind `text` with its probability and what each token was drawn from."""
    q = drafter(text) if n_max else None
    if q is None:
        yield 1.0, (), []
        return
    for token, p in zip(*q, strict=True):
        for weight, rest, proposals in drafts(drafter, (*text, int(token)), n_max - 1):
            yield float(p) * weight, (int(token), *rest), [q, *proposals]


def exact(accept: Accept, target: Model, drafter: Drafter, n_max: int, n_tokens: int) -> dict[Text, float]:
    """The probability of every text of n_tokens, by rounds of drafting and `accept`."""
    texts: Counter[Text] = Counter()
    open_texts: dict[Text, float] = {(): 1.0}
    while open_texts:
        grown: Counter[Text] = Counter()
        for text, weight in open_texts.items():
            for p_draft, drafted, proposals in drafts(drafter, text, n_max):
                for tokens, p in round_outcomes(accept, target, text, drafted, proposals).items():
                    grown[(*text, *tokens)[:n_tokens]] += weight * p_draft * p
        open_texts = {t: w for t, w in grown.items() if len(t) < n_tokens}
        texts.update({t: w for t, w in grown.items() if len(t) == n_tokens})
    return texts


# -- drawing texts


class ToyChain:
    """Stands for a SamplerChain: a row of logits is the row of one model behind one text."""

    def apply(self, logits: Any, history: Any) -> Distribution:
        model, text = logits
        distribution: Distribution = model(text)
        return distribution


def match_sampler(seed: int, *, is_coupled: bool) -> MatchSampler:
    return MatchSampler(ToyChain(), 2, seed, 0, is_coupled)  # type: ignore[arg-type]


def accept_sampler(seed: int, accept: Accept) -> AcceptSampler:
    return AcceptSampler(ToyChain(), 2, seed, 0, accept)  # type: ignore[arg-type]


NO_TOKENS = np.zeros(0, np.int32)


def speak(
    sampler: AcceptSampler | MatchSampler, target: Model, drafter: Drafter, n_max: int, n_tokens: int
) -> tuple[Text, int, int]:
    """One text, and how many tokens were drafted and accepted for it."""
    text: Text = ()
    n_drafted = n_accepted = 0
    while len(text) < n_tokens:
        request = DraftRequest(0, NO_TOKENS, -1, n_max, sampling=sampler.drafting(len(text), NO_TOKENS))
        growing = GrowingDraft(request, n_max, frozenset(), "toy")
        is_going = True
        while is_going and (q := drafter((*text, *growing.tokens))) is not None:
            best = int(q[0][q[1].argmax()])
            is_going = growing.take(best, (lambda t, q=q: q, ()))  # type: ignore[arg-type]
        draft: Draft = growing.done()
        rows = [(target, (*text, *draft.tokens[:i])) for i in range(len(draft.tokens) + 1)]
        tokens = sampler.pick(rows, draft, len(text), NO_TOKENS)  # type: ignore[arg-type]
        n_drafted += len(draft.tokens)
        n_accepted += len(tokens) - 1
        text = (*text, *tokens)
    return text[:n_tokens], n_drafted, n_accepted


def simulate(
    make: Callable[[int], AcceptSampler | MatchSampler],
    target: Model,
    drafter: Drafter,
    *,
    n_max: int,
    n_tokens: int,
    n_texts: int,
) -> Counter[Text]:
    """n_texts texts, of the seeds 0 .. n_texts - 1."""
    return Counter(speak(make(seed), target, drafter, n_max, n_tokens)[0] for seed in range(n_texts))


# -- judging


@dataclass(frozen=True)
class Fit:
    """How far counts lie from probabilities, in standard deviations above what chance makes of them."""

    chi_squared: float
    total_variation: float

    @property
    def is_good(self) -> bool:
        return self.chi_squared < 4.5 and self.total_variation < 4.5


def fit(counts: Counter[Text], probabilities: dict[Text, float]) -> Fit:
    if any(text not in probabilities for text in counts):
        return Fit(math.inf, math.inf)  # what cannot come out came out
    n = counts.total()
    p = np.array(list(probabilities.values()))
    p /= p.sum()
    seen = np.array([counts[text] for text in probabilities], dtype=float)
    drawn = np.random.default_rng(0).multinomial(n, p, size=400)  # what chance makes of few texts is wide
    judged = [[judge(row, n * p) for row in (seen, *drawn)] for judge in (_chi_squared, _total_variation)]
    return Fit(*((values[0] - np.mean(values[1:])) / (np.std(values[1:]) or 1.0) for values in judged))


def _chi_squared(seen: np.ndarray, mean: np.ndarray) -> float:
    few = mean < 5.0  # one cell together, as the statistic wants it
    cells = np.append(seen[~few], seen[few].sum()), np.append(mean[~few], mean[few].sum())
    filled = cells[1] > 0.0
    return float(((cells[0] - cells[1])[filled] ** 2 / cells[1][filled]).sum())


def _total_variation(seen: np.ndarray, mean: np.ndarray) -> float:
    return 0.5 * float(np.abs(seen - mean).sum() / mean.sum())


def distance(a: dict[Text, float], b: dict[Text, float]) -> float:
    """Total variation of two distributions over texts."""
    return 0.5 * sum(abs(a.get(t, 0.0) - b.get(t, 0.0)) for t in {*a, *b})


def all_texts(n_tokens: int) -> list[Text]:
    return list(product(range(N_VOCAB), repeat=n_tokens))
