"""Bounded reads of one open file: no byte outside it, no buffer larger than it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from persistence.errors import Truncated, from_os
from persistence.files import Files

# A chunk is hashed while it is still in the processor's cache.
CHUNK_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """An open file of `size` bytes. OSError becomes this package's error with the file's `name`."""

    files: Files
    fd: int
    size: int
    name: str

    def read(self, offset: int, length: int, section: str) -> bytes:
        """Exactly `length` bytes. Raises Truncated before anything is allocated."""
        out = self.buffer(offset, length, section)
        self._fill(memoryview(out), offset, section)
        return bytes(out)

    def buffer(self, offset: int, length: int, section: str) -> bytearray:
        """A new buffer for those bytes of the file, not yet read. Raises Truncated."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise Truncated(f"{length} bytes at {offset} reach past the file's {self.size}", section)
        return bytearray(length)

    def read_hashed(self, out: memoryview, offset: int, section: str) -> bytes:
        """Fill `out` from `offset` on; the XXH3-128 of what was read."""
        hasher = xxhash.xxh3_128()
        for at in range(0, len(out), CHUNK_BYTES):
            chunk = out[at : at + CHUNK_BYTES]
            self._fill(chunk, offset + at, section)
            hasher.update(chunk)
        return hasher.digest()

    def hash(self, offset: int, length: int, progress: Callable[[int], None]) -> bytes:
        """The XXH3-128 of those bytes, in bounded memory; `progress` gets the bytes of each chunk."""
        hasher = xxhash.xxh3_128()
        buffer = memoryview(self.buffer(0, min(length, CHUNK_BYTES, self.size), ""))
        for at in range(0, length, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, length - at)]
            self._fill(chunk, offset + at, "")
            hasher.update(chunk)
            progress(len(chunk))
        return hasher.digest()

    def _fill(self, out: memoryview, offset: int, section: str) -> None:
        at = 0
        while at < len(out):
            try:
                n = self.files.read(self.fd, out[at:], offset + at)
            except OSError as error:
                raise from_os(error, self.name) from error
            if n == 0:
                raise Truncated(f"the file ends at {offset + at} while it is read", section)
            at += n
