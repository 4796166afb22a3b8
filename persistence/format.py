"""Bytes in, bytes out: ggsq header, SCKP appendix, draft block and footer. No files, no llama.

FORMAT.md is the specification; names and limits here are those there. All numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import xxhash

from persistence.errors import (
    FactsInvalid,
    FactsTooLarge,
    FooterDamaged,
    NotASlotFile,
    SectionsInvalid,
    TokensInvalid,
    TooManyCheckpoints,
    Truncated,
    UnsupportedContent,
    UnsupportedVersion,
)
from persistence.snapshot import FileFacts, ModelIdentity, Scalar

HASH_BYTES = 16

PAYLOAD_MAGIC = b"qsgg"
PAYLOAD_VERSION = 3
PAYLOAD_HEAD = struct.Struct("<4sII")  # magic, version, number of words
STATE_HEAD_BYTES = 8  # io magic and sequence id: in memory only, never in the payload
PACKED_MARK = -1
PACKED_VERSION = 1
PACKED_EXTRA_WORDS = 4  # mark, version, number of tokens, number of media

CHECKPOINTS_MAGIC = b"SCKP"
CHECKPOINTS_VERSION = 1
CHECKPOINTS_HEAD = struct.Struct("<4sII")  # magic, version, count
CHECKPOINT_HEAD = struct.Struct("<qii")  # n_tokens, pos_min, pos_max
CHECKPOINT_MIN_BYTES = CHECKPOINT_HEAD.size + 3 * 8
LENGTH = struct.Struct("<Q")

DRAFT_MAGIC = b"DKDB"
DRAFT_VERSION = 1
DRAFT_HEAD = struct.Struct("<4sI")  # magic, version

FOOTER_MAGIC = b"DKFOOTER"
FOOTER_END = b"DKEEPEND"
FOOTER_VERSION = 1
FOOTER_HEAD = struct.Struct("<8sIIIIII")  # magic, version, min_reader, n_sections, n_checkpoints, facts, 0
FOOTER_TAIL = struct.Struct("<Q16s8s")  # bytes of the whole footer, hash, end magic
SECTION_ENTRY = struct.Struct("<IIQQ16s")  # kind, 0, offset, length, hash
CHECKPOINT_ENTRY = struct.Struct("<QQ16s")  # offset, length, hash
MAX_SECTIONS = 16
MAX_CHECKPOINTS = 4096
MAX_FACTS_BYTES = 3328
MAX_FOOTER_BYTES = (
    FOOTER_HEAD.size
    + MAX_SECTIONS * SECTION_ENTRY.size
    + MAX_CHECKPOINTS * CHECKPOINT_ENTRY.size
    + MAX_FACTS_BYTES
    + FOOTER_TAIL.size
)


class Kind(IntEnum):
    """Kinds of sections; a number that is not here is an unknown section and is skipped."""

    TOKENS = 1
    TARGET = 2
    CHECKPOINTS = 3
    DRAFT = 4

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Section:
    """One row of the section table. `digest` is empty in a file without a footer."""

    kind: int
    offset: int
    length: int
    digest: bytes = b""

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def label(self) -> str:
        return Kind(self.kind).label if self.kind in set(Kind) else f"unknown {self.kind}"


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """Where one checkpoint's record lies, from its n_tokens to the end of its third blob."""

    offset: int
    length: int
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Footer:
    offset: int
    sections: tuple[Section, ...]
    checkpoints: tuple[CheckpointEntry, ...]
    facts: FileFacts


def encode_payload_head(tokens: Sequence[int]) -> bytes:
    """The ggsq head and the token list as llama-server packs it.

    Raises ValueError where a token is negative or not 32-bit.
    """
    try:
        words = array("i", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"not a list of 32-bit token ids: {error}") from None
    if words and min(words) < 0:
        raise ValueError(f"negative token id {min(words)}")
    if sys.byteorder == "big":
        words.byteswap()
    head = PAYLOAD_HEAD.pack(PAYLOAD_MAGIC, PAYLOAD_VERSION, len(words) + PACKED_EXTRA_WORDS)
    mark = struct.pack("<iII", PACKED_MARK, PACKED_VERSION, len(words))
    return b"".join((head, mark, words.tobytes(), struct.pack("<I", 0)))


def state_offset(n_tokens: int) -> int:
    """Where the state begins in a file of so many tokens.

    A save costs a sixth less where the state's byte 8, the first that is stored, lies in memory at an address
    that equals this modulo 64: the system then copies between equally aligned places.
    """
    return PAYLOAD_HEAD.size + 4 * (n_tokens + PACKED_EXTRA_WORDS)


def decode_payload_head(head: bytes) -> int:
    """The number of token words that follow the first 12 bytes.

    Raises NotASlotFile, Truncated, UnsupportedVersion.
    """
    if not head:
        raise NotASlotFile("not a slot file: it is empty", "tokens")
    if head[:4] != PAYLOAD_MAGIC:
        raise NotASlotFile(
            f"not a slot file: it begins with {head[:4]!r}, not with {PAYLOAD_MAGIC!r}", "tokens"
        )
    if len(head) < PAYLOAD_HEAD.size:
        raise Truncated("the file ends inside its first 12 bytes", "tokens")
    _, version, n_words = PAYLOAD_HEAD.unpack_from(head)
    if version != PAYLOAD_VERSION:
        raise UnsupportedVersion("ggsq", version, PAYLOAD_VERSION, "tokens")
    return int(n_words)


def decode_tokens(data: bytes | memoryview) -> array[int]:
    """The token ids in the words of a payload, packed or plain.

    Raises TokensInvalid, UnsupportedVersion, UnsupportedContent.
    """
    words = array("i")
    words.frombytes(data)
    if sys.byteorder == "big":
        words.byteswap()
    if words and words[0] == PACKED_MARK:
        words = _unpack(words)
    if words and min(words) < 0:
        raise TokensInvalid(f"negative token id {min(words)}", "tokens")
    return words


def _unpack(words: array[int]) -> array[int]:
    if len(words) < PACKED_EXTRA_WORDS:
        raise TokensInvalid(f"a packed token list of {len(words)} words", "tokens")
    if words[1] != PACKED_VERSION:
        raise UnsupportedVersion("packed token list", words[1] & 0xFFFFFFFF, PACKED_VERSION, "tokens")
    n_tokens = words[2] & 0xFFFFFFFF
    if n_tokens > len(words) - PACKED_EXTRA_WORDS:
        raise TokensInvalid(f"{n_tokens} tokens in {len(words)} words", "tokens")
    if words[3 + n_tokens] != 0:
        raise UnsupportedContent("the saved prompt holds images or audio", "tokens")
    if any(words[PACKED_EXTRA_WORDS + n_tokens :]):
        raise TokensInvalid("data after the packed token list", "tokens")
    return words[3 : 3 + n_tokens]


def encode_checkpoints_head(n: int) -> bytes:
    """The first 12 bytes of the appendix. Raises TooManyCheckpoints."""
    if n > MAX_CHECKPOINTS:
        raise TooManyCheckpoints(f"{n} checkpoints; a file holds at most {MAX_CHECKPOINTS}", "checkpoints")
    return CHECKPOINTS_HEAD.pack(CHECKPOINTS_MAGIC, CHECKPOINTS_VERSION, n)


def split_blobs(record: memoryview, n: int = 3) -> list[memoryview] | None:
    """The n length-prefixed blobs that fill `record` exactly, as views; None where they do not."""
    blobs: list[memoryview] = []
    at = 0
    for _ in range(n):
        if len(record) - at < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(record, at)
        at += LENGTH.size
        if length > len(record) - at:
            return None
        blobs.append(record[at : at + length])
        at += length
    return blobs if at == len(record) else None


def encode_footer(
    sections: Sequence[Section], checkpoints: Sequence[CheckpointEntry], facts: FileFacts
) -> bytes:
    """The whole footer. Raises FactsTooLarge; ValueError where a fact is no JSON scalar."""
    packed = _encode_facts(facts)
    if len(packed) > MAX_FACTS_BYTES:
        raise FactsTooLarge(f"{len(packed)} bytes of facts; a footer holds {MAX_FACTS_BYTES}", "footer")
    head = FOOTER_HEAD.pack(
        FOOTER_MAGIC, FOOTER_VERSION, FOOTER_VERSION, len(sections), len(checkpoints), len(packed), 0
    )
    body = b"".join(
        (
            head,
            *(SECTION_ENTRY.pack(s.kind, 0, s.offset, s.length, s.digest) for s in sections),
            *(CHECKPOINT_ENTRY.pack(c.offset, c.length, c.digest) for c in checkpoints),
            packed,
        )
    )
    sized = body + LENGTH.pack(len(body) + FOOTER_TAIL.size)
    return sized + xxhash.xxh3_128_digest(sized) + FOOTER_END


def footer_length(end: bytes) -> int | None:
    """The footer's length, from the last bytes of a file; None where the file ends without one.

    Raises FooterDamaged where a footer begins in `end` but its end is not there.
    """
    if end.endswith(FOOTER_END):
        if len(end) < FOOTER_TAIL.size:
            raise FooterDamaged("the file is shorter than a footer's end", "footer")
        length, _, _ = FOOTER_TAIL.unpack_from(end, len(end) - FOOTER_TAIL.size)
        if not FOOTER_HEAD.size + FOOTER_TAIL.size <= length <= MAX_FOOTER_BYTES:
            raise FooterDamaged(f"a footer of {length} bytes", "footer")
        return int(length)
    if FOOTER_MAGIC in end or any(end.endswith(FOOTER_MAGIC[:n]) for n in range(4, len(FOOTER_MAGIC))):
        raise FooterDamaged("the footer is cut off, or its end is overwritten", "footer")
    return None


def decode_footer(data: bytes, offset: int) -> Footer:
    """The footer whose bytes are `data` and which begins at `offset` of the file.

    Raises FooterDamaged, UnsupportedVersion, SectionsInvalid, FactsInvalid.
    """
    if not data.startswith(FOOTER_MAGIC):
        raise FooterDamaged("no footer begins where its end says", "footer")
    _, digest, _ = FOOTER_TAIL.unpack_from(data, len(data) - FOOTER_TAIL.size)
    if xxhash.xxh3_128_digest(data[: -HASH_BYTES - len(FOOTER_END)]) != digest:
        raise FooterDamaged("checksum of the footer", "footer")
    _, _, min_reader, n_sections, n_checkpoints, n_facts, _ = FOOTER_HEAD.unpack_from(data)
    if min_reader > FOOTER_VERSION:
        raise UnsupportedVersion("footer", min_reader, FOOTER_VERSION, "footer")
    if n_sections > MAX_SECTIONS or n_checkpoints > MAX_CHECKPOINTS or n_facts > MAX_FACTS_BYTES:
        raise FooterDamaged("the footer's tables are larger than allowed", "footer")
    expected = n_sections * SECTION_ENTRY.size + n_checkpoints * CHECKPOINT_ENTRY.size + n_facts
    if FOOTER_HEAD.size + expected + FOOTER_TAIL.size != len(data):
        raise FooterDamaged("the footer's tables do not fill it", "footer")
    at = FOOTER_HEAD.size
    sections = []
    for _ in range(n_sections):
        kind, _, start, length, digest = SECTION_ENTRY.unpack_from(data, at)
        sections.append(Section(kind, start, length, digest))
        at += SECTION_ENTRY.size
    checkpoints = []
    for _ in range(n_checkpoints):
        checkpoints.append(CheckpointEntry(*CHECKPOINT_ENTRY.unpack_from(data, at)))
        at += CHECKPOINT_ENTRY.size
    check_coverage(sections, checkpoints, offset)
    return Footer(offset, tuple(sections), tuple(checkpoints), _decode_facts(data[at : at + n_facts]))


def check_coverage(
    sections: Sequence[Section], checkpoints: Sequence[CheckpointEntry], footer_offset: int
) -> None:
    """Raise SectionsInvalid unless every byte before the footer lies in exactly one section."""
    at = 0
    for section in sections:
        if section.offset != at:
            raise SectionsInvalid(f"{section.label} begins at {section.offset}, not at {at}", section.label)
        at = section.end
    if at != footer_offset:
        raise SectionsInvalid(f"the sections end at {at}, the footer begins at {footer_offset}", "footer")
    kinds = [section.kind for section in sections]
    if kinds[:2] != [Kind.TOKENS, Kind.TARGET] or any(kinds.count(kind) > 1 for kind in Kind):
        raise SectionsInvalid(f"sections of kinds {kinds}", "footer")
    appendix = next((s for s in sections if s.kind == Kind.CHECKPOINTS), None)
    if appendix is not None:
        _check_records(checkpoints, appendix)
    elif checkpoints:
        raise SectionsInvalid(f"{len(checkpoints)} checkpoints and no section of them", "checkpoints")


def _check_records(checkpoints: Iterable[CheckpointEntry], appendix: Section) -> None:
    at = appendix.offset + CHECKPOINTS_HEAD.size
    for index, entry in enumerate(checkpoints):
        if entry.offset != at or entry.length < CHECKPOINT_MIN_BYTES:
            raise SectionsInvalid(f"checkpoint {index} lies at {entry.offset}, not at {at}", "checkpoints")
        at += entry.length
    if at != appendix.end:
        raise SectionsInvalid(f"the checkpoints end at {at}, their section at {appendix.end}", "checkpoints")


def _encode_facts(facts: FileFacts) -> bytes:
    def identity(model: ModelIdentity | None) -> dict[str, str] | None:
        return None if model is None else {"name": model.name, "digest": model.digest}

    for name, value in (*facts.settings.items(), *facts.extra.items()):
        if not isinstance(name, str) or not isinstance(value, str | int | float | bool | None):
            raise ValueError(f"the fact {name!r} is no scalar")
    tree = {
        "target": identity(facts.target),
        "draft": identity(facts.draft),
        "settings": dict(facts.settings),
        "n_tokens": facts.n_tokens,
        "writer": facts.writer,
        "created": facts.created,
        "extra": dict(facts.extra),
    }
    try:
        return json.dumps(tree, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise ValueError(f"facts that are no JSON: {error}") from None


def _decode_facts(data: bytes) -> FileFacts:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FactsInvalid(f"the facts are no JSON: {error}", "footer") from None
    try:
        created = tree["created"]
        facts = FileFacts(
            target=_decode_identity(tree["target"]),
            draft=None if tree["draft"] is None else _decode_identity(tree["draft"]),
            settings=_decode_scalars(tree["settings"]),
            n_tokens=tree["n_tokens"],
            writer=tree["writer"],
            created=float(created),
            extra=_decode_scalars(tree.get("extra", {})),
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise FactsInvalid(f"the facts lack or misstate a field: {error!r}", "footer") from None
    if type(facts.n_tokens) is not int or not isinstance(facts.writer, str):
        raise FactsInvalid("the facts misstate n_tokens or writer", "footer")
    return facts


def _decode_identity(tree: Any) -> ModelIdentity:
    name, digest = tree["name"], tree["digest"]
    if not isinstance(name, str) or not isinstance(digest, str):
        raise TypeError("an identity is two strings")
    return ModelIdentity(name, digest)


def _decode_scalars(tree: Any) -> Mapping[str, Scalar]:
    if not isinstance(tree, dict) or any(isinstance(value, dict | list) for value in tree.values()):
        raise TypeError("settings are an object of scalars")
    return tree
