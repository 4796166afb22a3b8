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
        self._open: dict[Events, int] = {}  # item that more text of the same stream may join
        self._is_urgent = False
        self._sent_at = 0.0

    def put(self, events: Events, event: Event | Exception) -> None:
        at = self._open.get(events, -1)
        if not isinstance(event, Delta):
            self._is_urgent = True
            self._open.pop(events, None)
        elif at >= 0:
            before = self._items[at][1]
            assert isinstance(before, Delta)
            self._items[at] = events, Delta(before.text + event.text, before.tokens + event.tokens)
            return
        else:
            self._open[events] = len(self._items)
        self._items.append((events, event))

    def hand_over(self) -> None:
        """All that is there."""
        if self._items:
            self._loop.call_soon_threadsafe(_deliver, self._items)
            self._items, self._is_urgent = [], False
            self._open.clear()
            self._sent_at = time.perf_counter()

    def hand_over_if_due(self) -> None:
        """The same, where something is there that is more than text, or text that has waited."""
        if self._is_urgent or time.perf_counter() - self._sent_at >= INTERVAL_S:
            self.hand_over()


def _deliver(items: list[tuple[Events, Event | Exception]]) -> None:
    for events, item in items:
        events.put_nowait(item)
