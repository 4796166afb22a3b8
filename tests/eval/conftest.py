"""Fakes of a server to measure, in this process and as a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.eval.fake_server import FakeServer


@pytest.fixture
def start_fake() -> Iterator[Callable[..., FakeServer]]:
    servers: list[FakeServer] = []

    def start(**settings: object) -> FakeServer:
        server = FakeServer(**settings)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
