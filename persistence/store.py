"""Where slot files lie: one directory per owner, one file per name. Interprets no section."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from persistence.catalog import Catalog, StoredFile
from persistence.errors import NotAFile, NotFound, from_os
from persistence.files import Files, SystemFiles
from persistence.names import check_name
from persistence.reader import SlotFile
from persistence.writer import SlotWriter

DEFAULT_OWNER = "default"
# No stored file can have a name that begins with a dot.
OWNERS_DIRECTORY = ".owners"
TEMPORARY_PREFIX = ".draftkeep-"
TEMPORARY_SUFFIX = ".tmp"


class SlotStore(Protocol):
    """Every call raises SlotFileError; each takes the owner, and none reaches another owner's files."""

    def create(self, owner: str, name: object) -> SlotWriter:
        """A writer of that file. Waits while another writer of the same name is unfinished."""

    def open(self, owner: str, name: object) -> SlotFile: ...

    def list(self, owner: str) -> Sequence[StoredFile]:
        """By name. A damaged file is listed with its error."""

    def describe(self, owner: str, name: object) -> StoredFile: ...

    def remove(self, owner: str, name: object) -> int:
        """The number of bytes the file had."""


class DirectoryStore:
    """A SlotStore in a directory of the local file system."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        """Create `root` (mode 0700) where it is missing, and remove what broken-off saves left behind.

        Raises Forbidden, NotFound, NoSpace or StorageFailed, also where `root` cannot be written.
        """
        self._root = root
        self._files = files or SystemFiles()
        self._saves = _Turns()
        self._catalog = Catalog(self._files)
        try:
            self._files.make_directory(root)
            self._probe()
            self._remove_stale(root)
            for directory in self._owner_directories():
                self._remove_stale(directory)
        except OSError as error:
            raise from_os(error, str(root)) from error

    @property
    def root(self) -> Path:
        return self._root

    def create(self, owner: str, name: object) -> SlotWriter:
        path = self._path(owner, name)
        try:
            if owner != DEFAULT_OWNER and self._root_exists():
                self._files.make_directory(path.parent)
            self._check_target(path)
        except OSError as error:
            raise from_os(error, path.name) from error
        self._saves.take(path)
        return SlotWriter(self._files, path, self._temporary(path.parent), lambda: self._saves.give(path))

    def open(self, owner: str, name: object) -> SlotFile:
        return SlotFile.open(self._path(owner, name), self._files)

    def list(self, owner: str) -> Sequence[StoredFile]:
        directory = self._directory(owner)
        try:
            return self._catalog.list(directory)
        except NotFound:
            if owner != DEFAULT_OWNER and self._root_exists():
                return []
            raise

    def describe(self, owner: str, name: object) -> StoredFile:
        return self._catalog.describe(self._path(owner, name))

    def remove(self, owner: str, name: object) -> int:
        path = self._path(owner, name)
        try:
            info = self._files.info(path)
            if not info.is_file:
                raise NotAFile(f"{path.name}: not a regular file")
            self._files.unlink(path)
            self._files.fsync_directory(path.parent)
        except OSError as error:
            raise from_os(error, path.name) from error
        return info.size

    # --- below: not for callers ---

    def _directory(self, owner: str) -> Path:
        if owner == DEFAULT_OWNER:
            return self._root
        return self._root / OWNERS_DIRECTORY / check_name(owner)

    def _path(self, owner: str, name: object) -> Path:
        return self._directory(owner) / check_name(name)

    def _check_target(self, path: Path) -> None:
        # Without this a save over a link would replace the link, and over a directory fail only at the end.
        try:
            info = self._files.info(path)
        except FileNotFoundError:
            return
        if not info.is_file:
            raise NotAFile(f"{path.name}: not a regular file")

    def _temporary(self, directory: Path) -> Path:
        return directory / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"

    def _root_exists(self) -> bool:
        # A root that vanished while the server runs is an error, not something to make anew in silence.
        try:
            self._files.info(self._root)
        except FileNotFoundError:
            raise NotFound(f"{self._root}: No such file or directory") from None
        return True

    def _owner_directories(self) -> Sequence[Path]:
        owners = self._root / OWNERS_DIRECTORY
        try:
            return [owners / name for name in self._files.names(owners)]
        except FileNotFoundError:
            return []

    def _probe(self) -> None:
        probe = self._temporary(self._root)
        self._files.close(self._files.create(probe))
        self._files.unlink(probe)

    def _remove_stale(self, directory: Path) -> None:
        for name in self._files.names(directory):
            if name.startswith(TEMPORARY_PREFIX) and name.endswith(TEMPORARY_SUFFIX):
                path = directory / name
                with suppress(FileNotFoundError):
                    if not self._files.is_locked(path):
                        self._files.unlink(path)


class _Turns:
    """One holder a path at a time; remembers only paths that are held."""

    def __init__(self) -> None:
        self._held: set[Path] = set()
        self._changed = threading.Condition()

    def take(self, path: Path) -> None:
        with self._changed:
            self._changed.wait_for(lambda: path not in self._held)
            self._held.add(path)

    def give(self, path: Path) -> None:
        with self._changed:
            self._held.discard(path)
            self._changed.notify_all()
