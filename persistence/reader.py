"""Opens a slot file, checks all that needs no llama, and hands out its sections; decides no fit."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from persistence.errors import ChecksumMismatch, FactsInvalid, NotAFile, SlotFileError, Truncated, from_os
from persistence.files import Files, SystemFiles
from persistence.format import (
    CHECKPOINT_HEAD,
    CHECKPOINTS_HEAD,
    CHECKPOINTS_MAGIC,
    CHECKPOINTS_VERSION,
    DRAFT_HEAD,
    DRAFT_MAGIC,
    DRAFT_VERSION,
    PAYLOAD_HEAD,
    STATE_HEAD_BYTES,
    CheckpointEntry,
    Kind,
    Section,
    decode_tokens,
    split_blobs,
)
from persistence.layout import Layout, read_layout
from persistence.snapshot import Checkpoint, DraftBlock, FileFacts, SequenceState
from persistence.source import Source


@dataclass(frozen=True, slots=True)
class Dropped:
    """A part that is not usable: `section` is "checkpoints" or "draft", `index` counts checkpoints from 0.

    `reason` is one of "checksum", "truncated", "framing", "version", "position".
    """

    section: str
    index: int
    reason: str
    detail: str = ""


class SlotFile:
    """An open slot file; close it, or use it as a context manager. One thread at a time.

    `tokens` are checked and decoded on opening. The large sections are read when asked for, once, and checked
    before they are given out. `dropped` grows as parts turn out to be damaged.
    """

    def __init__(self, source: Source, layout: Layout) -> None:
        self._source = source
        self._layout = layout
        self.n_read = source.size  # bytes of the whole file
        self.checksum: Literal["verified", "absent"] = "absent" if layout.footer is None else "verified"
        self.facts: FileFacts | None = None if layout.footer is None else layout.footer.facts
        self.notes: list[str] = list(layout.notes)
        self.dropped: list[Dropped] = []
        self.tokens: array[int] = self._read_tokens()
        appendix = layout.section(Kind.CHECKPOINTS)
        if appendix is not None and appendix.digest and not self._checkpoints_head_is_whole(appendix):
            self.notes.append("the checkpoints' head is damaged; they are found by the footer's table")

    @classmethod
    def open(cls, path: Path, files: Files | None = None) -> Self:
        """Open and check everything but the contents of the large sections.

        Raises SlotFileError; nothing stays open then. A symbolic link is refused.
        """
        source = open_source(path, files or SystemFiles())
        try:
            return cls(source, read_layout(source))
        except BaseException:
            source.files.close(source.fd)
            raise

    def close(self) -> None:
        self._source.files.close(self._source.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def sections(self) -> tuple[Section, ...]:
        return self._layout.sections

    @property
    def target_bytes(self) -> int:
        """What `read_target` needs: the state and 8 spare bytes before it; 0 for an empty slot."""
        length = self._layout.required(Kind.TARGET).length
        return length + STATE_HEAD_BYTES if length else 0

    @property
    def n_checkpoints(self) -> int:
        """Records found, damaged ones included."""
        return len(self._layout.checkpoints)

    @property
    def draft_bytes(self) -> int:
        """Size of the draft block, 0 where there is none."""
        section = self._layout.section(Kind.DRAFT)
        return section.length if section else 0

    @property
    def largest_checkpoint_bytes(self) -> int:
        return max((entry.length for entry in self._layout.checkpoints), default=0)

    def read_target(self, out: memoryview | bytearray | None = None) -> memoryview:
        """The target's state behind 8 spare bytes, which the caller fills with io magic and sequence id.

        Reads into `out` (at least `target_bytes` long; longer is fine) or a new buffer, and gives the used
        part of it. Raises ChecksumMismatch or Truncated: then the contents of `out` must not be used.
        """
        section = self._layout.required(Kind.TARGET)
        view = memoryview(bytearray(self.target_bytes)) if out is None else memoryview(out).cast("B")
        if len(view) < self.target_bytes:
            raise ValueError(f"a buffer of {len(view)} bytes for a state of {self.target_bytes}")
        view = view[: self.target_bytes]
        if section.length:
            view[:STATE_HEAD_BYTES] = bytes(STATE_HEAD_BYTES)
        digest = self._source.read_hashed(view[STATE_HEAD_BYTES:], section.offset, "target")
        if section.digest not in (b"", digest):
            raise ChecksumMismatch("the target state is damaged (checksum)", "target")
        return view

    def checkpoints(self) -> Iterator[Checkpoint]:
        """The whole checkpoints, in the file's order, one in memory at a time; the others go to `dropped`.

        The three blobs of one are views of one buffer that nothing else uses.
        """
        self._forget("checkpoints")
        for index, entry in enumerate(self._layout.checkpoints):
            try:
                checkpoint = self._read_checkpoint(entry)
            except _Damage as damage:
                self.dropped.append(Dropped("checkpoints", index, damage.reason, damage.detail))
            else:
                yield checkpoint
        for index, reason, detail in self._layout.lost:
            self.dropped.append(Dropped("checkpoints", index, reason, detail))

    def draft(self, out: memoryview | None = None) -> DraftBlock | None:
        """The drafter's state; None where there is none, or it is damaged and goes to `dropped`.

        `context` and `spec` are views of `out` (at least `draft_bytes` long), or of a buffer of their own.
        """
        self._forget("draft")
        section = self._layout.section(Kind.DRAFT)
        if section is None:
            return None
        try:
            return self._read_draft(section, out)
        except _Damage as damage:
            self.dropped.append(Dropped("draft", 0, damage.reason, damage.detail))
            return None

    def verify(self, progress: Callable[[int], None] = lambda n_bytes: None) -> list[SlotFileError]:
        """Check every byte that has a checksum, in bounded memory; all the damage there is.

        `progress` gets the bytes of each step, `n_read` in all.
        """
        damage: list[SlotFileError] = []
        for section in self.sections:
            if not section.digest:
                progress(section.length)
            elif section.kind == Kind.CHECKPOINTS:
                damage.extend(self._verify_checkpoints(section, progress))
            elif self._source.hash(section.offset, section.length, progress) != section.digest:
                damage.append(ChecksumMismatch(f"{section.label}: wrong checksum", section.label))
        progress(self.n_read - self.sections[-1].end)
        if self.checksum == "absent" and self.draft_bytes and self.draft() is None:
            damage.append(Truncated(f"draft block: {self.dropped[-1].reason}", "draft"))
        for index, reason, detail in self._layout.lost:
            damage.append(Truncated(f"checkpoint {index} and all after it: {reason} {detail}", "checkpoints"))
        return damage

    # --- below: not for callers ---

    def _read_tokens(self) -> array[int]:
        section = self._layout.required(Kind.TOKENS)
        data = self._source.buffer(section.offset, section.length, "tokens")
        digest = self._source.read_hashed(memoryview(data), section.offset, "tokens")
        if section.digest not in (b"", digest):
            raise ChecksumMismatch("the token list is damaged (checksum)", "tokens")
        tokens = decode_tokens(memoryview(data)[PAYLOAD_HEAD.size :])
        if self.facts is not None and self.facts.n_tokens != len(tokens):
            raise FactsInvalid(f"{len(tokens)} tokens, and {self.facts.n_tokens} by the footer", "footer")
        return tokens

    def _read_checkpoint(self, entry: CheckpointEntry) -> Checkpoint:
        record = self._read_checked(entry.offset, entry.length, entry.digest, "checkpoints")
        n_tokens, pos_min, pos_max = CHECKPOINT_HEAD.unpack_from(record)
        blobs = split_blobs(record[CHECKPOINT_HEAD.size :])
        if blobs is None:
            raise _Damage("framing", "its blobs do not fill it")
        if not 0 <= n_tokens <= len(self.tokens):
            raise _Damage("position", f"{n_tokens} tokens of {len(self.tokens)}")
        return Checkpoint(n_tokens, pos_min, pos_max, SequenceState(*blobs))

    def _read_draft(self, section: Section, out: memoryview | None) -> DraftBlock:
        block = self._read_checked(section.offset, section.length, section.digest, "draft", out)
        if len(block) < DRAFT_HEAD.size:
            raise _Damage("truncated")
        magic, version = DRAFT_HEAD.unpack_from(block)
        if magic != DRAFT_MAGIC:
            raise _Damage("framing", f"magic {magic!r}")
        if version != DRAFT_VERSION:
            raise _Damage("version", f"version {version}, not {DRAFT_VERSION}")
        blobs = split_blobs(block[DRAFT_HEAD.size :])
        if blobs is None:
            raise _Damage("framing" if section.digest else "truncated", "its blobs do not fill it")
        return DraftBlock(bytes(blobs[0]), blobs[1], blobs[2])

    def _read_checked(
        self, offset: int, length: int, digest: bytes, section: str, out: memoryview | None = None
    ) -> memoryview:
        try:
            if out is not None and len(out) < length:
                raise ValueError(f"a buffer of {len(out)} bytes for a block of {length}")
            data = memoryview(self._source.buffer(offset, length, section)) if out is None else out[:length]
            found = self._source.read_hashed(data, offset, section)
        except Truncated as error:
            raise _Damage("truncated", str(error)) from error
        if digest not in (b"", found):
            raise _Damage("checksum")
        return data

    def _checkpoints_head_is_whole(self, section: Section) -> bool:
        head = memoryview(bytearray(CHECKPOINTS_HEAD.size))
        digest = self._source.read_hashed(head, section.offset, "checkpoints")
        expected = CHECKPOINTS_HEAD.pack(CHECKPOINTS_MAGIC, CHECKPOINTS_VERSION, self.n_checkpoints)
        return digest == section.digest and head == expected

    def _verify_checkpoints(
        self, section: Section, progress: Callable[[int], None]
    ) -> Iterator[SlotFileError]:
        if not self._checkpoints_head_is_whole(section):
            yield ChecksumMismatch("the checkpoints' head: wrong checksum", "checkpoints")
        progress(CHECKPOINTS_HEAD.size)
        for index, entry in enumerate(self._layout.checkpoints):
            if self._source.hash(entry.offset, entry.length, progress) != entry.digest:
                yield ChecksumMismatch(f"checkpoint {index}: wrong checksum", "checkpoints")

    def _forget(self, section: str) -> None:
        self.dropped = [dropped for dropped in self.dropped if dropped.section != section]


class _Damage(Exception):
    """Why one part is dropped."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


def open_source(path: Path, files: Files) -> Source:
    """Open for bounded reads. Raises NotAFile, NotFound, Forbidden, StorageFailed."""
    try:
        fd = files.open(path)
    except OSError as error:
        raise from_os(error, path.name) from error
    try:
        info = files.info_of(fd)
    except OSError as error:
        files.close(fd)
        raise from_os(error, path.name) from error
    if not info.is_file:
        files.close(fd)
        raise NotAFile(f"{path.name}: not a regular file")
    return Source(files, fd, info.size, path.name)
