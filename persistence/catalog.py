"""What the files of a directory are, by their footers; read again only when changed. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from persistence.errors import NotAFile, SlotFileError, from_os
from persistence.files import FileInfo, Files
from persistence.format import Kind, Section
from persistence.layout import read_layout
from persistence.names import check_name
from persistence.reader import SlotFile, open_source
from persistence.snapshot import FileFacts


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a listing, by its footer; where `error` says why it cannot be read the rest is empty."""

    name: str
    n_bytes: int
    modified: float  # seconds since the epoch
    facts: FileFacts | None = None
    sections: tuple[Section, ...] = ()
    n_checkpoints: int = 0
    n_tokens: int = 0
    error: SlotFileError | None = None

    @property
    def draft_bytes(self) -> int:
        return sum(section.length for section in self.sections if section.kind == Kind.DRAFT)


class Catalog:
    """Descriptions by path, kept for as long as size, time and inode of the file stay."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._known: dict[Path, tuple[FileInfo, StoredFile]] = {}

    def list(self, directory: Path) -> Sequence[StoredFile]:
        """Every slot file of it, by name; a damaged one with its error. Raises SlotFileError."""
        try:
            names = self._files.names(directory)
        except OSError as error:
            raise from_os(error, directory.name) from error
        self._forget_all_but(directory, set(names))
        found = []
        for name in sorted(names):
            # Links, directories, temporary files, and files that went away just now are no slot files.
            with suppress(SlotFileError):
                found.append(self.describe(directory / check_name(name)))
        return found

    def describe(self, path: Path) -> StoredFile:
        """One file. Raises NotFound, NotAFile and the other errors of the file system."""
        try:
            info = self._files.info(path)
        except OSError as error:
            self._known.pop(path, None)
            raise from_os(error, path.name) from error
        if not info.is_file:
            raise NotAFile(f"{path.name}: not a regular file")
        known = self._known.get(path)
        if known is not None and known[0] == info:
            return known[1]
        described = self._read(path, info)
        self._known[path] = (info, described)
        return described

    def _forget_all_but(self, directory: Path, names: set[str]) -> None:
        gone = [path for path in tuple(self._known) if path.parent == directory and path.name not in names]
        for path in gone:
            self._known.pop(path, None)

    def _read(self, path: Path, info: FileInfo) -> StoredFile:
        modified = info.mtime_ns / 1e9
        try:
            source = open_source(path, self._files)
            try:
                layout = read_layout(source)
                facts = layout.footer.facts if layout.footer else None
                n_tokens = facts.n_tokens if facts else len(SlotFile(source, layout).tokens)
            finally:
                self._files.close(source.fd)
        except SlotFileError as error:
            return StoredFile(path.name, info.size, modified, error=error)
        n_checkpoints = len(layout.checkpoints)
        return StoredFile(path.name, info.size, modified, facts, layout.sections, n_checkpoints, n_tokens)
