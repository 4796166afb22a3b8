"""Long work beside the event loop, on threads that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from spec_server.engine.errors import Unavailable

T = TypeVar("T")
_N_THREADS = 4


class Offload:
    """Daemon threads, since a call into llama cannot be interrupted: asyncio's own executor is joined at the end."""

    def __init__(self, n_threads: int = _N_THREADS) -> None:
        self._n_threads = n_threads
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._n_started = self._n_busy = 0
        self._awaited: set[asyncio.Future[Any]] = set()

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Work whose caller goes away before it began is left out."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def job() -> None:
            if future.done():
                return
            try:
                outcome: tuple[Any, BaseException | None] = work(), None
            except BaseException as error:  # handed to the caller, traceback and all
                outcome = None, error
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, *outcome)

        self._jobs.put(job)
        self._start()
        return await future

    def abandon(self) -> None:
        """Whoever waits gets Unavailable now, and what has not begun is left out. On the event loop."""
        for future in tuple(self._awaited):
            if not future.done():
                future.set_exception(Unavailable("the server is shutting down"))

    def is_busy(self) -> bool:
        """Whether work is going on now."""
        return self._n_busy > 0

    def _start(self) -> None:
        with self._lock:
            if self._n_started < self._n_threads:
                self._n_started += 1
                threading.Thread(target=self._serve, name="offload", daemon=True).start()

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            with self._lock:
                self._n_busy += 1
            try:
                job()
            finally:
                with self._lock:
                    self._n_busy -= 1


offload = Offload()
