"""Reading event streams, and an ASGI client that can hang up in the middle."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message

USER = [{"role": "user", "content": "hi"}]


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of every data line but the end marker."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat_text(text: str) -> str:
    return "".join(
        choice["delta"].get("content") or "" for event in events(text) for choice in event.get("choices", ())
    )


class RawClient:
    """One POST whose client reads what it likes and hangs up when it likes."""

    def __init__(self, app: ASGIApp, path: str, body: object) -> None:
        self._body = json.dumps(body).encode()
        self._gone = asyncio.Event()
        self._has_sent_body = False
        self.messages: list[Message] = []
        self.breaks_at = -1
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1),
            "server": ("test", 80),
            "scheme": "http",
            "root_path": "",
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def hang_up(self) -> None:
        self._gone.set()

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    async def _receive(self) -> Message:
        if not self._has_sent_body:
            self._has_sent_body = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if len(self.messages) == self.breaks_at:
            raise OSError("broken pipe")
        self.messages.append(message)
