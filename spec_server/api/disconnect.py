"""A client that hangs up stops its work: the watch on the socket, the closing of the engine's iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar, cast

from starlette.types import Receive

from spec_server.engine.base import Event

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection before the answer was ready."""


@asynccontextmanager
async def closing(events: AsyncIterator[Event]) -> AsyncIterator[AsyncIterator[Event]]:
    """Closes the iterator on every way out; that is what frees the slot."""
    try:
        yield events
    finally:
        await cast("AsyncGenerator[Event, None]", events).aclose()


async def unless_gone(receive: Receive, work: Coroutine[None, None, Result]) -> Result:
    """The result of `work`. Once the client is gone, `work` is cancelled, awaited, and ClientGone raised."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
