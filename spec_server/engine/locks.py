"""Whole-slot work (save, restore, erase) waits until its slot is idle, in order, and keeps requests off it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from spec_server.engine.core import EngineCore
from spec_server.engine.errors import Unavailable


class Call(Protocol):
    """Runs work on the engine thread."""

    def __call__(self, work: Callable[[], Any], /) -> Awaitable[Any]: ...


class SlotLocks:
    """One holder per slot. A request that is running on it ends first; waiting requests come after."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._locks = [asyncio.Lock() for _ in core.slots]
        self._loop = asyncio.get_running_loop()

    @asynccontextmanager
    async def held(self, id_slot: int, call: Call) -> AsyncIterator[None]:
        """SlotNotFound where there is no such slot."""
        self._core.slot(id_slot)
        async with self._locks[id_slot]:
            taken = asyncio.Event()
            await call(lambda: self._core.reserve(id_slot, self._notify(taken)))
            try:
                await taken.wait()
                yield
            finally:
                with suppress(Unavailable):
                    await asyncio.shield(call(lambda: self._core.unreserve(id_slot)))

    def _notify(self, taken: asyncio.Event) -> Callable[[], None]:
        def notify() -> None:
            self._loop.call_soon_threadsafe(taken.set)

        return notify
