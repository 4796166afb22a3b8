"""Whether drafting pays at all, by the clock: tokens per millisecond with drafts against without.

The length rule predicts from step costs by number of tokens. What it cannot see, it gets wrong for good: a backend
that is slow for uneven batches, or for batches that change, is slow for plain steps too once drafting has begun. So
short blocks of plain steps are really run, and drafting is stopped while it makes fewer tokens than they do.
Reads no clock itself.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

_FADE = 0.985  # of a rate's sums, per step
_OLD = 0.3  # of the sums of plain steps, that counts beside a new block
_PLAIN_BLOCK = 7  # steps
_UNSETTLED = 2  # steps after a change, which pay for the change
_DRAFT_BLOCK, LONGEST_BLOCK = 160, 1280  # steps; one that gained is followed by one twice as long
_WORSE = 0.9  # finer differences are the rule's own business, and smaller than the noise here
_LOSS_MS = 1000.0  # may be lost before drafting is stopped: a few long drafts that fail are bad luck
_WAIT = 70.0  # times the loss until drafting is tried again, so that trying costs 1.5 %
_HOPELESS_AFTER = 4  # steps with drafts


@dataclass(slots=True)
class _Rate:
    """Tokens per millisecond over the steps just past."""

    tokens: float = 0.0
    ms: float = 0.0
    n: int = 0

    def add(self, tokens: int, ms: float, n_steps: int = 1) -> None:
        fade = _FADE**n_steps
        self.tokens = fade * self.tokens + tokens
        self.ms = fade * self.ms + ms
        self.n += n_steps

    def value(self) -> float:
        return self.tokens / self.ms if self.ms else 0.0


@dataclass(slots=True)
class _Arms:
    """One number of decoding slots."""

    plain: _Rate = field(default_factory=_Rate)
    drafting: _Rate = field(default_factory=_Rate)
    verified: _Rate = field(default_factory=_Rate)  # steps with drafts, as if every drafted token stood
    is_drafting: bool = False
    n_steps: int = 0  # since the last change
    block: int = _DRAFT_BLOCK
    loss_ms: float = 0.0  # of late, against plain steps
    is_suspect: bool = False  # drafting seems worse; a block of plain steps shall tell
    wait_ms: float = 0.0  # until drafting is tried again

    def turn(self, *, drafting: bool) -> None:
        self.is_drafting, self.n_steps = drafting, 0
        if not drafting:
            # What is long past was another text, of another length.
            self.plain.tokens, self.plain.ms = _OLD * self.plain.tokens, _OLD * self.plain.ms

    def suspect(self) -> None:
        self.is_suspect, self.block = True, _DRAFT_BLOCK
        self.plain = _Rate()
        self.turn(drafting=False)

    def is_worse(self) -> bool:
        return self.drafting.value() < _WORSE * self.plain.value()

    def is_hopeless(self) -> bool:
        """Would it be worse even if every drafted token had stood?"""
        return self.verified.n >= _HOPELESS_AFTER and self.verified.value() < _WORSE * self.plain.value()

    def stop(self) -> None:
        self.wait_ms = _WAIT * self.loss_ms
        self.loss_ms = 0.0
        self.drafting, self.verified = _Rate(), _Rate()
        self.turn(drafting=False)


class DraftGuard:
    """`allows` before each step without prompt tokens, `observe` after it."""

    def __init__(self) -> None:
        self._arms: defaultdict[int, _Arms] = defaultdict(_Arms)
        self.shortest_block = _DRAFT_BLOCK  # steps with drafts between two blocks without

    def allows(self, n_slots: int) -> bool:
        """May drafts be made in a step of that many decoding slots?"""
        return self._arms[n_slots].is_drafting

    def observe(
        self,
        n_slots: int,
        n_batch: int,
        n_tokens: int,
        ms: float,
        *,
        n_steps: int = 1,
        is_settled: bool = True,
    ) -> None:
        """The step took ms, with n_batch tokens in its batch, and yielded n_tokens over all slots.

        Steps without drafts may come together behind some that came alone: n_tokens and ms are those of all of them.
        Not settled is a step that was slow only because the one before had another size.
        """
        if ms <= 0.0 or n_tokens <= 0:
            return
        arms = self._arms[n_slots]
        arms.n_steps += n_steps
        settled = n_steps > 1 or arms.n_steps > _UNSETTLED
        if arms.is_drafting:
            arms.loss_ms = max(0.0, arms.loss_ms + ms - n_tokens / arms.plain.value())
            if is_settled and n_batch > n_slots:
                arms.verified.add(n_batch, ms)
            if settled:
                self._judge(arms, n_tokens, ms, n_steps)
            return
        arms.wait_ms = max(0.0, arms.wait_ms - ms)
        if settled:
            arms.plain.add(n_tokens, ms, n_steps)
        if arms.n_steps < _PLAIN_BLOCK or arms.wait_ms:
            return
        if arms.is_suspect:
            arms.is_suspect = False
            if arms.is_hopeless() or arms.is_worse():
                arms.stop()
                return
            arms.loss_ms = 0.0
        arms.turn(drafting=True)

    def _judge(self, arms: _Arms, n_tokens: int, ms: float, n_steps: int) -> None:
        """Look closer where drafting makes fewer tokens; else a block of plain steps now and then."""
        arms.drafting.add(n_tokens, ms, n_steps)
        if arms.is_hopeless() or (arms.loss_ms > _LOSS_MS and arms.is_worse()):
            arms.suspect()
        elif arms.n_steps >= max(arms.block, self.shortest_block):
            arms.block = min(LONGEST_BLOCK, 2 * arms.block)
            arms.turn(drafting=False)
