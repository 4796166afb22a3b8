"""What a target step takes by the number of tokens in its batch. Reads no clock itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_LARGEST_STEP = 128
_SETTLED = 2  # steps of the size before it, after which a step takes what it takes
_UNSETTLED_MOST = 0.5  # steps over one token; what costs more to change is told apart from the size
_WEIGHT = 256  # steps; a size seen more often weighs no more
_TABLE_FOR = 16  # steps; what a known size costs moves by 2 % in one at most


@dataclass(slots=True)
class StepSum:
    """Steps over one number of tokens that are learnt from together, since each look costs time."""

    n: int = 0
    target_ms: float = 0.0
    wall_ms: float = 0.0

    def add(self, target_ms: float, wall_ms: float) -> None:
        self.n += 1
        self.target_ms += target_ms
        self.wall_ms += wall_ms


class StepCosts:
    """What a target step takes in milliseconds, by tokens in its batch; learnt from every step.

    In logarithms, a level that follows load and context length fast and a shape over batch sizes that moves slowly,
    so that a busy neighbour is not mistaken for an expensive batch. Outliers are clipped. What a step takes longer
    because the one before had another size (a graph is built and captured anew) is counted apart. One thread writes;
    `ms` may be read from another.
    """

    __slots__ = ("_broken", "_extra", "_level", "_run", "_seen", "_shape", "_size", "_stale", "_table")

    def __init__(self) -> None:
        self._level = math.nan
        self._shape: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._stale = 0  # steps since the table was made
        self._table = np.zeros(0)  # shape by tokens in the batch, not logarithmic; [0] unused
        self._size = self._run = 0  # of the last step, and how many before it had the same
        self._broken = 0  # steps for which a break may still be felt
        self._extra = [0.0] * _SETTLED  # milliseconds of the first and the second step of another size

    @property
    def change_ms(self) -> float:
        """What a change of the number of tokens costs, over the steps that it makes slower."""
        return sum(self._extra)

    @property
    def detour_ms(self) -> float:
        """What a step over another number of tokens and the way back cost that `ms` does not know: of a change that
        costs little, the way there is in what the other size is known to take."""
        most = _UNSETTLED_MOST * self.ms(1)
        return sum([ms if ms <= most else 2.0 * ms for ms in self._extra])

    def observe(self, n_tokens: int, ms: float, n_steps: int = 1) -> None:
        """A step over n_tokens tokens took `ms`, or that is the mean of some in a row."""
        if not 0 < n_tokens <= _LARGEST_STEP or ms <= 0.0:
            return
        self._run = self._run + 1 if n_tokens == self._size else 0
        self._size = n_tokens
        self._broken = max(0, self._broken - 1)
        if self.is_settled:
            self._learn(n_tokens, ms, n_steps)
        elif not self._broken:
            self._learn_change(n_tokens, ms)

    def extra_ms(self) -> float:
        """What the last step took longer because the one before had another size."""
        return 0.0 if self.is_settled else self._extra[self._run]

    @property
    def is_settled(self) -> bool:
        """Does the last step tell what its size costs? Where a change costs little, all do."""
        return self._run >= _SETTLED or self._extra[self._run] <= _UNSETTLED_MOST * self.ms(1)

    def has_settled_at(self, n_tokens: int) -> bool:
        """Would another step over n_tokens tell what that size costs?"""
        return self._size == n_tokens and self.is_settled

    def interrupted(self) -> None:
        """A step of another kind came between: the next ones may be slow for that, or not."""
        self._size, self._broken = 0, _SETTLED + 1

    def change_takes(self, extra_ms: Sequence[float]) -> None:
        """What was measured of the first and the second step after a change."""
        self._extra = [max(0.0, ms) for ms in extra_ms]

    def _learn_change(self, n_tokens: int, ms: float) -> None:
        if self._seen.get(n_tokens, 0) >= 3:
            known = self._extra[self._run]
            self._extra[self._run] = known + 0.05 * (max(0.0, ms - self.ms(n_tokens)) - known)

    def _learn(self, n_tokens: int, ms: float, n_steps: int) -> None:
        y = math.log(ms)
        if math.isnan(self._level):
            self._level = y - math.log(_unknown_shape(n_tokens))
        seen = self._seen.get(n_tokens, 0)
        shape = self._shape.get(n_tokens) or math.log(self._shape_at(n_tokens))
        error = y - self._level - shape
        if seen >= 3:
            error = max(-0.7, min(0.7, error))
            self._level += (1.0 - 0.9**n_steps) * error
        self._seen[n_tokens] = seen + 1
        # Once a size is known the level takes the error: else the sizes that come often would take it alone.
        self._shape[n_tokens] = shape + (1.0 / (seen + 1) if seen < 3 else 1.0 - 0.98**n_steps) * error
        self._stale += n_steps
        if seen < 3 or self._stale >= _TABLE_FOR:
            self._table, self._stale = self._interpolate(), 0

    def ms(self, n_tokens: int) -> float:
        """Expected milliseconds; never less than that of a smaller batch. 0 before anything was seen."""
        return 0.0 if math.isnan(self._level) else math.exp(self._level) * self._shape_at(n_tokens)

    def curve(self, n_slots: int, n_draft: int) -> npt.NDArray[np.float64]:
        """[n_draft + 1] expected milliseconds of a step in which every slot drafts 0, 1, ... n_draft tokens."""
        sizes = n_slots * np.arange(1, n_draft + 2)
        if math.isnan(self._level):
            return np.zeros(n_draft + 1)
        table = self._table
        known = np.minimum(sizes, len(table) - 1)
        shapes = table[known] + (table[-1] - table[-2]) * (sizes - known)
        return np.asarray(math.exp(self._level) * shapes)

    def as_one(self, n_tokens: int, ms: float) -> float:
        """What a step of `ms` over n_tokens tokens would have taken over one."""
        return ms * self._shape_at(1) / self._shape_at(n_tokens)

    def _shape_at(self, n_tokens: int) -> float:
        table = self._table
        if not len(table):
            return _unknown_shape(n_tokens)
        if n_tokens < len(table):
            return float(table[n_tokens])
        return float(table[-1] + (table[-1] - table[-2]) * (n_tokens - len(table) + 1))

    def _interpolate(self) -> npt.NDArray[np.float64]:
        """Straight lines between the sizes seen and beyond the largest; below the smallest what is usual."""
        sizes = sorted(self._shape)
        known = [math.exp(self._shape[n]) for n in sizes]
        first = sizes[0]
        below = [known[0] * _unknown_shape(n) / _unknown_shape(first) for n in range(1, first)]
        if len(sizes) == 1:
            slope = known[0] * (_unknown_shape(first + 1) / _unknown_shape(first) - 1.0)
        else:
            slope = max(0.0, known[-1] - known[-2]) / (sizes[-1] - sizes[-2])
        xs = [*range(1, first), *sizes, sizes[-1] + 1]
        weights = [1.0] * (first - 1) + [float(min(self._seen[n], _WEIGHT)) for n in sizes]
        rising = _rising([*below, *known], weights)
        return np.interp(np.arange(sizes[-1] + 2), xs, [*rising, rising[-1] + slope])


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The sequence nearest to `values` by weighted squares that never falls: a larger batch is never cheaper.

    Pool adjacent violators (Ayer et al. 1955).
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, w, n = pools.pop()
            total = w + pool[1]
            pool = ((mean * w + pool[0] * pool[1]) / total, total, n + pool[2])
        pools.append(pool)
    return [mean for mean, _, n in pools for _ in range(n)]


def _unknown_shape(n_tokens: int) -> float:
    """Half a token's share for each further one: between a machine bound by memory and one bound by arithmetic."""
    return 1.0 + 0.5 * (n_tokens - 1)
