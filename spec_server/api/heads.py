"""Keeps the head of a request within a bound: httptools has none, and no key is looked at before its end."""

from __future__ import annotations

from typing import Any

from spec_server.api.errors import error_body
from spec_server.api.jsonio import dumps

MOST_HEAD_BYTES = 64 << 10
_LINGER_S = 1.0  # closed at once, a client that still writes would lose the answer to a reset

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # uvicorn then takes h11, which has a bound of the same size
    HTTP: Any = "h11"
else:

    class BoundedProtocol(HttpToolsProtocol):
        """431 for a request line and headers, trailers too, of more than MOST_HEAD_BYTES in all.

        What the parser has handed out of this request is counted exactly; what it may be holding back, a value
        that has not ended, by the bytes that came in since it last handed something out.
        """

        _n_out = _n_held = 0
        _is_refused = False

        def data_received(self, data: bytes) -> None:
            if self._is_refused:
                return
            self._n_held += len(data)
            held = self._n_held
            super().data_received(data)
            if self._n_held < held:
                self._n_held = 0  # something came out: what is left of this piece is small
            elif self._n_out + held > MOST_HEAD_BYTES:
                self._refuse()

        def on_message_begin(self) -> None:
            self._n_out = self._n_held = 0
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value) + len(b": \r\n"))
            super().on_header(name, value)

        def on_body(self, body: bytes) -> None:
            self._n_held = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._n_held = 0
            super().on_message_complete()

        def _count(self, n_bytes: int) -> None:
            self._n_held = 0
            self._n_out += n_bytes
            if self._n_out > MOST_HEAD_BYTES:
                raise ValueError("the head is too large")  # ends the parser, and comes to send_400_response

        def send_400_response(self, msg: str) -> None:
            if self._n_out > MOST_HEAD_BYTES:
                self._refuse()
            else:
                super().send_400_response(msg)

        def _refuse(self) -> None:
            self._is_refused = True
            if self.cycle is not None and not self.cycle.response_complete:
                self.transport.close()  # in the middle of another answer nothing can be said
                return
            message = f"the request's head is larger than {MOST_HEAD_BYTES} bytes"
            body = dumps(error_body(431, "invalid_request_error", message))
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                b"content-type: application/json; charset=utf-8\r\nconnection: close\r\n"
                b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
            )
            self.loop.call_later(_LINGER_S, self.transport.close)

    HTTP = BoundedProtocol
