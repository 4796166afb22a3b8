"""A server process of our own: started, waited for, stopped, killed, started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

LOG_LINES_SHOWN = 15


class ServerDied(Exception):
    """The process ended, or did not get ready in time; the message ends with its last log lines."""


class ServerProcess:
    """`argv` without host and port, which are added: each start takes a free port. `env` adds to ours."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log_path: Path,
        ready_s: float = 120.0,
        stop_s: float = 15.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._argv = list(argv)
        self._env = dict(env or {})
        self._log_path = log_path
        self._ready_s = ready_s
        self._stop_s = stop_s
        self._process: subprocess.Popen[bytes] | None = None
        self.base_url = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.stop()

    @property
    def pid(self) -> int:
        return self._running().pid

    def start(self) -> None:
        """Returns once /health says 200."""
        port = free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._argv, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env},
                # Ctrl-C is ours; the server is then stopped in order.
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> int:
        """SIGTERM, and SIGKILL where that is not obeyed in time. The exit status."""
        process = self._running()
        process.terminate()
        try:
            status = process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            return self.kill()
        except BaseException:
            # A second Ctrl-C must not leave it behind.
            self.kill()
            raise
        self._process = None
        return status

    def kill(self) -> int:
        """SIGKILL, for the whole group: nothing of it may hold the port or the cores."""
        process = self._running()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        self._process = None
        return process.wait()

    def restart(self) -> None:
        self.stop()
        self.start()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process

    def _wait_until_ready(self) -> None:
        process = self._running()
        deadline = time.monotonic() + self._ready_s
        # One client: a new one takes 35 ms of a core, and a server that measures itself at its start shares the cores.
        with httpx.Client(base_url=self.base_url, timeout=2.0) as client:
            while time.monotonic() < deadline:
                if (status := process.poll()) is not None:
                    raise ServerDied(f"the server ended with status {status}\n{self._last_log_lines()}")
                try:
                    if client.get("/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
        raise ServerDied(f"the server was not ready in {self._ready_s:.0f} s\n{self._last_log_lines()}")

    def _last_log_lines(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_SHOWN:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
