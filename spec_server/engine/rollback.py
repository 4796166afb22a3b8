"""Back to an earlier length: a new prompt's shared prefix, or the accepted tip; decodes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draft.base import Drafter
from spec_server.engine.checkpoints import CheckpointKeeper
from spec_server.engine.slot import Slot
from spec_server.runtime.context import Context

Kind = Literal["prefix", "checkpoint", "none"]


@dataclass(frozen=True, slots=True)
class Rewound:
    """How many tokens a slot kept, and how they were reached."""

    n_tokens: int
    kind: Kind
    n_checkpoint: int = 0


class Rollback:
    """Cuts target, drafter and token list together, so that they never part."""

    def __init__(self, target: Context, drafter: Drafter, checkpoints: CheckpointKeeper) -> None:
        self._target = target
        self._drafter = drafter
        self._checkpoints = checkpoints

    def to_prefix(self, slot: Slot, n_tokens: int) -> Rewound:
        """Keep as much of the first n_tokens as can be reached soundly."""
        if 0 < n_tokens < len(slot.tokens) and n_tokens < self._target.rewind_floor(slot.id):
            reached = self._checkpoints.apply_newest(slot, n_tokens)
            self._drop_past(slot, reached)
            if reached:
                return Rewound(reached, "checkpoint", reached)
            n_tokens = 0
        self.cut(slot, n_tokens)
        return Rewound(n_tokens, "prefix" if n_tokens else "none")

    def cut(self, slot: Slot, n_tokens: int) -> None:
        """Keep exactly the first n_tokens. RewindError where the target cannot."""
        self._target.truncate(slot.id, n_tokens)
        self._drafter.truncate(slot.id, n_tokens)
        slot.tokens.truncate(n_tokens)
        self._drop_past(slot, n_tokens)

    def clear(self, slot: Slot) -> None:
        """Empty: target, drafter, tokens and checkpoints."""
        self.cut(slot, 0)

    def _drop_past(self, slot: Slot, n_tokens: int) -> None:
        while slot.checkpoints and slot.checkpoints[-1].n_tokens > n_tokens:
            slot.checkpoints.pop()
