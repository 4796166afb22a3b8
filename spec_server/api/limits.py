"""Keeps a request's body within a bound, announced or not, before anything parses it."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spec_server.api.errors import error_body
from spec_server.api.jsonio import json_response


class BodyLimit:
    """413 for a body of more than `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            await json_response(self._error(), 413)(scope, receive, send)
            return
        n_bytes = 0

        async def counted() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > self._max_bytes:
                raise HTTPException(413, self._reason())
            return message

        await self._app(scope, counted, send)

    def _reason(self) -> str:
        return f"the body is larger than {self._max_bytes} bytes"

    def _error(self) -> dict[str, object]:
        return error_body(413, "invalid_request_error", self._reason())
