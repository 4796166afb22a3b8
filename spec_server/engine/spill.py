"""Where checkpoint states lie: in memory, or in unlinked files that vanish with the process; knows no slots."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from pathlib import Path
from typing import Protocol

from persistence.snapshot import SequenceState

log = logging.getLogger(__name__)


class Spill(Protocol):
    in_memory: bool

    def keep(self, state: SequenceState) -> SequenceState:
        """The same state, held where this spill holds states."""


class HeapSpill:
    """States stay in memory."""

    in_memory = True

    def keep(self, state: SequenceState) -> SequenceState:
        return state


class FileSpill:
    """Each state lies in an unlinked file, mapped read-only: the pages are the file's and can be dropped any time.

    A state that cannot be written (no room) stays in memory.
    """

    in_memory = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, state: SequenceState) -> SequenceState:
        parts = (state.target, state.draft, state.spec)
        try:
            with tempfile.TemporaryFile(dir=self._directory, buffering=0) as file:
                for part in parts:
                    _write_all(file.fileno(), memoryview(part))
                mapped = memoryview(mmap.mmap(file.fileno(), state.n_bytes, access=mmap.ACCESS_READ))
        except OSError as e:
            log.warning("a checkpoint stays in memory, it cannot be written to %s: %s", self._directory, e)
            return state
        views = []
        start = 0
        for part in parts:
            views.append(mapped[start : start + len(part)])
            start += len(part)
        return SequenceState(*views)


def make_spill(directory: Path | None) -> Spill:
    """OSError where `directory` cannot hold files."""
    if directory is None:
        return HeapSpill()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name != "posix":
        log.warning("this platform cannot unlink an open file: checkpoints stay in memory")
        return HeapSpill()
    with tempfile.TemporaryFile(dir=directory):
        return FileSpill(directory)


def _write_all(fd: int, data: memoryview) -> None:
    data = data.cast("B")
    while data:
        data = data[os.write(fd, data) :]
