"""Writes one slot file section by section, whole or not at all; holds no section, judges no content."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from persistence.errors import StorageFailed, from_os
from persistence.files import Files
from persistence.format import (
    CHECKPOINT_HEAD,
    DRAFT_HEAD,
    DRAFT_MAGIC,
    DRAFT_VERSION,
    LENGTH,
    STATE_HEAD_BYTES,
    CheckpointEntry,
    Kind,
    Section,
    encode_checkpoints_head,
    encode_footer,
    encode_payload_head,
)
from persistence.snapshot import Blob, Checkpoint, FileFacts
from persistence.source import CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Saved:
    """What is on disk now. `n_written` is the file's size; the parts and the footer add up to it."""

    n_written: int
    n_tokens: int
    n_checkpoints: int
    tokens_bytes: int
    target_bytes: int
    checkpoints_bytes: int
    draft_bytes: int
    footer_bytes: int


class SlotWriter:
    """A file in the making. Order: payload, checkpoints or nothing, draft or nothing, commit.

    Used by one thread. Whatever fails, the temporary file is removed, the old file stays, and the writer is
    finished; every OSError leaves as a SlotFileError. As a context manager it aborts unless it was committed.
    """

    def __init__(
        self, files: Files, path: Path, temporary: Path, release: Callable[[], None] = lambda: None
    ) -> None:
        """Create `temporary`, which `commit` renames to `path`; both in one directory.

        `release` is called once, when the writer is finished.
        """
        self._files = files
        self._path = path
        self._temporary = temporary
        self._release = release
        self._sections: list[Section] = []
        self._checkpoints: list[CheckpointEntry] = []
        self._n_tokens = 0
        self._at = 0
        self._start = 0
        self._hasher = xxhash.xxh3_128()
        self._finished = False
        self._fd = -1
        try:
            self._fd = files.create(temporary)
        except OSError as error:
            self._finish()
            raise from_os(error, path.name) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def payload(self, tokens: Sequence[int], state: Blob) -> None:
        """Tokens and the full target state; b"" for an empty slot.

        The state comes with its 8-byte head, which is left out of the file. Raises ValueError where a token
        id or the state cannot be one.
        """
        with _Aborting(self):
            self._expect(self._sections == [], "payload comes first, once")
            view = memoryview(state).cast("B")
            if 0 < len(view) < STATE_HEAD_BYTES:
                raise ValueError(f"a state of {len(view)} bytes")
            self._begin()
            self._write(encode_payload_head(tokens))
            self._end(Kind.TOKENS)
            self._begin()
            self._write(view[STATE_HEAD_BYTES:])
            self._end(Kind.TARGET)
            self._n_tokens = len(tokens)

    def checkpoints(self, n: int, checkpoints: Iterable[Checkpoint]) -> None:
        """All `n` checkpoints, in order of their tokens; 0 writes nothing.

        The iterable may load them one by one. Raises TooManyCheckpoints; ValueError where the iterable
        does not give n.
        """
        with _Aborting(self):
            self._expect(len(self._sections) == 2, "checkpoints come right after the payload, once")
            if n == 0:
                return
            start = self._at
            self._begin()
            self._write(encode_checkpoints_head(n))
            # Each record has its own hash, so that a damaged one costs no other.
            digest = self._hasher.digest()
            for checkpoint in checkpoints:
                self._write_checkpoint(checkpoint)
            if len(self._checkpoints) != n:
                raise ValueError(f"{len(self._checkpoints)} checkpoints, announced as {n}")
            self._sections.append(Section(Kind.CHECKPOINTS, start, self._at - start, digest))

    def draft(self, fit: bytes, context: Blob, spec: Blob) -> None:
        """The drafter's state at the tip; `fit` is its own header, opaque here."""
        with _Aborting(self):
            present = {section.kind for section in self._sections}
            self._expect(
                Kind.TARGET in present and Kind.DRAFT not in present, "draft comes after the payload, once"
            )
            self._begin()
            self._write(DRAFT_HEAD.pack(DRAFT_MAGIC, DRAFT_VERSION))
            for blob in (fit, context, spec):
                self._write_blob(blob)
            self._end(Kind.DRAFT)

    def commit(self, facts: FileFacts) -> Saved:
        """Write the footer, sync, and put the file under its name.

        `facts.n_tokens` must be the number of tokens written; `facts.created` 0 means now. Raises
        FactsTooLarge, ValueError. After an error the name has the old file, except where only the directory's
        last sync failed: then it has the new one, which a power failure may still take back.
        """
        with _Aborting(self):
            self._expect(len(self._sections) >= 2, "nothing to commit")
            if facts.n_tokens != self._n_tokens:
                raise ValueError(f"{self._n_tokens} tokens written, and {facts.n_tokens} in the facts")
            if not facts.created:
                facts = replace(facts, created=time.time())
            body = self._at
            self._write(encode_footer(self._sections, self._checkpoints, facts))
            self._publish()
            return self._saved(body)

    def abort(self) -> None:
        """Remove the temporary file; nothing where the writer is finished."""
        if self._finished:
            return
        self._close()
        with suppress(OSError):
            self._files.unlink(self._temporary)
        self._finish()

    # --- below: not for callers ---

    def _publish(self) -> None:
        self._files.fsync(self._fd)
        size = self._files.info_of(self._fd).size
        if size != self._at:
            raise StorageFailed(f"{self._path.name}: {self._at} bytes written, {size} in the file")
        self._files.rename(self._temporary, self._path)
        self._files.fsync_directory(self._path.parent)
        self._close()
        self._finish()

    def _saved(self, body: int) -> Saved:
        sizes = {section.kind: section.length for section in self._sections}
        return Saved(
            n_written=self._at,
            n_tokens=self._n_tokens,
            n_checkpoints=len(self._checkpoints),
            tokens_bytes=sizes[Kind.TOKENS],
            target_bytes=sizes[Kind.TARGET],
            checkpoints_bytes=sizes.get(Kind.CHECKPOINTS, 0),
            draft_bytes=sizes.get(Kind.DRAFT, 0),
            footer_bytes=self._at - body,
        )

    def _write_checkpoint(self, checkpoint: Checkpoint) -> None:
        start = self._at
        self._begin()
        self._write(CHECKPOINT_HEAD.pack(checkpoint.n_tokens, checkpoint.pos_min, checkpoint.pos_max))
        for blob in (checkpoint.state.target, checkpoint.state.draft, checkpoint.state.spec):
            self._write_blob(blob)
        self._checkpoints.append(CheckpointEntry(start, self._at - start, self._hasher.digest()))

    def _write_blob(self, blob: Blob) -> None:
        view = memoryview(blob).cast("B")
        self._write(LENGTH.pack(len(view)))
        self._write(view)

    def _begin(self) -> None:
        self._hasher.reset()
        self._start = self._at

    def _end(self, kind: Kind) -> None:
        self._sections.append(Section(kind, self._start, self._at - self._start, self._hasher.digest()))

    def _write(self, data: Blob) -> None:
        view = memoryview(data)
        while view:
            # A chunk is hashed just before it is copied away, and ends where a page of the file ends.
            chunk = view[: CHUNK_BYTES - self._at % CHUNK_BYTES]
            view = view[len(chunk) :]
            self._hasher.update(chunk)
            while chunk:
                n = self._files.write(self._fd, chunk)
                self._at += n
                chunk = chunk[n:]

    def _expect(self, condition: bool, rule: str) -> None:
        if self._finished:
            raise ValueError("the writer is finished")
        if not condition:
            raise ValueError(rule)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                self._files.close(fd)

    def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._release()

    @property
    def name(self) -> str:
        return self._path.name


class _Aborting:
    """Any error in the block aborts the writer; an OSError leaves as this package's."""

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        self._writer.abort()
        if isinstance(error, OSError):
            raise from_os(error, self._writer.name) from error
