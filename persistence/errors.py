"""Everything this package raises: one base class, one subclass per rule that can be broken."""

from __future__ import annotations

import errno
import os


class SlotFileError(Exception):
    """Base of all errors here. `section` names the part of the file at fault, "" where none is."""

    def __init__(self, message: str, section: str = "") -> None:
        super().__init__(message)
        self.section = section


class NotASlotFile(SlotFileError):
    """The file does not begin with the ggsq magic."""


class UnsupportedVersion(SlotFileError):
    """A part has a version that this reader does not know; the message names both numbers."""

    def __init__(self, part: str, found: int, known: int, section: str) -> None:
        super().__init__(
            f"{part} version {found} is not supported; this reader knows version {known}", section
        )
        self.found = found
        self.known = known


class UnsupportedContent(SlotFileError):
    """The token list holds images or audio, which this format's reader does not carry."""


class Truncated(SlotFileError):
    """A field or a section reaches past the end of the file."""


class TokensInvalid(SlotFileError):
    """The token words contradict themselves."""


class StateNotFramed(SlotFileError):
    """No footer, and the target state ends at no known border: it is cut off, or of a kind unknown here."""


class FooterDamaged(SlotFileError):
    """There is a footer, and its own checksum or framing is wrong."""


class SectionsInvalid(SlotFileError):
    """The footer's tables do not cover every byte of the file exactly once."""


class FactsInvalid(SlotFileError):
    """The footer's facts are not the JSON object that the format asks for, or contradict the tokens."""


class ChecksumMismatch(SlotFileError):
    """The bytes of a section are not those that were written."""


class FactsTooLarge(SlotFileError):
    """The facts to be written exceed the footer's limit."""


class TooManyCheckpoints(SlotFileError):
    """More checkpoints to be written than a footer may list."""


class InvalidName(SlotFileError):
    """A name is not one plain file name."""


class NotAFile(SlotFileError):
    """The name belongs to a directory, a symbolic link or a device."""


class NotFound(SlotFileError):
    """The file or its directory does not exist."""


class Forbidden(SlotFileError):
    """The file system refuses access, or is read-only."""


class NoSpace(SlotFileError):
    """The disk, the quota or the size limit of the process is used up."""


class StorageFailed(SlotFileError):
    """Any other failure of the file system."""


_BY_ERRNO: dict[int, type[SlotFileError]] = {
    errno.ENOENT: NotFound,
    errno.ENOTDIR: NotFound,
    errno.EACCES: Forbidden,
    errno.EPERM: Forbidden,
    errno.EROFS: Forbidden,
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.EFBIG: NoSpace,
    errno.EISDIR: NotAFile,
    errno.ELOOP: NotAFile,
    errno.ENXIO: NotAFile,
    errno.ENAMETOOLONG: InvalidName,
}


def from_os(error: OSError, name: str) -> SlotFileError:
    """The error of this package for one of the operating system; `name` is what the caller asked for."""
    kind = _BY_ERRNO.get(error.errno or 0, StorageFailed)
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.ELOOP:
        reason = "not a regular file"  # one link is enough: none is followed
    return kind(f"{name}: {reason}")
