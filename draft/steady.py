"""One draft length for many steps: for machines on which another number of tokens makes a step slow.

Where the steps of a backend are captured and replayed, the first two over another number of tokens cost several plain
steps. Then the length is not found draft by draft but kept for all slots, drafts are filled up to it with tokens that
nobody verifies, and it is changed where the gain over the steps to come pays for the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

_DEAR = 1.5  # steps over one token: a change that costs more is avoided
_HORIZON = 128  # rounds that a change has to pay for itself
_EVERY = 8  # rounds

_Array = npt.NDArray[np.float64]


@dataclass(slots=True)
class SteadyLength:
    """`n` is the length that drafters aim at, `filled` the one that the last step really had, `gain` what drafting
    n tokens is expected to bring against drafting none, in tokens a round and slot."""

    longest: ClassVar[int] = 8

    n: int = 0
    filled: int = 0
    gain: float = 0.0
    _n_slots: int = 0
    _rounds: int = 0
    _unasked: int = 0  # looks in a row before which nobody wanted to draft

    @staticmethod
    def is_wanted(change_ms: float, plain_ms: float) -> bool:
        return change_ms > _DEAR * plain_ms

    def is_due(self, n_slots: int) -> bool:
        """A step of n_slots slots begins: is it time to look for a better length?"""
        self._rounds += 1
        return n_slots != self._n_slots or self._rounds >= _EVERY

    def choose(
        self, n_slots: int, chances: Sequence[Sequence[float]], ms: _Array, draft_ms: float, change_ms: float
    ) -> None:
        """Change the length where that pays.

        `chances`: of each slot, that its next drafted token stands, and each one behind it given that; the last
        counts for all later ones. `ms` [longest + 1]: of a step in which all slots draft 0, 1, ... tokens.
        """
        change_ms = change_ms if n_slots == self._n_slots else 0.0  # a change that comes anyway
        self._n_slots, self._rounds, self._unasked = n_slots, 0, 0
        tokens = np.mean([_expected(row, self.longest) for row in chances], axis=0)
        took = ms + draft_ms * np.arange(self.longest + 1)
        rates = tokens / took
        best, now = int(rates.argmax()), self.n
        if (rates[best] / rates[now] - 1.0) * _HORIZON * took[now] > change_ms:
            self.n = best
        self.gain = float(tokens[self.n] - 1.0 - rates[self.n] * (took[self.n] - took[0]))

    def nobody_asked(self, n_slots: int) -> None:
        """No slot wanted to draft since the last look. Who rests does not ask either, but not for that long."""
        self._n_slots, self._rounds = n_slots, 0
        self._unasked += 1
        if self._unasked > 1:
            self.n, self.gain = 0, 0.0

    def fill(self, longest: int) -> int:
        """The length that all slots' drafts of this step are brought to, the longest of them having `longest`."""
        if longest <= self.n:
            self.filled = self.n
        elif longest > self.filled:
            self.filled = longest
        return self.filled


def _expected(chances: Sequence[float], longest: int) -> _Array:
    """[longest + 1] tokens of a round with 0, 1, ... drafted tokens."""
    stands = [chances[min(i, len(chances) - 1)] for i in range(longest)]
    return np.concatenate(([1.0], 1.0 + np.cumsum(np.cumprod(stands))))
