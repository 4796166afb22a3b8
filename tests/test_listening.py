"""The socket that is opened before a model is loaded."""

from __future__ import annotations

import socket

import pytest

from spec_server.listening import listen, url_of


def test_who_connects_at_once_is_not_turned_away() -> None:
    [listener] = listen("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname(), timeout=5):
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_name_gets_a_socket_for_its_addresses() -> None:
    """Machines without IPv6 often have ::1 for localhost all the same."""
    sockets = listen("localhost", 0)
    assert "127.0.0.1" in [sock.getsockname()[0] for sock in sockets]
    for sock in sockets:
        sock.close()


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"^--port {port} on 127.0.0.1: Address already in use$"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "x" * 70, "a..b"])
def test_a_host_that_is_not_here_is_named(host: str) -> None:
    with pytest.raises(OSError, match=f"^--host {host}: "):
        listen(host, 0)
