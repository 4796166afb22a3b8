"""A fake file system that forgets what was not synced: power can fail after any call."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from persistence.files import FileInfo
from persistence.snapshot import Blob


class PowerFailure(BaseException):
    """Not an Exception: nothing in the code under test may go on after it."""


@dataclass
class Node:
    inode: int
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    is_file: bool = True


@dataclass(frozen=True)
class Wreck:
    """What survives: which share of unsynced bytes, how many of the unsynced directory operations."""

    keep_data: float
    n_operations: int


class MemoryFiles:
    """Implements Files. `before_call(n, verb)` runs ahead of each changing call; it may raise."""

    def __init__(self) -> None:
        self.entries: dict[Path, Node] = {}
        self.durable: dict[Path, Node] = {}
        self.pending: list[Callable[[dict[Path, Node]], None]] = []
        self.descriptors: dict[int, Node] = {}
        self.directories: set[Path] = {Path("/")}
        self.calls: list[str] = []
        self.before_call: Callable[[int, str], None] = lambda n, verb: None
        self.write_limit = 7
        self.read_limit = 11
        self._counter = count(3)

    def _call(self, verb: str) -> None:
        self.calls.append(verb)
        self.before_call(len(self.calls) - 1, verb)

    def _operate(self, operation: Callable[[dict[Path, Node]], None]) -> None:
        operation(self.entries)
        self.pending.append(operation)

    def create(self, path: Path) -> int:
        self._call("create")
        if path in self.entries:
            raise FileExistsError(errno.EEXIST, "exists")
        node, fd = Node(next(self._counter)), next(self._counter)
        self._operate(lambda entries: entries.__setitem__(path, node))
        self.descriptors[fd] = node
        return fd

    def write(self, fd: int, data: Blob) -> int:
        self._call("write")
        # Short writes are the rule here.
        taken = bytes(data[: self.write_limit])
        self.descriptors[fd].data += taken
        return len(taken)

    def fsync(self, fd: int) -> None:
        self._call("fsync")
        self.descriptors[fd].synced = bytes(self.descriptors[fd].data)

    def close(self, fd: int) -> None:
        del self.descriptors[fd]

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename")
        self._operate(lambda entries: entries.__setitem__(target, entries.pop(source)))

    def fsync_directory(self, path: Path) -> None:
        self._call("fsync_directory")
        for operation in self.pending:
            operation(self.durable)
        self.pending.clear()

    def unlink(self, path: Path) -> None:
        self._call("unlink")
        if path not in self.entries:
            raise FileNotFoundError(errno.ENOENT, "missing")
        self._operate(lambda entries: entries.__delitem__(path))

    def open(self, path: Path) -> int:
        fd = next(self._counter)
        self.descriptors[fd] = self._node(path)
        return fd

    def read(self, fd: int, out: memoryview, offset: int) -> int:
        data = self.descriptors[fd].data[offset : offset + min(len(out), self.read_limit)]
        out[: len(data)] = data
        return len(data)

    def info(self, path: Path) -> FileInfo:
        if path in self.directories:
            return FileInfo(0, 0, 0, False)
        return self._info(self._node(path))

    def info_of(self, fd: int) -> FileInfo:
        return self._info(self.descriptors[fd])

    def names(self, path: Path) -> Sequence[str]:
        if path not in self.directories:
            raise FileNotFoundError(errno.ENOENT, "missing")
        return [entry.name for entry in self.entries if entry.parent == path]

    def make_directory(self, path: Path) -> None:
        self.directories.update((path, *path.parents))

    def is_locked(self, path: Path) -> bool:
        return self._node(path) in self.descriptors.values()

    def _node(self, path: Path) -> Node:
        if path not in self.entries:
            raise FileNotFoundError(errno.ENOENT, "missing")
        return self.entries[path]

    def _info(self, node: Node) -> FileInfo:
        return FileInfo(len(node.data), node.inode, node.inode, node.is_file)

    def put(self, path: Path, data: bytes) -> None:
        """A file as if it had always been there."""
        self.entries[path] = self.durable[path] = Node(next(self._counter), bytearray(data), data)

    def after_power_failure(self, wreck: Wreck) -> MemoryFiles:
        """The disk as a restart finds it. Directory operations survive in order, a first part of them."""
        found = MemoryFiles()
        found.directories = set(self.directories)
        entries = dict(self.durable)
        for operation in self.pending[: wreck.n_operations]:
            operation(entries)
        for path, node in entries.items():
            unsynced = len(node.data) - len(node.synced)
            data = node.data[: len(node.synced) + int(unsynced * wreck.keep_data)]
            found.entries[path] = found.durable[path] = Node(node.inode, bytearray(data), bytes(data))
        return found
