"""Prompt to target in chunks; one decode holds at most one micro-batch of prompt tokens over all slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spec_server.engine.slot import Slot, SlotState
from spec_server.engine.task import Task
from spec_server.runtime.batch import Batch, Part


def add_chunks(
    batch: Batch, slots: Sequence[Slot], n_ubatch: int, border: Callable[[Task, int], int]
) -> list[tuple[Slot, Part]]:
    """Fill what decoding slots left of one micro-batch with prompt tokens, oldest request first, one chunk per slot.

    A chunk ends at `border(task, n_tokens)` at the latest, where a checkpoint is wanted.
    """
    chunks: list[tuple[Slot, Part]] = []
    room = n_ubatch - batch.n_tokens
    reading = [s for s in slots if s.state is SlotState.PREFILL]
    for slot in sorted(reading, key=lambda s: s.task.started if s.task else 0.0):
        if room <= 0:
            break
        assert slot.task is not None
        prompt, done = slot.task.prompt, len(slot.tokens)
        n = min(room, border(slot.task, done) - done)
        is_last = done + n == len(prompt)
        part = batch.add(slot.id, prompt[done : done + n], done, output="last" if is_last else "none")
        chunks.append((slot, part))
        room -= n
    return chunks
