"""A draft while it is made token by token: its limits and its end; asks no model."""

from __future__ import annotations

import time
from collections.abc import Sequence, Set

import numpy as np

from draft.base import EMPTY_DRAFT, Distribution, Draft, DraftRequest, Floats


def opens(request: DraftRequest, n_max: int, drafter: str) -> bool:
    """Is there room for a draft, and does the length rule, if there is one, want it?"""
    if request.n_max <= 0 or n_max <= 0:
        return False
    return request.length is None or request.length.opens(drafter)


class GrowingDraft:
    """Takes the likeliest token of each step, or draws one where the request samples. Ends at a limit, before
    a step whose likeliest token is below p_min, and behind an end token."""

    __slots__ = ("_drafter", "_end", "_n_max", "confidence", "last", "probs", "request", "tokens")

    def __init__(self, request: DraftRequest, n_max: int, end: Set[int], drafter: str) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.confidence: list[float] = []
        self.probs: list[Distribution] = []
        self.last = request.last_token
        self._n_max = min(request.n_max, n_max)
        self._end = end
        self._drafter = drafter

    @property
    def n_max(self) -> int:
        return self._n_max

    def take(self, token: int, logits: Floats) -> bool:
        """One more token, the argmax of `logits` [n_vocab]; False where this draft ends."""
        length = self.request.length
        goes_on = True
        if self.request.p_min > 0.0 or length is not None:
            p = 1.0 / float(np.exp(logits - logits[token]).sum())
            if p < self.request.p_min:
                return False
            self.confidence.append(p)
            goes_on = length is None or length.goes_on(p)
        sampling = self.request.sampling
        if not sampling.is_greedy:
            # Behind p_min: a draft that ends because of what was drawn bends the distribution of the text.
            token, distribution = sampling.draw(logits, self.tokens)
            if distribution is not None:
                self.probs.append(distribution)
        self.tokens.append(token)
        self.last = token
        return goes_on and len(self.tokens) < self._n_max and token not in self._end

    def done(self) -> Draft:
        length = self.request.length
        # What was drawn is verified, or dropped whatever it is: for its length alone would bend the distribution.
        if length is not None and self.tokens and (not self.probs or length.drops_all):
            keep = length.keeps(self.tokens)
            del self.tokens[keep:], self.confidence[keep:]
        if not self.tokens or (len(self.tokens) < self.request.n_min and not self.probs):
            return EMPTY_DRAFT
        return Draft(self.tokens, self._drafter, self.confidence, self.probs)


class DraftClock:
    """What one propose takes; begins when it is made."""

    __slots__ = ("_began_ns", "_last_ns", "_read_ns", "_step_ns")

    def __init__(self) -> None:
        self._began_ns = self._read_ns = self._last_ns = time.perf_counter_ns()
        self._step_ns = 0

    def read(self) -> None:
        """What the drafter lacked of the texts is read."""
        self._read_ns = self._last_ns = time.perf_counter_ns()

    def step(self) -> None:
        """One token of each draft is drafted."""
        now = time.perf_counter_ns()
        self._last_ns, self._step_ns = now, now - self._last_ns

    def report(self, drafts: Sequence[GrowingDraft]) -> None:
        """Tell the length rule, if there is one, what these drafts took together."""
        n_steps = max((len(d.tokens) for d in drafts), default=0)
        length = next((d.request.length for d in drafts if d.request.length is not None), None)
        if length is not None:
            length.spent(
                n_steps,
                (self._last_ns - self._read_ns) / 1e6,
                self._step_ns / 1e6,
                (self._read_ns - self._began_ns) / 1e6,
            )
