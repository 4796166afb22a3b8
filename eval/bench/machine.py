"""What a measurement depends on beside the servers: cores, who else uses them, and a neighbour on purpose."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

# Ends by itself when nobody is left who would end it.
_BUSY_LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
_QUIET = 0.05  # share of one core


class Neighbour:
    """Busy loops that are stopped, in the sense of SIGSTOP, until they are wanted."""

    def __init__(self, n_loops: int, core: int | None) -> None:
        self._n_loops = n_loops
        self._core = core
        self._loops: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            for _ in range(self._n_loops):
                loop = subprocess.Popen(
                    [sys.executable, "-S", "-c", _BUSY_LOOP], stdin=subprocess.DEVNULL, start_new_session=True
                )
                self._loops.append(loop)
                if self._core is not None:
                    os.sched_setaffinity(loop.pid, {self._core})
            self.pause()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def pause(self) -> None:
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for loop in self._loops:
            loop.send_signal(number)

    def _end(self) -> None:
        for loop in self._loops:
            loop.kill()
            loop.wait()


def default_threads() -> int:
    """As our server chooses: the physical cores, one less where there are more than two."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = len({_siblings(cpu) for cpu in allowed}) or 1
    return cores - 1 if cores > 2 else cores


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text() if path.exists() else str(cpu)


def describe() -> dict[str, object]:
    return {
        "machine": f"{platform.machine()}, {_cpu_name()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def _commit() -> str:
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def unrest(pids: Sequence[int], seconds: float = 1.0) -> list[str]:
    """What disturbs a measurement that is about to begin: idle servers that are not idle, and others."""
    before, busy_before = {pid: _process_s(pid) for pid in pids}, _machine_s()
    time.sleep(seconds)
    spent = {pid: _process_s(pid) - before[pid] for pid in pids}
    own = sum(spent.values()) / seconds
    others = (_machine_s() - busy_before) / seconds - own
    found = []
    if own > _QUIET:
        found.append(f"idle servers use {own:.0%} of a core")
    if others > 2 * _QUIET:
        found.append(f"other processes use {others:.0%} of a core: the intervals will be wide")
    return found


def _process_s(pid: int) -> float:
    """User and system seconds of a process, 0 where /proc does not tell."""
    try:
        # The name, in brackets, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _machine_s() -> float:
    """Seconds that all cores together were busy."""
    try:
        fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:8]]
    except OSError:
        return 0.0
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
