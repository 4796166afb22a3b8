"""Steps before which nobody is asked for a draft. Decides from counts alone.

Right after a decode everything is cold, and looking for a draft takes a hundredth of a step or more whether or not it
finds one. So who has found nothing for long looks less often: a draft that could have begun meanwhile is late by a
small share of the steps that were in vain before it.
"""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST = 15  # quiet steps in a row
_SHARE = 16  # steps in vain for each quiet step in a row
_KEPT = 64  # steps in vain that count when a request begins: its text may be another


@dataclass(slots=True)
class QuietSteps:
    """`step` opens each step; where that says no, `in_vain` follows, and `stood` or perhaps `begin`."""

    is_on: bool = False  # in this step
    _left: int = 0
    _n_slots: int = 0
    _n_in_vain: int = 0

    def step(self, n_slots: int) -> bool:
        """Is the step that begins, with that many decoding slots, a quiet one?"""
        self.is_on = self._left > 0 and n_slots == self._n_slots
        self._left = self._left - 1 if self.is_on else 0
        self._n_slots = n_slots
        return self.is_on

    def in_vain(self) -> int:
        """There is no draft in this step, or none that is known to stand; returns how many of the steps to come may be
        quiet."""
        self._n_in_vain += 1
        return min(_LONGEST, self._n_in_vain // _SHARE)

    def stood(self) -> None:
        """Some of a draft stood."""
        self._n_in_vain = 0

    def begin(self, n_steps: int) -> None:
        """The next steps are quiet while the same slots decode."""
        self._left = n_steps
        self._n_in_vain += n_steps

    def interrupted(self) -> None:
        """Other slots may decode now."""
        self._left = 0

    def request_begins(self) -> None:
        self._n_in_vain = min(self._n_in_vain, _KEPT)
