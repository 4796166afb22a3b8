"""The thin seam to the file system that crash tests replace; no format, no names, no errors of ours."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from persistence.snapshot import Blob


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What a directory entry is, without following a link. `mtime_ns` and `inode` tell a replaced file."""

    size: int
    mtime_ns: int
    inode: int
    is_file: bool


class Files(Protocol):
    """Every call that touches the disk. All raise OSError; none follows a link at the end of a path."""

    def create(self, path: Path) -> int:
        """A descriptor of a new file, mode 0600, locked for as long as it is open."""

    def write(self, fd: int, data: Blob) -> int:
        """Append; the number of bytes taken, which may be fewer than given."""

    def fsync(self, fd: int) -> None: ...

    def close(self, fd: int) -> None: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def fsync_directory(self, path: Path) -> None: ...

    def unlink(self, path: Path) -> None: ...

    def open(self, path: Path) -> int:
        """A descriptor for reading."""

    def read(self, fd: int, out: memoryview, offset: int) -> int:
        """Fill `out` from `offset` on; the number of bytes read, 0 at the end of the file."""

    def info(self, path: Path) -> FileInfo: ...

    def info_of(self, fd: int) -> FileInfo: ...

    def names(self, path: Path) -> Sequence[str]: ...

    def make_directory(self, path: Path) -> None:
        """Create it and its parents, mode 0700; nothing where it exists."""

    def is_locked(self, path: Path) -> bool:
        """Whether a live process still writes the file."""


class SystemFiles:
    """The real file system."""

    def create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        # Some network file systems know no locks; there only the removal of stale files is less careful.
        _try_lock(fd)
        return fd

    def write(self, fd: int, data: Blob) -> int:
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def fsync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def open(self, path: Path) -> int:
        # O_NONBLOCK: opening a named pipe must not wait for its writer.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)

    def read(self, fd: int, out: memoryview, offset: int) -> int:
        return os.preadv(fd, [out], offset)

    def info(self, path: Path) -> FileInfo:
        return _info(os.lstat(path))

    def info_of(self, fd: int) -> FileInfo:
        return _info(os.fstat(fd))

    def names(self, path: Path) -> Sequence[str]:
        return os.listdir(path)

    def make_directory(self, path: Path) -> None:
        # pathlib gives the mode to the last directory only, so each missing one is made by itself.
        for directory in reversed((path, *path.parents)):
            if not directory.exists():
                directory.mkdir(mode=0o700, exist_ok=True)
        if not path.is_dir():
            raise NotADirectoryError(20, "not a directory", str(path))

    def is_locked(self, path: Path) -> bool:
        fd = self.open(path)
        try:
            return not _try_lock(fd)
        finally:
            os.close(fd)


def _try_lock(fd: int) -> bool:
    """False only where another descriptor holds the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _info(result: os.stat_result) -> FileInfo:
    return FileInfo(result.st_size, result.st_mtime_ns, result.st_ino, stat.S_ISREG(result.st_mode))
