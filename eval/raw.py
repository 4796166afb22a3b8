"""What the machine takes for the same bytes: a plain write, a plain read, a copy; and the memory of a process."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
_RSS_ANON = re.compile(r"RssAnon:\s+(\d+) kB")


def write_ms(data: Bytes, path: Path) -> float:
    """One file of those bytes, made anew; until the last write returns. Synced and removed behind the clock."""
    began = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    left = data.data
    while left:
        left = left[os.write(fd, left) :]
    elapsed = time.perf_counter() - began
    os.fsync(fd)
    os.close(fd)
    path.unlink()
    return elapsed * 1e3


def read_ms(path: Path, out: Bytes) -> float:
    """The whole file into a buffer whose pages are there."""
    began = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    at = 0
    while n := os.preadv(fd, [out[at:]], at):  # type: ignore[list-item]
        at += n
    os.close(fd)
    return (time.perf_counter() - began) * 1e3


def copy_ms(source: Bytes, target: Bytes) -> float:
    """Into a buffer whose pages are there."""
    began = time.perf_counter()
    np.copyto(target, source)
    return (time.perf_counter() - began) * 1e3


def anonymous_bytes(pid: int) -> int:
    """What the process itself holds in memory; pages of files are the system's to keep or drop."""
    match = _RSS_ANON.search(Path(f"/proc/{pid}/status").read_text())
    if match is None:
        raise OSError(f"/proc/{pid}/status does not say RssAnon: this needs Linux 4.5")
    return int(match[1]) * 1024


class MemoryWatch:
    """The most anonymous memory that a process had while this was entered."""

    def __init__(self, pid: int, interval_s: float = 0.001) -> None:
        self._pid = pid
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.before = self.peak = 0

    def __enter__(self) -> Self:
        self.before = self.peak = anonymous_bytes(self._pid)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            self.peak = max(self.peak, anonymous_bytes(self._pid))
