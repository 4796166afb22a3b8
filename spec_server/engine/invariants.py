"""The step invariant: what is true of every slot between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from draft.base import Drafter
from persistence.snapshot import Checkpoint
from spec_server.engine.slot import Slot, SlotState
from spec_server.runtime.context import Context


def check(slots: Sequence[Slot], target: Context, drafter: Drafter) -> None:
    """AssertionError where a slot, its target sequence and its drafter do not stand at the same place.

    Only in mid-generation may the target be behind (rollback.py says why).
    """
    for slot in slots:
        n = len(slot.tokens)
        behind = n - target.n_tokens(slot.id)
        assert behind == 0 or (behind > 0 and slot.state is SlotState.DECODE), (
            f"slot {slot.id}: {behind} behind"
        )
        assert drafter.n_tokens(slot.id) <= n, f"slot {slot.id}: the drafter is ahead of the target"
        _check_checkpoints(slot.checkpoints, n)


def _check_checkpoints(checkpoints: Sequence[Checkpoint], n_tokens: int) -> None:
    ends = [c.n_tokens for c in checkpoints]
    assert ends == sorted(set(ends)), "checkpoints do not increase"
    assert not ends or ends[-1] <= n_tokens, "a checkpoint lies past the slot's tokens"
