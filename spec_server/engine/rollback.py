"""Back to an earlier length: a new prompt's shared prefix, or the accepted tip.

Where the target cannot take a rejected draft back, a partial state is taken before the draft is decoded and
put back after a rejection. The tokens that stay are then missing in the target: they ride in the slot's next
batch, before its last token, and cost no decode of their own. Until then the target is behind slot.tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from draft.base import Drafter
from spec_server.engine.checkpoints import CheckpointKeeper
from spec_server.engine.slot import Slot
from spec_server.runtime.batch import Batch
from spec_server.runtime.context import Context
from spec_server.runtime.errors import LlamaError, RewindError, StateError

log = logging.getLogger(__name__)

Kind = Literal["prefix", "checkpoint", "none"]


@dataclass(frozen=True, slots=True)
class Rewound:
    """How many tokens a slot kept, and how they were reached."""

    n_tokens: int
    kind: Kind
    n_checkpoint: int = 0


@dataclass(slots=True)
class _Before:
    """A sequence as it was before a draft; the buffer is used again for the next one."""

    buffer: bytearray = field(default_factory=bytearray)
    state: memoryview = field(default_factory=lambda: memoryview(b""))
    n_tokens: int = 0


class Rollback:
    """Cuts target, drafter and token list together, so that they never part."""

    def __init__(self, target: Context, drafter: Drafter, checkpoints: CheckpointKeeper) -> None:
        self._target = target
        self._drafter = drafter
        self._checkpoints = checkpoints
        self._before: dict[int, _Before] = {}
        self._batch: Batch | None = None

    # -- to a prompt's prefix

    def to_prefix(self, slot: Slot, n_tokens: int) -> Rewound:
        """Keep as much of the first n_tokens as a restored copy of the slot could keep too."""
        if n_tokens and self._cut(slot, n_tokens):
            return Rewound(n_tokens, "prefix")
        reached = self._checkpoints.apply_newest(slot, n_tokens)
        if reached:
            self._drop_past(slot, reached)
            return Rewound(reached, "checkpoint", reached)
        self.clear(slot)
        return Rewound(0, "none")

    def clear(self, slot: Slot) -> None:
        """Empty: target, drafter, tokens and checkpoints."""
        self._target.truncate(slot.id, 0)
        self._keep(slot, 0)

    def _cut(self, slot: Slot, n_tokens: int) -> bool:
        if n_tokens < len(slot.tokens):
            if n_tokens < self._target.prefix_floor(slot.id):
                return False
            try:
                self._target.truncate(slot.id, n_tokens)
            except RewindError as e:
                log.warning("slot %d: %s", slot.id, e)
                return False
        self._keep(slot, n_tokens)
        return True

    def _keep(self, slot: Slot, n_tokens: int) -> None:
        """The target holds n_tokens: bring everything else of the slot there."""
        self._drafter.truncate(slot.id, n_tokens)
        slot.tokens.truncate(n_tokens)
        self._drop_past(slot, n_tokens)

    def _drop_past(self, slot: Slot, n_tokens: int) -> None:
        while slot.checkpoints and slot.checkpoints[-1].n_tokens > n_tokens:
            slot.checkpoints.pop()

    # -- to the accepted tip

    def before_drafts(self, slots: Iterable[Slot]) -> None:
        """These slots' drafts are about to be decoded: keep what the target cannot take back."""
        if self._target.can_rewind_draft:
            return
        for slot in slots:
            before = self._before.setdefault(slot.id, _Before())
            if self._target.n_tokens(slot.id) < len(slot.tokens):
                continue  # it stands where `before` put it
            size = self._target.state_size(slot.id, partial=True)
            if len(before.buffer) < size:
                before.buffer = bytearray(size)
            before.n_tokens = len(slot.tokens)
            before.state = self._target.read_state(slot.id, memoryview(before.buffer), partial=True)

    def to_tip(self, slot: Slot) -> bool:
        """slot.tokens ends at the accepted tip: take back what the target holds past it. It may be behind.

        False where the tip was lost.
        """
        n_tokens = len(slot.tokens)
        if self._target.n_tokens(slot.id) <= n_tokens:
            return True
        try:
            if self._target.can_rewind_draft:
                self._target.truncate(slot.id, n_tokens)
            else:
                before = self._before[slot.id]
                self._target.write_state(slot.id, before.state, before.n_tokens, partial=True)
        except (RewindError, StateError) as e:
            log.warning("slot %d: its %d tokens are processed again: %s", slot.id, n_tokens, e)
            self._target.truncate(slot.id, 0)
            return self.catch_up(slot)
        return True

    def catch_up(self, slot: Slot) -> bool:
        """Decode what the target lacks of the token list. False where that fails: the list ends there."""
        try:
            while (done := self._target.n_tokens(slot.id)) < len(slot.tokens):
                self._batch = self._batch or Batch(self._target.n_batch)
                self._batch.clear()
                chunk = slot.tokens.view()[done : done + self._target.n_ubatch]
                self._batch.add(slot.id, chunk, done, output="none")
                self._target.decode(self._batch)
        except LlamaError as e:
            log.warning("slot %d: the last tokens are lost: %s", slot.id, e)
            self._keep(slot, self._target.n_tokens(slot.id))
            return False
        return True
