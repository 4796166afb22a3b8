"""The socket, opened before anything is loaded: a port that is taken shows at once."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

_BACKLOG = 2048  # uvicorn's own
_NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # localhost has ::1 where there is no IPv6, too


def listen(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of the host; OSError names the flag and its value."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "no host's name"
        raise OSError(f"--host {host}: {reason}") from None
    sockets: list[socket.socket] = []
    failed: OSError | None = None
    for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
        try:
            sockets.append(socket.create_server(address, family=family, backlog=_BACKLOG))
        except OSError as e:
            failed = e
            if e.errno not in _NO_SUCH_FAMILY:
                break
    if failed is None or (sockets and failed.errno in _NO_SUCH_FAMILY):
        return sockets
    for sock in sockets:
        sock.close()
    place = (
        f"--host {host}" if failed.errno in _NO_SUCH_FAMILY else f"--port {port} on {host or 'any address'}"
    )
    raise OSError(f"{place}: {os.strerror(failed.errno or 0)}")


class Server(uvicorn.Server):
    """uvicorn with our own signal handling: streams are ended first, and the process leaves with status 0."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()
        self.failed = False

    def stop(self) -> None:
        self.stopping.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
