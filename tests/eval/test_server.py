"""Server processes are waited for, stopped, killed and started again; fakes stand in for real ones."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from eval.server import ServerDied, ServerProcess

FAKE = [sys.executable, str(Path(__file__).with_name("fake_server.py"))]


def test_a_started_server_answers_and_a_stopped_one_is_gone(tmp_path):
    server = ServerProcess(FAKE, log_path=tmp_path / "log")
    server.start()
    pid = server.pid
    assert httpx.get(f"{server.base_url}/health").status_code == 200
    assert server.stop() == 0
    assert not psutil.pid_exists(pid)


def test_leaving_the_block_stops_the_server_after_an_error_too(tmp_path):
    server = ServerProcess(FAKE, log_path=tmp_path / "log")
    pids = []

    def fail_inside() -> None:
        with server:
            pids.append(server.pid)
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert not psutil.pid_exists(pids[0])


def test_a_restart_is_another_process(tmp_path):
    with ServerProcess(FAKE, log_path=tmp_path / "log") as server:
        before = server.pid
        server.restart()
        assert server.pid != before
        assert httpx.get(f"{server.base_url}/health").status_code == 200


def test_a_server_that_ignores_the_request_to_stop_is_killed(tmp_path):
    server = ServerProcess([*FAKE, "--ignores-sigterm"], log_path=tmp_path / "log", stop_s=0.3)
    server.start()
    assert server.stop() == -signal.SIGKILL


def test_a_stop_that_is_interrupted_kills(tmp_path, monkeypatch):
    server = ServerProcess([*FAKE, "--ignores-sigterm"], log_path=tmp_path / "log")
    server.start()
    pid = server.pid

    def interrupted(self: object, timeout: float | None = None) -> int:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr("subprocess.Popen.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    assert not psutil.pid_exists(pid)


def test_a_server_that_ends_at_once_is_reported_with_its_last_words(tmp_path):
    started = time.monotonic()
    with pytest.raises(ServerDied, match=r"(?s)status 1.*no such model"):
        ServerProcess([*FAKE, "--dies"], log_path=tmp_path / "log").start()
    assert time.monotonic() - started < 60


def test_a_server_that_never_gets_ready_is_given_up(tmp_path):
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(ServerDied, match="not ready in 1 s"):
        ServerProcess(sleeper, log_path=tmp_path / "log", ready_s=1.0).start()
