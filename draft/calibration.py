"""What a drafter's confidence is worth: how often the target takes a token that was drafted with it.

Knows no costs and makes no decisions; packs itself for the slot file.
"""

from __future__ import annotations

import struct
from bisect import bisect
from collections.abc import Sequence

_POSITIONS = 4  # the fourth stands for all later ones
_EDGES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.9375, 0.97)  # of the bins; near 1 little makes much
_MIDDLES = (0.0625, 0.1875, 0.3125, 0.4375, 0.5625, 0.6875, 0.8125, 0.90625, 0.953, 0.985)
_BINS = len(_EDGES) + 1
_CELLS = _POSITIONS * _BINS
_MEMORY = 32.0  # observations that a cell remembers
_LONG_MEMORY = 256.0  # of the last position's cells: one long draft is dozens of observations
_PRIOR = 2.0  # observations that the drafter's own confidence counts for
_DRAWN_MEMORY = 48.0  # drafted tokens of one position that are remembered
_DRAWN_PRIOR = 4.0  # drafted tokens that the position before counts for


class Calibration:
    """A table by position in the draft and confidence: how often tokens like that were drafted, verified, accepted.

    `whole`, where given, learns everything that this one learns: one text and all of them.
    """

    __slots__ = ("_accepted", "_drawn", "_seen", "_whole")
    _FORMAT = struct.Struct(f"<{3 * _CELLS}f")
    n_bytes = _FORMAT.size

    def __init__(self, whole: Calibration | None = None) -> None:
        self._accepted = [0.0] * _CELLS
        self._seen = [0.0] * _CELLS
        self._drawn = [0.0] * _CELLS
        self._whole = whole

    def probability(self, position: int, confidence: float) -> float:
        """That the target accepts such a token, given that all before it stood."""
        cell = _cell(position, confidence)
        return (self._accepted[cell] + _PRIOR * confidence) / (self._seen[cell] + _PRIOR)

    def probabilities(self, confidence: float, n: int) -> list[float]:
        """The same of n tokens that have one confidence."""
        known = [self.probability(position, confidence) for position in range(min(n, _POSITIONS))]
        return known + known[-1:] * (n - len(known))

    def outlook(self, position: int) -> tuple[list[float], list[float]]:
        """Of a token that is yet to be drafted: the shares of the bins its confidence may fall in, which sum to 1, and
        the probability of each. A position that was seen little is taken to be like the one before it."""
        shares = [1.0 / _BINS] * _BINS
        last = min(position, _POSITIONS - 1)
        for first in range(0, (last + 1) * _BINS, _BINS):
            drawn = self._drawn[first : first + _BINS]
            total = sum(drawn) + _DRAWN_PRIOR
            shares = [(n + _DRAWN_PRIOR * share) / total for n, share in zip(drawn, shares, strict=True)]
        cells = range(last * _BINS, (last + 1) * _BINS)
        return shares, [
            (self._accepted[cell] + _PRIOR * middle) / (self._seen[cell] + _PRIOR)
            for cell, middle in zip(cells, _MIDDLES, strict=True)
        ]

    @property
    def n_drawn(self) -> float:
        """Drafts that are remembered."""
        return sum(self._drawn[:_BINS])

    def drafted(self, position: int, confidence: float) -> float:
        """A token was drafted, whether or not it will be verified; returns its probability."""
        first = min(position, _POSITIONS - 1) * _BINS
        if sum(self._drawn[first : first + _BINS]) >= _DRAWN_MEMORY:
            for cell in range(first, first + _BINS):
                self._drawn[cell] *= 0.5
        self._drawn[_cell(position, confidence)] += 1.0
        if self._whole is not None:
            self._whole.drafted(position, confidence)
        return self.probability(position, confidence)

    def learn(self, confidences: Sequence[float], n_accepted: int, first: int = 0) -> None:
        """The first n_accepted of a draft stood; the one behind them, if there was one, did not. What is known already
        of those in front of `first` is not learnt again."""
        for position in range(first, min(n_accepted + 1, len(confidences))):
            cell = _cell(position, confidences[position])
            if self._seen[cell] >= (_MEMORY if position < _POSITIONS - 1 else _LONG_MEMORY):
                self._seen[cell] *= 0.5
                self._accepted[cell] *= 0.5
            self._seen[cell] += 1.0
            self._accepted[cell] += position < n_accepted
        if self._whole is not None:
            self._whole.learn(confidences, n_accepted, first)

    def start_text(self, n_left: float) -> Calibration:
        """One for a new text, whose whole is this: the same shares, each cell seen at most n_left times; once at most
        where all later positions are one, since the tokens of a long draft stand or fall together: a text that was
        copied says little about the next one."""
        text = Calibration(self)
        for cell, seen in enumerate(self._seen):
            most = n_left if cell < _CELLS - _BINS else min(1.0, n_left)
            share = min(1.0, most / seen) if seen else 0.0
            text._seen[cell], text._accepted[cell] = seen * share, self._accepted[cell] * share
        text._drawn = [0.5 * n for n in self._drawn]
        return text

    def pack(self) -> bytes:
        return self._FORMAT.pack(*self._accepted, *self._seen, *self._drawn)

    def unpack(self, data: bytes | bytearray | memoryview) -> None:
        """Replace what is known of the text. ValueError, and nothing replaced, where the bytes are none of a
        calibration."""
        if len(data) != self.n_bytes:
            raise ValueError(f"a calibration has {self.n_bytes} bytes, not {len(data)}")
        values = list(self._FORMAT.unpack(data))
        accepted, seen, drawn = values[:_CELLS], values[_CELLS : 2 * _CELLS], values[2 * _CELLS :]
        if not all(0.0 <= a <= s <= 2 * _LONG_MEMORY for a, s in zip(accepted, seen, strict=True)) or not all(
            0.0 <= n <= 2 * _DRAWN_MEMORY for n in drawn
        ):
            raise ValueError("the numbers of a calibration contradict each other")
        self._accepted, self._seen, self._drawn = accepted, seen, drawn


def _cell(position: int, confidence: float) -> int:
    return min(position, _POSITIONS - 1) * _BINS + bisect(_EDGES, confidence)
