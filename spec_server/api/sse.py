"""Server-sent events: one generation as a stream, pings while it is silent, an error as its last event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spec_server.api.disconnect import ClientGone, closing, unless_gone
from spec_server.api.errors import report_failure
from spec_server.api.finished import log_finished
from spec_server.api.forms import AnswerForm
from spec_server.api.jsonio import dumps
from spec_server.engine.base import Delta, Engine, GenerateRequest, Started

PING = b": ping\n\n"
MIN_INTERVAL_S = 0.05  # a request may ask for its own
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def frame(payload: object) -> bytes:
    return b"data: " + dumps(payload) + b"\n\n"


class EventStream(Response):
    """Headers wait for the engine's first event, so that a request it refuses gets its own status; if that
    takes longer than a ping interval, they go out with a ping, and a later error becomes an event."""

    media_type = "text/event-stream"

    def __init__(
        self, engine: Engine, request: GenerateRequest, form: AnswerForm, ping_interval_s: float
    ) -> None:
        super().__init__(headers=HEADERS, media_type=f"{self.media_type}; charset=utf-8")
        # The length of an empty body, which Response puts there, would end the stream at once.
        del self.headers["content-length"]
        self._engine = engine
        self._request = request
        self._form = form
        self._ping_interval_s = max(ping_interval_s, MIN_INTERVAL_S) if ping_interval_s > 0 else 0.0
        self._is_started = False
        self._last_sent = 0.0
        self._write: Send  # given with the call
        self._turn = asyncio.Lock()  # pings and events come from two tasks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._write = send
        with suppress(ClientGone):
            await unless_gone(receive, self._run())

    async def _run(self) -> None:
        async with self._pinging():
            await report_failure(
                self._relay(), lambda: self._is_started, lambda body: self._send(frame(body))
            )
        await self._write({"type": "http.response.body", "body": b"", "more_body": False})

    async def _relay(self) -> None:
        form = self._form
        async with closing(self._engine.generate(self._request)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    payload = form.chunk(event)
                    if payload is not None:
                        await self._send(frame(payload))
                elif isinstance(event, Started):
                    await self._send(b"".join(map(frame, form.opening(event))))
                else:
                    log_finished(event)
                    await self._send(b"".join(map(frame, form.closing(event))) + form.terminator)

    async def _send(self, data: bytes) -> None:
        async with self._turn:
            if not self._is_started:
                self._is_started = True
                start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await self._write(start)
            if data:
                await self._write({"type": "http.response.body", "body": data, "more_body": True})
        self._last_sent = asyncio.get_running_loop().time()

    @asynccontextmanager
    async def _pinging(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._ping()) if self._ping_interval_s > 0 else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()
        while True:
            silent_s = loop.time() - self._last_sent
            if silent_s < self._ping_interval_s:
                await asyncio.sleep(self._ping_interval_s - silent_s)
            else:
                await self._send(PING)
