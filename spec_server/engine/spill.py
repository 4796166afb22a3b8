"""Where checkpoint states lie: in memory, or in unlinked files that go with the process; knows no slots."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from pathlib import Path
from typing import Protocol

from persistence.snapshot import Blob, SequenceState

log = logging.getLogger(__name__)

CAN_UNLINK_OPEN_FILES = os.name == "posix"


class Spill(Protocol):
    in_memory: bool  # where it means to hold states; a single one may still end in memory

    def buffer(self, n_bytes: int) -> memoryview:
        """Room to capture one state into, before it is handed to `keep`. One thread only."""

    def keep(self, state: SequenceState) -> SequenceState:
        """The same state, held where this spill holds states. Any thread."""


class HeapSpill:
    """States stay in memory."""

    in_memory = True

    def buffer(self, n_bytes: int) -> memoryview:
        return memoryview(bytearray(n_bytes))

    def keep(self, state: SequenceState) -> SequenceState:
        return state


class FileSpill:
    """Each state lies in an unlinked file, mapped read-only: its pages are the file's and may be dropped.

    The map holds the descriptor: the space is free once nobody holds the state, or the process is dead.
    A state that cannot be written (no room, no descriptors left) stays in memory.
    """

    in_memory = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._scratch = bytearray()

    def buffer(self, n_bytes: int) -> memoryview:
        # One for all captures: a new one each time would leave its pages to the allocator.
        if len(self._scratch) < n_bytes:
            self._scratch = bytearray(n_bytes)
        return memoryview(self._scratch)[:n_bytes]

    def keep(self, state: SequenceState) -> SequenceState:
        parts = (state.target, state.draft, state.spec)
        try:
            mapped = self._map(parts, state.n_bytes)
        except OSError as e:
            log.warning("a checkpoint stays in memory, it cannot be written to %s: %s", self._directory, e)
            return SequenceState(*(bytes(part) for part in parts))  # the caller's buffer is used again
        views = []
        start = 0
        for part in parts:
            views.append(mapped[start : start + len(part)])
            start += len(part)
        return SequenceState(*views)

    def _map(self, parts: tuple[Blob, ...], n_bytes: int) -> memoryview:
        with tempfile.TemporaryFile(dir=self._directory, buffering=0) as file:
            for part in parts:
                _write_all(file.fileno(), memoryview(part))
            return memoryview(mmap.mmap(file.fileno(), n_bytes, access=mmap.ACCESS_READ))


def is_in_memory(state: SequenceState) -> bool:
    return not isinstance(memoryview(state.target).obj, mmap.mmap)


def make_spill(directory: Path | None) -> Spill:
    """OSError where `directory` cannot hold files."""
    if directory is None:
        return HeapSpill()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not CAN_UNLINK_OPEN_FILES:
        log.warning("this platform cannot unlink an open file: checkpoints stay in memory")
        return HeapSpill()
    with tempfile.TemporaryFile(dir=directory):
        return FileSpill(directory)


def _write_all(fd: int, data: memoryview) -> None:
    data = data.cast("B")
    while data:
        data = data[os.write(fd, data) :]
