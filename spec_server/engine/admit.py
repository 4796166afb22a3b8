"""Requests to slots: the waiting line, and which slot a request gets; touches no context but through Rollback."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from spec_server.engine.slot import Slot, SlotState
from spec_server.engine.task import Task

_SIMILARITY = 0.1  # llama-server's default of --slot-prompt-similarity: less of the prompt shared is no match


class WaitingLine:
    """First come, first served, except that a request bound to a busy slot does not hold up the others."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._is_held = False

    def __len__(self) -> int:
        return len(self._tasks)

    def push(self, task: Task) -> None:
        self._tasks.append(task)

    def put_back(self, task: Task) -> None:
        """To the head of the line, where everybody waits until a request has ended."""
        self._tasks.appendleft(task)
        self._is_held = True

    def go_on(self) -> None:
        """A request has ended."""
        self._is_held = False

    def clear(self) -> list[Task]:
        """Take everybody off the line."""
        tasks = list(self._tasks)
        self._tasks.clear()
        return tasks

    def drop_cancelled(self) -> None:
        if self._tasks and any(t.cancelled for t in self._tasks):
            self._tasks = deque(t for t in self._tasks if not t.cancelled)

    def take(self, slots: Sequence[Slot]) -> list[tuple[Task, Slot]]:
        """Pair as many waiting tasks with idle slots as there are."""
        if self._is_held or not self._tasks:
            return []
        pairs: list[tuple[Task, Slot]] = []
        idle = [s for s in slots if s.state is SlotState.IDLE]
        if not idle:
            return []
        left: deque[Task] = deque()
        for task in self._tasks:  # nobody is off the line before all of it went well
            slot = choose_slot(task, idle) if idle else None
            if slot is None:
                left.append(task)
            else:
                idle.remove(slot)
                pairs.append((task, slot))
        self._tasks = left
        return pairs


def choose_slot(task: Task, idle: Sequence[Slot]) -> Slot | None:
    """The named slot, else the longest shared prefix, else an empty slot, else the least recently used.

    A short shared prefix (the same system prompt) does not take another conversation's slot while one is empty.
    """
    request = task.request
    if request.id_slot >= 0:
        return next((s for s in idle if s.id == request.id_slot), None)
    empty = [s for s in idle if not len(s.tokens)]
    best, best_n = None, 0
    for slot in idle:
        if slot.owner != request.owner or not request.cache_prompt:
            continue
        n = slot.common_prefix(task.prompt)
        if empty and 2 * n < len(slot.tokens):
            continue
        if n > best_n and n > _SIMILARITY * len(task.prompt):
            best, best_n = slot, n
    if best is not None:
        return best
    return empty[0] if empty else min(idle, key=lambda s: s.last_used)
