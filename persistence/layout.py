"""Where each section of an open file lies, by its footer or in order. Reads no large section whole."""

from __future__ import annotations

from dataclasses import dataclass

from persistence.errors import FooterDamaged, SectionsInvalid, SlotFileError, Truncated
from persistence.format import (
    CHECKPOINT_HEAD,
    CHECKPOINTS_HEAD,
    CHECKPOINTS_MAGIC,
    CHECKPOINTS_VERSION,
    DRAFT_HEAD,
    DRAFT_MAGIC,
    FOOTER_MAGIC,
    FOOTER_TAIL,
    LENGTH,
    MAX_CHECKPOINTS,
    MAX_FOOTER_BYTES,
    PAYLOAD_HEAD,
    CheckpointEntry,
    Footer,
    Kind,
    Section,
    decode_footer,
    decode_payload_head,
    decode_tokens,
    footer_length,
)
from persistence.llama_state import state_end
from persistence.source import Source


@dataclass(frozen=True, slots=True)
class Layout:
    """The sections of one file. `lost`: a checkpoint with broken framing: index, reason, detail."""

    sections: tuple[Section, ...]
    checkpoints: tuple[CheckpointEntry, ...]
    footer: Footer | None
    lost: tuple[tuple[int, str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def section(self, kind: Kind) -> Section | None:
        return next((s for s in self.sections if s.kind == kind), None)

    def required(self, kind: Kind) -> Section:
        return next(s for s in self.sections if s.kind == kind)


def read_layout(source: Source) -> Layout:
    """Raises any SlotFileError that the framing alone can show."""
    n_words = decode_payload_head(source.read(0, min(source.size, PAYLOAD_HEAD.size), "tokens"))
    tokens_end = PAYLOAD_HEAD.size + 4 * n_words
    footer = _read_footer(source)
    if footer is None:
        if tokens_end > source.size:
            raise Truncated(f"{n_words} token words in a file of {source.size} bytes", "tokens")
        return _read_in_order(source, tokens_end)
    if footer.sections[0].length != tokens_end:
        raise SectionsInvalid(f"{n_words} words in a section of {footer.sections[0].length} bytes", "tokens")
    notes = tuple(
        f"skipped a section of unknown kind {s.kind}, {s.length} bytes"
        for s in footer.sections
        if s.kind not in set(Kind)
    )
    return Layout(footer.sections, footer.checkpoints, footer, notes=notes)


def _read_footer(source: Source) -> Footer | None:
    n = min(source.size, FOOTER_TAIL.size)
    length = footer_length(source.read(source.size - n, n, "footer"))
    if length is None:
        n = min(source.size, MAX_FOOTER_BYTES)
        footer_length(source.read(source.size - n, n, "footer"))
        return None
    if length > source.size:
        raise FooterDamaged(f"a footer of {length} bytes in a file of {source.size}", "footer")
    offset = source.size - length
    return decode_footer(source.read(offset, length, "footer"), offset)


def _read_in_order(source: Source, tokens_end: int) -> Layout:
    notes = ["no footer: nothing can be verified"]
    if _holds_no_tokens(source, tokens_end) and _is_border(source, tokens_end):
        end = tokens_end
    else:
        end = state_end(source, tokens_end, lambda at: _is_border(source, at))
    sections = [Section(Kind.TOKENS, 0, tokens_end), Section(Kind.TARGET, tokens_end, end - tokens_end)]
    entries: list[CheckpointEntry] = []
    lost: list[tuple[int, str, str]] = []
    start = end
    if _begins(source, start, CHECKPOINTS_MAGIC):
        end, entries, lost = _walk_checkpoints(source, start)
        sections.append(Section(Kind.CHECKPOINTS, start, end - start))
        start = end
    if _begins(source, start, DRAFT_MAGIC):
        end = _draft_end(source, start)
        sections.append(Section(Kind.DRAFT, start, end - start))
        start = end
    if start < source.size:
        rest = source.read(start, min(8, source.size - start), "footer")
        if FOOTER_MAGIC.startswith(rest):
            raise FooterDamaged("the footer is cut off", "footer")
        sections.append(Section(0, start, source.size - start))
        notes.append(f"skipped {source.size - start} unknown bytes at {start}, which begin with {rest!r}")
    return Layout(tuple(sections), tuple(entries), None, tuple(lost), tuple(notes))


def _holds_no_tokens(source: Source, tokens_end: int) -> bool:
    # Only an empty slot may have an empty state; elsewhere it means a file cut off right there.
    return len(decode_tokens(source.read(PAYLOAD_HEAD.size, tokens_end - PAYLOAD_HEAD.size, "tokens"))) == 0


def _is_border(source: Source, at: int) -> bool:
    """Whether the file ends at `at` or a section begins there: its name is four ASCII letters or digits."""
    rest = source.read(at, min(4, max(0, source.size - at)), "target") if at <= source.size else b"\0"
    if len(rest) == 4:
        return rest.isalnum()
    return any(magic.startswith(rest) for magic in (CHECKPOINTS_MAGIC, DRAFT_MAGIC, FOOTER_MAGIC))


def _begins(source: Source, at: int, magic: bytes) -> bool:
    rest = source.read(at, min(len(magic), source.size - at), "")
    return bool(rest) and magic.startswith(rest)


def _walk_checkpoints(
    source: Source, start: int
) -> tuple[int, list[CheckpointEntry], list[tuple[int, str, str]]]:
    """End of the appendix, its records, and the first that is not whole: none can be found after it."""
    entries: list[CheckpointEntry] = []
    try:
        _, version, count = CHECKPOINTS_HEAD.unpack(source.read(start, CHECKPOINTS_HEAD.size, "checkpoints"))
    except Truncated:
        return source.size, entries, [(0, "truncated", "")]
    if version != CHECKPOINTS_VERSION:
        return source.size, entries, [(0, "version", f"version {version}, not {CHECKPOINTS_VERSION}")]
    at = start + CHECKPOINTS_HEAD.size
    for index in range(count):
        if index == MAX_CHECKPOINTS:
            return source.size, entries, [(index, "framing", f"more than {MAX_CHECKPOINTS}")]
        try:
            end = _skip_blobs(source, at + CHECKPOINT_HEAD.size, 3, "checkpoints")
        except Truncated:
            return source.size, entries, [(index, "truncated", f"of {count}")]
        entries.append(CheckpointEntry(at, end - at))
        at = end
    return at, entries, []


def _draft_end(source: Source, start: int) -> int:
    # Where its framing is broken the block takes the rest, and reading it reports the damage.
    try:
        return _skip_blobs(source, start + DRAFT_HEAD.size, 3, "draft")
    except SlotFileError:
        return source.size


def _skip_blobs(source: Source, at: int, n: int, section: str) -> int:
    for _ in range(n):
        (length,) = LENGTH.unpack(source.read(at, LENGTH.size, section))
        at += LENGTH.size + length
        if at > source.size:
            raise Truncated(f"a blob of {length} bytes ends past the file's {source.size}", section)
    return at
