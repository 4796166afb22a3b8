"""What the engine thread has to say to the event loop; text of a few milliseconds goes over in one call.

Handing over costs about as much as all else that a token costs beside the decode: the loop wakes up, and a chunk is
written and read. Nobody sees the difference between a token at once and one that is 20 ms late.
"""

from __future__ import annotations

import asyncio
import time

from spec_server.engine.base import Delta, Event

Events = asyncio.Queue[Event | Exception]
INTERVAL_S = 0.02


class Outbox:
    """Written and emptied by the engine thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: list[tuple[Events, Event | Exception]] = []
        self._is_urgent = False
        self._sent_at = 0.0

    def put(self, events: Events, event: Event | Exception) -> None:
        self._items.append((events, event))
        self._is_urgent = self._is_urgent or not isinstance(event, Delta)

    @property
    def is_due(self) -> bool:
        """Is there more than text, or has text waited long enough?"""
        return self._is_urgent or time.perf_counter() - self._sent_at >= INTERVAL_S

    def hand_over(self) -> None:
        """All that is there."""
        if self._items:
            self._loop.call_soon_threadsafe(_deliver, self._items)
            self._items, self._is_urgent = [], False
            self._sent_at = time.perf_counter()


def _deliver(items: list[tuple[Events, Event | Exception]]) -> None:
    for events, item in items:
        events.put_nowait(item)
