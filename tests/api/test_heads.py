"""A request's head beyond the bound is refused before it has ended, whatever it is made of."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import uvicorn

from spec_server.api import heads
from spec_server.api.app import create_app
from spec_server.api.base import ApiOptions, EngineHolder
from tests.fakes import FakeEngine

pytestmark = pytest.mark.http
MOST = heads.MOST_HEAD_BYTES
REST = b"host: a\r\n"
BEGIN = b"GET /health HTTP/1.1\r\n"
COUNTED = len("/health") + len(REST)  # what of the shortest head counts


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(EngineHolder(FakeEngine()), ApiOptions())
    config = uvicorn.Config(app, http=heads.HTTP, log_level="critical", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield listener.getsockname()
    server.should_exit = True
    thread.join(5)
    listener.close()


@pytest.fixture
def wire(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=5) as wire:
        yield wire


def status(wire: socket.socket) -> int:
    return int(answer(wire)[0].split()[1])


def answer(wire: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        more = wire.recv(65536)
        assert more, "closed without an answer"
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    [length] = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while len(body) < int(length.split(b":")[1]):
        body += wire.recv(65536)
    return head, body


def header(n_bytes: int) -> bytes:
    """A header that counts as so many bytes."""
    return b"x: " + b"a" * (n_bytes - len(b"x: \r\n")) + b"\r\n"


@pytest.mark.parametrize(("over", "expected"), [(0, 200), (1, 431)])
@pytest.mark.parametrize("kind", ["one", "many", "url"])
def test_the_border(wire: socket.socket, kind: str, over: int, expected: int) -> None:
    left = MOST - COUNTED + over
    if kind == "url":
        wire.sendall(b"GET /health?" + b"a" * (left - 1) + b" HTTP/1.1\r\n" + REST + b"\r\n")
    else:
        rows = [header(100)] * (left // 100 - 1) if kind == "many" else []
        wire.sendall(BEGIN + REST + b"".join(rows) + header(left - 100 * len(rows)) + b"\r\n")
    assert status(wire) == expected


def test_the_answer_is_an_error_as_all_others(wire: socket.socket) -> None:
    wire.sendall(BEGIN + REST + header(MOST) + b"\r\n")
    head, body = answer(wire)
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == (431, "invalid_request_error")
    assert str(MOST) in error["message"]


@pytest.mark.parametrize("start", [BEGIN + b"x: ", BEGIN, b"GET /", b"\r\n" * MOST])
def test_a_head_that_never_ends_is_refused(wire: socket.socket, start: bytes) -> None:
    wire.sendall(start)
    for _ in range(20):
        wire.sendall(b"a" * (MOST // 4))
        time.sleep(0.001)
    assert status(wire) in (400, 431)
    if start.startswith(b"GET"):
        wire.settimeout(5)
        assert wire.recv(1) == b"", "still open"


def test_the_next_request_of_a_connection_is_counted_anew(wire: socket.socket) -> None:
    for _ in range(3):
        wire.sendall(BEGIN + REST + header(MOST - COUNTED) + b"\r\n")
        assert status(wire) == 200
    wire.sendall(BEGIN + REST + header(MOST - COUNTED + 1) + b"\r\n")
    assert status(wire) == 431


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_does_not_count(wire: socket.socket, is_chunked: bool) -> None:
    body = json.dumps({"prompt": "a", "n_predict": 1}).encode().ljust(4 * MOST)
    head = b"POST /completion HTTP/1.1\r\n" + REST
    if is_chunked:
        wire.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        for i in range(0, len(body), 1000):
            piece = body[i : i + 1000]
            wire.sendall(b"%x\r\n" % len(piece) + piece + b"\r\n")
        wire.sendall(b"0\r\n\r\n")
    else:
        wire.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert status(wire) == 200


def test_trailers_count(wire: socket.socket) -> None:
    """The answer waits for them, so there is none: the connection closes."""
    wire.sendall(b"POST /completion HTTP/1.1\r\n" + REST + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ")
    with suppress(OSError):  # reset or broken pipe, at some write
        for _ in range(200):
            wire.sendall(b"a" * MOST)
            time.sleep(0.001)
        pytest.fail("all of it was read")
