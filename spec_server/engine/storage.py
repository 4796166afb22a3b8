"""The border to persistence: its errors in the engine's words, and the store that a server without one has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from persistence import errors as stored
from persistence.catalog import StoredFile
from persistence.reader import SlotFile
from persistence.writer import SlotWriter
from spec_server.engine.errors import (
    EngineError,
    FileNotFound,
    FileRefused,
    InvalidRequest,
    NotSupported,
    StorageFailed,
    StorageForbidden,
    StorageFull,
)

_BY_KIND: dict[type[stored.SlotFileError], type[EngineError]] = {
    stored.InvalidName: InvalidRequest,
    stored.NotAFile: InvalidRequest,
    stored.NotFound: FileNotFound,
    stored.Forbidden: StorageForbidden,
    stored.NoSpace: StorageFull,
    stored.StorageFailed: StorageFailed,
    stored.FactsTooLarge: StorageFailed,
    stored.TooManyCheckpoints: StorageFailed,
}


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raise persistence's errors as the engine's; whatever is wrong with a file's content is FileRefused."""
    try:
        yield
    except stored.SlotFileError as e:
        kind = _BY_KIND.get(type(e))
        if kind is InvalidRequest:
            raise InvalidRequest(str(e), param="filename", slot="unchanged") from e
        if kind is not None:
            raise kind(str(e), slot="unchanged") from e
        raise FileRefused(str(e), field=e.section or "file", slot="unchanged") from e


class NoStore:
    """A SlotStore for a server without --slot-save-path: every call is refused."""

    def create(self, owner: str, name: object) -> SlotWriter:
        self._refuse()

    def open(self, owner: str, name: object) -> SlotFile:
        self._refuse()

    def list(self, owner: str) -> Sequence[StoredFile]:
        self._refuse()

    def describe(self, owner: str, name: object) -> StoredFile:
        self._refuse()

    def remove(self, owner: str, name: object) -> int:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotSupported("this server stores no slots: start it with --slot-save-path DIR")
