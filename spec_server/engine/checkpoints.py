"""Checkpoints: take, thin out, find, apply; only for memory that cannot be rewound token by token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from draft.base import Drafter, DraftState, DraftStateError
from persistence.snapshot import Checkpoint, SequenceState
from spec_server.engine.slot import Slot
from spec_server.engine.spill import Spill
from spec_server.engine.task import Task
from spec_server.runtime.context import Context
from spec_server.runtime.errors import StateError

log = logging.getLogger(__name__)

_FROM_END = 4  # tokens: a retokenised tail or a changed generation prompt still finds the newest checkpoint
_LEAST_STEP = 256


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """n_max per slot; ram_bytes over all slots; min_step tokens between two that nothing asked for (0: automatic)."""

    n_max: int = 32
    min_step: int = 0
    ram_bytes: int = 1 << 30


class CheckpointKeeper:
    """All slots' checkpoints. They lie in the slots; this decides which there are."""

    def __init__(
        self,
        target: Context,
        drafter: Drafter,
        slots: Sequence[Slot],
        options: CheckpointOptions,
        spill: Spill,
    ) -> None:
        self.enabled = target.needs_checkpoints and options.n_max > 0
        self._target = target
        self._drafter = drafter
        self._slots = slots
        self._options = options
        self._spill = spill

    # -- taking

    def border(self, task: Task, n_tokens: int) -> int:
        """Where the next prompt chunk has to end at the latest so that a wanted checkpoint can be taken."""
        if not self.enabled:
            return len(task.prompt)
        wanted = (*task.request.boundaries, len(task.prompt) - _FROM_END)
        return min((b for b in wanted if n_tokens < b < len(task.prompt)), default=len(task.prompt))

    def after_chunk(self, slot: Slot, task: Task) -> None:
        """The slot's prompt stands at len(slot.tokens): take a checkpoint where one is due."""
        n = len(slot.tokens)
        if not self.enabled or n >= len(task.prompt):
            return
        newest = slot.checkpoints[-1].n_tokens if slot.checkpoints else 0
        due = n in task.request.boundaries or n == len(task.prompt) - _FROM_END
        if n > newest and (due or n - newest >= self._min_step(slot)):
            self._take(slot)

    def _min_step(self, slot: Slot) -> int:
        """What the user asked for, else as close as the budget allows a full context, but not below 256."""
        if self._options.min_step > 0:
            return self._options.min_step
        if not slot.checkpoints:
            return _LEAST_STEP
        size = max(1, slot.checkpoints[-1].state.n_bytes)
        fitting = min(self._options.n_max, self._options.ram_bytes // (size * len(self._slots)))
        return max(_LEAST_STEP, self._target.n_ctx_seq // max(1, fitting))

    def _take(self, slot: Slot) -> None:
        """Capture target and drafter part-way, then thin out."""
        size = self._target.state_size(slot.id, partial=True)
        draft_size = self._drafter.state_size(slot.id, partial=True)
        if self._spill.in_memory and size + draft_size > self._options.ram_bytes:
            return
        target = self._target.read_state(slot.id, memoryview(bytearray(size)), partial=True)
        draft = self._drafter.capture(slot.id, memoryview(bytearray(draft_size)), partial=True)
        pos_min, pos_max = self._target.pos_range(slot.id)
        state = self._spill.keep(SequenceState(target, draft.context, draft.spec))
        slot.checkpoints.append(Checkpoint(len(slot.tokens), pos_min, pos_max, state))
        self.thin_out(slot)

    def keep(self, state: SequenceState) -> SequenceState:
        """Hold a state where this server holds checkpoints. Any thread."""
        return self._spill.keep(state)

    def adopt(self, slot: Slot, checkpoints: Sequence[Checkpoint], *, with_draft: bool) -> None:
        """Give a restored slot the checkpoints of its file; their draft parts only where its draft block fitted."""
        if not self.enabled:
            return
        for c in checkpoints:
            state = c.state if with_draft else SequenceState(c.state.target)
            slot.checkpoints.append(Checkpoint(c.n_tokens, c.pos_min, c.pos_max, state))
        self.thin_out(slot)

    def thin_out(self, slot: Slot) -> None:
        """Bring the slot to n_max checkpoints and all slots to the budget; the slot's newest always stays."""
        while len(slot.checkpoints) > self._options.n_max:
            drop_closest(slot.checkpoints)
        if not self._spill.in_memory:
            return
        while self._bytes() > self._options.ram_bytes:
            others = [s for s in self._slots if s is not slot and s.checkpoints and s.task is None]
            if others:
                victim = min(others, key=lambda s: s.last_used)
                drop_closest(victim.checkpoints, keep_newest=False)
            elif len(slot.checkpoints) > 1:
                drop_closest(slot.checkpoints)
            else:
                break

    def _bytes(self) -> int:
        return sum(c.state.n_bytes for s in self._slots for c in s.checkpoints)

    # -- applying

    def apply_newest(self, slot: Slot, n_tokens: int) -> int:
        """Load the newest checkpoint at or before n_tokens into target and drafter; its length, 0 where none loads.

        One that fails to load is dropped and leaves the slot's sequence empty: then 0 as well.
        """
        usable = [c for c in slot.checkpoints if 0 < c.n_tokens <= n_tokens]
        if not usable:
            return 0
        checkpoint = usable[-1]
        try:
            self._target.write_state(
                slot.id, memoryview(checkpoint.state.target), checkpoint.n_tokens, partial=True
            )
        except StateError as e:
            log.warning("slot %d: a checkpoint at %d tokens does not load: %s", slot.id, checkpoint.n_tokens, e)
            slot.checkpoints.remove(checkpoint)
            return 0
        slot.tokens.truncate(checkpoint.n_tokens)
        state = DraftState(checkpoint.state.draft, checkpoint.state.spec)
        try:
            self._drafter.apply(slot.id, state, slot.tokens.view(), partial=True)
        except DraftStateError as e:
            log.warning("slot %d: the draft part of a checkpoint does not load: %s", slot.id, e)
        return checkpoint.n_tokens


def drop_closest(checkpoints: list[Checkpoint], *, keep_newest: bool = True) -> None:
    """Remove the one whose neighbours are nearest to each other, so that the rest stay spread over the prompt."""
    last = len(checkpoints) - 1
    candidates = range(last) if keep_newest and last > 0 else range(last + 1)

    def gap(i: int) -> int:
        before = checkpoints[i - 1].n_tokens if i else 0
        after = checkpoints[i + 1].n_tokens if i < last else checkpoints[i].n_tokens + before
        return after - before

    checkpoints.pop(min(candidates, key=gap))
