"""What the engine thread says reaches the event loop in order, text not at once, and nothing late that matters."""

from __future__ import annotations

import asyncio
import time

import pytest

from spec_server.engine import outbox
from spec_server.engine.base import Delta, Event, Started
from spec_server.engine.errors import GenerationFailed
from spec_server.engine.outbox import Events, Outbox


def drained(events: Events) -> list[Event | Exception]:
    found = []
    while not events.empty():
        found.append(events.get_nowait())
    return found


async def delivered(events: Events) -> list[Event | Exception]:
    await asyncio.sleep(0)  # what was handed over runs in the loop's next turn
    return drained(events)


def test_text_is_due_when_it_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: now)
        box, one, other = Outbox(asyncio.get_running_loop()), Events(), Events()
        assert box.is_due  # the first text is late by any clock
        box.put(one, Delta("a", (1,)))
        box.hand_over()
        assert await delivered(one) == [Delta("a", (1,))]
        now += 0.8 * outbox.INTERVAL_S
        box.put(one, Delta("b", (2,)))
        box.put(other, Delta("B", (12,)))
        assert not box.is_due
        assert drained(one) == []
        now += 0.4 * outbox.INTERVAL_S
        assert box.is_due
        box.hand_over()
        assert not box.is_due
        assert await delivered(one) == [Delta("b", (2,))]
        assert drained(other) == [Delta("B", (12,))]
        box.hand_over()
        assert await delivered(one) == []

    asyncio.run(run())


@pytest.mark.parametrize("event", [Started(0, 5, 0), GenerationFailed("x")])
def test_what_is_more_than_text_goes_at_once_and_in_order(event: Event | Exception) -> None:
    async def run() -> None:
        box, events = Outbox(asyncio.get_running_loop()), Events()
        box.put(events, Delta("a", (1,)))
        box.hand_over()
        drained_first = await delivered(events)
        assert drained_first == [Delta("a", (1,))]
        before, after = Delta("b", (2,)), Delta("c", (3,))
        for item in (before, event, after):
            box.put(events, item)
        assert box.is_due
        box.hand_over()
        assert await delivered(events) == [before, event, after]

    asyncio.run(run())
