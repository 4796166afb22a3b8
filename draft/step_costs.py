"""What a target step takes by the number of tokens in its batch. Reads no clock itself."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_LARGEST_STEP = 128
_TABLE_FOR = 16  # steps; what a known size costs moves by 2 % in one at most


class StepCosts:
    """What a target step takes in milliseconds, by tokens in its batch; learnt from every step.

    In logarithms, a level that follows load and context length fast and a shape over batch sizes that moves slowly,
    so that a busy neighbour is not mistaken for an expensive batch. Outliers are clipped. One thread writes; `ms`
    may be read from another.
    """

    __slots__ = ("_level", "_seen", "_shape", "_stale", "_table")

    def __init__(self) -> None:
        self._level = math.nan
        self._shape: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._stale = 0  # observations since the table was made
        self._table = np.zeros(0)  # shape by tokens in the batch, not logarithmic; [0] unused

    def observe(self, n_tokens: int, ms: float) -> None:
        if not 0 < n_tokens <= _LARGEST_STEP or ms <= 0.0:
            return
        y = math.log(ms)
        if math.isnan(self._level):
            self._level = y - math.log(_unknown_shape(n_tokens))
        seen = self._seen.get(n_tokens, 0)
        shape = self._shape.get(n_tokens) or math.log(self._shape_at(n_tokens))
        error = y - self._level - shape
        if seen >= 3:
            error = max(-0.7, min(0.7, error))
            self._level += 0.1 * error
        self._seen[n_tokens] = seen + 1
        # Once a size is known the level takes the error: else the sizes that come often would take it alone.
        self._shape[n_tokens] = shape + (1.0 / (seen + 1) if seen < 3 else 0.02) * error
        self._stale += 1
        if seen < 3 or self._stale >= _TABLE_FOR:
            self._table, self._stale = self._interpolate(), 0

    def ms(self, n_tokens: int) -> float:
        """Expected milliseconds; never less than that of a smaller batch. 0 before anything was seen."""
        return 0.0 if math.isnan(self._level) else math.exp(self._level) * self._shape_at(n_tokens)

    def curve(self, n_slots: int, n_draft: int) -> npt.NDArray[np.float64]:
        """[n_draft + 1] expected milliseconds of a step in which every slot drafts 0, 1, ... n_draft tokens."""
        if not len(self._table):
            return np.zeros(n_draft + 1)
        sizes = n_slots * np.arange(1, n_draft + 2)
        last = len(self._table) - 1
        beyond = (self._table[-1] - self._table[-2]) * np.maximum(0, sizes - last)
        shape: npt.NDArray[np.float64] = self._table[np.minimum(sizes, last)] + beyond
        return math.exp(self._level) * shape

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
        table = np.interp(np.arange(sizes[-1] + 2), xs, [*below, *known, known[-1] + slope])
        # A larger batch is never cheaper: between what that makes of the dear sizes and of the cheap ones.
        rising = np.maximum.accumulate(table) + np.minimum.accumulate(table[::-1])[::-1]
        return np.asarray(rising / 2, np.float64)


def _unknown_shape(n_tokens: int) -> float:
    """Half a token's share for each further one: between a machine bound by memory and one bound by arithmetic."""
    return 1.0 + 0.5 * (n_tokens - 1)
