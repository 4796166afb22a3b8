"""Machines and texts for the draft length rule: costs and acceptances are drawn, nothing is timed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from draft.calibration import Calibration
from draft.guard import DraftGuard
from draft.length import DraftLength
from draft.window import LengthPolicy
from spec_server.runtime.batch import Ints

Cost = Callable[[int], float]

_MEASURED = {1: 1.0, 2: 1.7, 3: 2.2, 4: 2.7, 5: 3.5, 6: 3.9, 7: 4.3, 8: 4.6}
MACHINES: dict[str, Cost] = {
    "bound by arithmetic": lambda n: 8.0 * _MEASURED.get(n, 4.6 + 0.4 * (n - 8)),
    "bound by memory": lambda n: 8.0 * (1 + 0.2 * (n - 1)),
    "accelerator": lambda n: 2.0 * (1 + 0.02 * (n - 1)),
}
WARM_UP = (1, 2, 3, 4, 6, 8, 12, 16)


def said(n: int) -> Ints:
    """A text of n tokens, all of them 1."""
    return np.ones(n, np.int32)


def drafted(n_stands: int, n: int) -> list[int]:
    """A draft of n tokens, of which the text says the first n_stands."""
    return [1] * n_stands + [0] * (n - n_stands)


class FakeGuard(DraftGuard):
    """Never in the way."""

    def allows(self, n_slots: int) -> bool:
        return True


@dataclass
class Simulation:
    """One slot; each drafted token has a confidence drawn around `acceptance(round)` and stands that often."""

    cost: Cost
    acceptance: Callable[[int], float]
    draft_ms: float = 0.4
    n_rounds: int = 3000
    seed: int = 0
    change_ms: tuple[float, float] = (0.0, 0.0)  # what the first and second step of another size take longer

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._size, self._run = 1, 2

    def step(self, n_tokens: int) -> float:
        self._run = self._run + 1 if n_tokens == self._size else 0
        self._size = n_tokens
        return self.noisy(self.cost(n_tokens)) + (*self.change_ms, 0.0)[min(2, self._run)]

    def noisy(self, ms: float) -> float:
        return ms * (1 + 0.1 * self.rng.random())

    def confidence(self, i: int) -> float:
        a = self.acceptance(i)
        return self.rng.betavariate(2 * a, 2 * (1 - a))

    def n_accepted(self, draft: list[float]) -> int:
        return next((k for k, c in enumerate(draft) if self.rng.random() >= c), len(draft))

    def fixed(self, length: int) -> float:
        self._size, self._run = 1, 2
        tokens, ms = 0, 0.0
        for i in range(self.n_rounds):
            draft = [self.confidence(i) for _ in range(length)]
            tokens += 1 + self.n_accepted(draft)
            ms += self.step(1 + length) + length * self.draft_ms
        return tokens / ms

    def adaptive(self) -> float:
        self._size, self._run = 1, 2
        policy, calibration = LengthPolicy(), Calibration()
        length = DraftLength(policy, {"": calibration}, 0)
        for _ in range(3):
            for n in WARM_UP:
                policy.pace.costs.observe(n, self.noisy(self.cost(n)))
        policy.pace.costs.change_takes(self.change_ms)
        tokens, ms = 0, 0.0
        for i in range(self.n_rounds):
            policy.begin_step(1)
            length.read(said(tokens), 1)
            draft: list[float] = []
            goes_on = not policy.rests(0) and length.opens("")
            while goes_on and len(draft) < 16:
                draft.append(self.confidence(i))
                goes_on = length.goes_on(draft[-1])
            n_drafted = len(draft)
            length.spent(n_drafted, n_drafted * self.draft_ms, self.draft_ms)
            n_stands = self.n_accepted(draft)
            kept = length.keeps(drafted(n_stands, n_drafted)) if draft else 0
            gained = min(kept, n_stands)
            size = 1 + max(kept, policy.fill(kept))
            step = self.step(size)
            if kept:
                calibration.learn(draft[:kept], gained)
            policy.end_step(size, step, step + n_drafted * self.draft_ms, 1 + gained)
            tokens += 1 + gained
            ms += step + n_drafted * self.draft_ms
        return tokens / ms
