"""Whether drafting pays at all, by the clock: tokens per millisecond with drafts against without.

The length rule predicts from step costs by number of tokens. What it cannot see, it gets wrong for good: a backend
that is slow for uneven batches, or for batches that change, is slow for plain steps too once drafting has begun. So
short blocks of plain steps are really run, and drafting is stopped while it makes fewer tokens than they do.
Reads no clock itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_FADE = 0.985  # of a rate's sums, per step
_PLAIN_BLOCK, _DRAFT_BLOCK = 6, 160  # steps
_ENOUGH = 40  # drafting steps that make a verdict
_HOPELESS_AFTER, _HOPELESS = 2, 0.5
_WORSE = 0.9  # finer differences are the rule's own business, and smaller than the noise here
_BAD = 0.7
_WAIT, _LONG_WAIT = 1600, 6400  # plain steps until drafting is tried again


@dataclass(slots=True)
class _Rate:
    """Tokens per millisecond over the steps just past."""

    tokens: float = 0.0
    ms: float = 0.0
    n: int = 0

    def add(self, tokens: int, ms: float) -> None:
        self.tokens = _FADE * self.tokens + tokens
        self.ms = _FADE * self.ms + ms
        self.n += 1

    def value(self) -> float:
        return self.tokens / self.ms if self.ms else 0.0


@dataclass(slots=True)
class _Arms:
    """One number of decoding slots."""

    plain: _Rate = field(default_factory=_Rate)
    drafting: _Rate = field(default_factory=_Rate)
    is_drafting: bool = False
    is_stopped: bool = False
    n_steps: int = 0  # since the last change
    wait: int = _WAIT

    def turn(self, *, drafting: bool, stopped: bool = False) -> None:
        self.is_drafting, self.is_stopped, self.n_steps = drafting, stopped, 0


class DraftGuard:
    """`allows` before each step without prompt tokens, `observe` after it."""

    def __init__(self) -> None:
        self._arms: dict[int, _Arms] = {}

    def allows(self, n_slots: int) -> bool:
        """May drafts be made in a step of that many decoding slots?"""
        return self._arms.setdefault(n_slots, _Arms()).is_drafting

    def observe(self, n_slots: int, n_tokens: int, ms: float) -> None:
        """The step took ms and yielded n_tokens over all slots."""
        arms = self._arms.setdefault(n_slots, _Arms())
        arms.n_steps += 1
        if arms.n_steps > 1:  # the first step after a change pays for the change
            (arms.drafting if arms.is_drafting else arms.plain).add(n_tokens, ms)
        if arms.is_drafting:
            self._judge(arms)
        elif arms.n_steps >= (arms.wait if arms.is_stopped else _PLAIN_BLOCK):
            if arms.is_stopped:
                arms.drafting = _Rate()
            arms.turn(drafting=True)

    def _judge(self, arms: _Arms) -> None:
        """Stop where drafting makes fewer tokens; else a block of plain steps now and then."""
        share = arms.drafting.value() / arms.plain.value() if arms.plain.ms and arms.drafting.ms else 1.0
        is_hopeless = arms.drafting.n >= _HOPELESS_AFTER and share < _HOPELESS
        if is_hopeless or (arms.drafting.n >= _ENOUGH and share < _WORSE):
            arms.turn(drafting=False, stopped=True)
            arms.wait = _LONG_WAIT if share < _BAD else _WAIT
        elif arms.n_steps >= _DRAFT_BLOCK:
            arms.turn(drafting=False)
