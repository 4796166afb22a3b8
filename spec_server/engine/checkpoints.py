"""Checkpoints: take, thin out, find, apply; only for memory that cannot be rewound token by token."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from draft.base import Drafter, DraftState, DraftStateError
from persistence.snapshot import Checkpoint, SequenceState
from spec_server.engine.slot import Slot
from spec_server.engine.spill import Spill, is_in_memory
from spec_server.engine.task import Task
from spec_server.runtime.context import Context
from spec_server.runtime.errors import StateError

log = logging.getLogger(__name__)

_FROM_END = 4  # tokens: a retokenised tail or a changed generation prompt still finds the newest checkpoint
_LEAST_STEP = 256


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """n_max per slot, ram_bytes over all; min_step: tokens between two nobody asked for (0: automatic)."""

    n_max: int = 32
    min_step: int = 0
    ram_bytes: int = 1 << 30


@dataclass(slots=True)
class CheckpointCounts:
    """Since the start. Evicted: thinned out, not those that a rewind or an erase made void."""

    taken: int = 0
    applied: int = 0
    refused: int = 0
    draft_refused: int = 0
    evicted: int = 0


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
        self.counts = CheckpointCounts()
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
        end = len(task.prompt)
        return min((b for b in self._wanted(task) if n_tokens < b < end), default=end)

    def after_chunk(self, slot: Slot, task: Task) -> None:
        """The slot's prompt stands at len(slot.tokens): take a checkpoint where one is due."""
        n = len(slot.tokens)
        if not self.enabled or n >= len(task.prompt):
            return
        newest = slot.checkpoints[-1].n_tokens if slot.checkpoints else 0
        if n > newest and (n in self._wanted(task) or n - newest >= self._min_step(slot)):
            self._take(slot)

    def _wanted(self, task: Task) -> tuple[int, ...]:
        return (*task.request.boundaries, len(task.prompt) - _FROM_END)

    def _min_step(self, slot: Slot) -> int:
        """What the user asked for, else as close as the limits allow in a full context, but not below 256."""
        if self._options.min_step > 0:
            return self._options.min_step
        fitting = self._options.n_max
        if self._spill.in_memory and slot.checkpoints:
            size = max(1, slot.checkpoints[-1].state.n_bytes)
            fitting = min(fitting, self._options.ram_bytes // (size * len(self._slots)))
        return max(_LEAST_STEP, self._target.n_ctx_seq // max(1, fitting))

    def _take(self, slot: Slot) -> None:
        """Capture target and drafter part-way, then thin out."""
        size = self._target.state_size(slot.id, partial=True)
        draft_size = self._drafter.state_size(slot.id, partial=True)
        if self._spill.in_memory and size + draft_size > self._options.ram_bytes:
            return
        try:
            buffer = self._spill.buffer(size + draft_size)
            target = self._target.read_state(slot.id, buffer[:size], partial=True)
            draft = self._drafter.capture(slot.id, buffer[size:], partial=True)
        except (StateError, MemoryError) as e:
            log.warning("slot %d: no checkpoint at %d tokens: %s", slot.id, len(slot.tokens), e)
            return
        pos_min, pos_max = self._target.pos_range(slot.id)
        state = self._spill.keep(SequenceState(target, draft.context, draft.spec))
        slot.checkpoints.append(Checkpoint(len(slot.tokens), pos_min, pos_max, state))
        self.counts.taken += 1
        self.thin_out(slot)

    # -- from a file

    def collect(self, stored: Iterable[Checkpoint]) -> list[Checkpoint]:
        """A file's checkpoints, moved one by one to where this server holds them, within limits. Any thread."""
        kept: list[Checkpoint] = []
        if not self.enabled:
            return kept
        for checkpoint in stored:
            if checkpoint.n_tokens <= (kept[-1].n_tokens if kept else 0):
                continue
            kept.append(replace(checkpoint, state=self._spill.keep(checkpoint.state)))
            while len(kept) > self._options.n_max or self._are_too_large(kept):
                kept.pop(closest(kept, range(len(kept) - 1)))
        return kept

    def _are_too_large(self, checkpoints: Sequence[Checkpoint]) -> bool:
        return len(checkpoints) > 1 and bytes_in_memory(checkpoints) > self._options.ram_bytes

    def adopt(self, slot: Slot, checkpoints: Sequence[Checkpoint], *, with_draft: bool) -> None:
        """Give a restored slot what `collect` gave; draft parts only where the file's draft block fitted."""
        for c in checkpoints:
            slot.checkpoints.append(c if with_draft else replace(c, state=SequenceState(c.state.target)))
        self.thin_out(slot)

    def limit(self) -> str:
        """Why a file's checkpoints may be left out."""
        if not self._target.needs_checkpoints:
            return "this model's memory needs none"
        return f"at most {self._options.n_max} a slot, {self._options.ram_bytes >> 20} MiB in memory over all"

    # -- thinning out

    def thin_out(self, slot: Slot) -> None:
        """Bring the slot to n_max checkpoints and all slots to the budget; the slot's newest always stays."""
        while len(slot.checkpoints) > self._options.n_max:
            self._evict(slot, range(len(slot.checkpoints) - 1))
        while sum(bytes_in_memory(s.checkpoints) for s in self._slots) > self._options.ram_bytes:
            victim = self._victim(slot)
            if victim is None:
                return
            self._evict(*victim)

    def _victim(self, slot: Slot) -> tuple[Slot, Sequence[int]] | None:
        """Whose checkpoint goes, and which of its are in question.

        Idle slots before busy ones, longest unused first, `slot` last; a slot's newest outlives all others.
        """
        others = [s for s in self._slots if s is not slot]
        others.sort(key=lambda s: (s.task is not None, s.last_used))
        for of_newest in (False, True):
            for s in (*others, slot):
                last = len(s.checkpoints) - 1
                in_memory = [i for i, c in enumerate(s.checkpoints) if is_in_memory(c.state)]
                candidates = [i for i in in_memory if (i == last) == of_newest]
                if candidates and not (of_newest and s is slot):
                    return s, candidates
        return None

    def _evict(self, slot: Slot, candidates: Sequence[int]) -> None:
        slot.checkpoints.pop(closest(slot.checkpoints, candidates))
        self.counts.evicted += 1

    # -- applying

    def apply_newest(self, slot: Slot, n_tokens: int) -> int:
        """Load the newest checkpoint at or before n_tokens into target and drafter; its length, or 0.

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
            log.warning("slot %d: the checkpoint at %d does not load: %s", slot.id, checkpoint.n_tokens, e)
            slot.checkpoints.remove(checkpoint)
            self.counts.refused += 1
            return 0
        slot.tokens.truncate(checkpoint.n_tokens)
        self.counts.applied += 1
        state = DraftState(checkpoint.state.draft, checkpoint.state.spec)
        try:
            left_out = self._drafter.apply(slot.id, state, slot.tokens.view(), partial=True)
        except DraftStateError as e:
            left_out = str(e)
        if left_out:
            self.counts.draft_refused += 1
            log.warning("slot %d: draft of the checkpoint at %d: %s", slot.id, checkpoint.n_tokens, left_out)
        return checkpoint.n_tokens


def bytes_in_memory(checkpoints: Iterable[Checkpoint]) -> int:
    return sum(c.state.n_bytes for c in checkpoints if is_in_memory(c.state))


def closest(checkpoints: Sequence[Checkpoint], candidates: Sequence[int]) -> int:
    """The candidate whose neighbours are nearest to each other: without it the rest stay spread out."""
    ends = [0, *(c.n_tokens for c in checkpoints)]

    def gap(i: int) -> int:
        # ends[i] is the one before; the newest has none behind it, so its own distance counts twice
        after = ends[i + 2] if i + 2 < len(ends) else 2 * ends[i + 1] - ends[i]
        return after - ends[i]

    return min(candidates, key=gap)
