"""Damaged slot files: raw damage, which checksums find, and resealed damage, which whoever reads the content meets."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from persistence.files import SystemFiles
from persistence.format import CHECKPOINTS_HEAD, CheckpointEntry, Kind, Section, encode_footer
from persistence.layout import read_layout
from persistence.reader import open_source
from persistence.snapshot import FileFacts

EXTREMES_32 = (0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
EXTREMES_64 = (0, 1, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
# zeros, ones, NaN and minus infinity as 16-bit floats, NaN as a 32-bit one
FILLINGS = (b"\0", b"\xff", b"\x00\x7e", b"\x00\xfc", b"\x00\x00\xc0\x7f")
JSON_VALUES: tuple[object, ...] = (None, -1, 0, 1 << 40, 1 << 80, 1.5, "x", "", "\ud800", [], {}, True)


@dataclass(frozen=True)
class Parts:
    """A file taken apart; `seal` puts it together with checksums that are right for what is in it now."""

    sections: tuple[tuple[int, bytes], ...]
    records: tuple[bytes, ...]  # of the checkpoints, whose section holds only its head here
    facts: FileFacts

    def section(self, kind: Kind) -> bytes | None:
        return next((data for k, data in self.sections if k == kind), None)

    def with_section(self, kind: Kind, data: bytes) -> Parts:
        return replace(self, sections=tuple((k, data if k == kind else d) for k, d in self.sections))

    def seal(self, *, footer: bool = True) -> bytes:
        body, table, entries = b"", [], []
        for kind, data in self.sections:
            digest = xxhash.xxh3_128_digest(data)
            start = len(body)
            body += data
            if kind == Kind.CHECKPOINTS:
                for record in self.records:
                    entries.append(CheckpointEntry(len(body), len(record), xxhash.xxh3_128_digest(record)))
                    body += record
            table.append(Section(kind, start, len(body) - start, digest))
        return body + (encode_footer(table, entries, self.facts) if footer else b"")


def take_apart(path: Path) -> Parts:
    data = path.read_bytes()
    source = open_source(path, SystemFiles())
    try:
        layout = read_layout(source)
    finally:
        source.files.close(source.fd)
    assert layout.footer is not None
    sections = []
    for s in layout.sections:
        end = s.offset + CHECKPOINTS_HEAD.size if s.kind == Kind.CHECKPOINTS else s.end
        sections.append((s.kind, data[s.offset : end]))
    records = tuple(data[e.offset : e.offset + e.length] for e in layout.checkpoints)
    parts = Parts(tuple(sections), records, layout.footer.facts)
    assert parts.seal() == data
    return parts


# -- damage to bytes; every function gives other bytes of any length

Damage = Callable[[random.Random, bytes], bytes]


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def flip(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if out:
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def overwrite(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    n = min(len(data) - start, rng.choice((1, 4, 64, 4096)))
    filling = rng.choice((*FILLINGS, rng.randbytes(max(1, n))))
    return data[:start] + (filling * n)[:n] + data[start + n :]


def splice(rng: random.Random, data: bytes) -> bytes:
    """A piece of the file once more, somewhere else, or taken out."""
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    if rng.random() < 0.3:
        return data[:a] + data[b:]
    b = min(b, a + rng.choice((4, 12, 100, 5000)))
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[a:b] + data[at if rng.random() < 0.5 else at + b - a :]


def early_word(rng: random.Random, data: bytes) -> bytes:
    """An extreme number where heads and counts are."""
    return _number(rng, data, min(len(data), 96))


def any_word(rng: random.Random, data: bytes) -> bytes:
    return _number(rng, data, len(data))


def late_word(rng: random.Random, data: bytes) -> bytes:
    tail = min(len(data), 200)
    return data[: len(data) - tail] + _number(rng, data[len(data) - tail :], tail)


def _number(rng: random.Random, data: bytes, n: int) -> bytes:
    form, values = rng.choice((("<I", EXTREMES_32), ("<Q", EXTREMES_64)))
    size = struct.calcsize(form)
    if n < size:
        return data + b"\0"
    at = rng.randrange(0, n - size + 1, 4)
    value = rng.choice(values)
    if rng.random() < 0.3:
        value = max(0, struct.unpack_from(form, data, at)[0] + rng.choice((-1, 1))) & ((1 << 8 * size) - 1)
    return data[:at] + struct.pack(form, value) + data[at + size :]


RAW: Sequence[Damage] = (cut, flip, flip, overwrite, splice, early_word, any_word, late_word)


# -- damage to the content, with right checksums


def state_frame(rng: random.Random, state: bytes) -> bytes:
    """A sequence state with one number of its framing or one position changed: most likely to be believed."""
    if len(state) < 64:
        return flip(rng, state)
    (n_cells,) = struct.unpack_from("<I", state, 4)
    stride = 24 if struct.unpack_from("<I", state, 8 + 24 + 4)[0] == 1 and n_cells > 1 else 12
    cells_end = 8 + n_cells * stride
    spots = [
        0,
        4,
        cells_end,
        cells_end + 4,
        cells_end + 8,
        cells_end + 12,
    ]  # streams, cells, layout, layers, type, row
    spots += [8 + stride * rng.randrange(max(1, n_cells)) + 4 * rng.randrange(stride // 4) for _ in range(4)]
    at = rng.choice([spot for spot in spots if spot + 4 <= len(state)])
    value = rng.choice((*EXTREMES_32, 3, n_cells, n_cells - 1, n_cells + 1, rng.randrange(max(1, n_cells))))
    return state[:at] + struct.pack("<I", value & 0xFFFFFFFF) + state[at + 4 :]


def state_values(rng: random.Random, state: bytes) -> bytes:
    """Rows full of values that are no numbers, or infinite, or anything."""
    start = (len(state) // 4 + rng.randrange(max(1, len(state) // 2))) & ~3
    n = min(len(state) - start, rng.choice((64, 1024, 20_000)))
    return state[:start] + (rng.choice((*FILLINGS, rng.randbytes(64))) * n)[:n] + state[start + n :]


IN_A_STATE: Sequence[Damage] = (
    state_frame,
    state_frame,
    state_values,
    state_values,
    cut,
    splice,
    any_word,
    flip,
)


def damage_target(rng: random.Random, parts: Parts) -> Parts:
    target = parts.section(Kind.TARGET)
    assert target is not None
    return parts.with_section(Kind.TARGET, rng.choice(IN_A_STATE)(rng, target))


def damage_tokens(rng: random.Random, parts: Parts) -> Parts:
    words = parts.section(Kind.TOKENS)
    assert words is not None
    tokens = list(struct.unpack(f"<{(len(words) - 28) // 4}i", words[24:-4]))
    match rng.randrange(5):
        case 0:
            tokens = tokens[: rng.randrange(len(tokens) + 1)]
        case 1:
            tokens += tokens[: rng.randrange(1, 40)]
        case 2:
            tokens[rng.randrange(len(tokens))] = rng.choice((-1, -2, 1 << 30, (1 << 31) - 1, 5))
        case 3:
            tokens = []
        case _:
            tokens *= 40
    head = struct.pack("<4sIIiII", b"qsgg", 3, len(tokens) + 4, -1, 1, len(tokens))
    packed = head + struct.pack(f"<{len(tokens) + 1}i", *tokens, 0)
    facts = replace(parts.facts, n_tokens=len(tokens))
    return replace(parts.with_section(Kind.TOKENS, packed), facts=facts)


def damage_checkpoints(rng: random.Random, parts: Parts) -> Parts:
    records = list(parts.records)
    if not records:
        return damage_target(rng, parts)
    i = rng.randrange(len(records))
    match rng.randrange(6):
        case 0:
            records[i] = struct.pack("<q", rng.choice((0, 1, -1, 1 << 40, 7, 1 << 62))) + records[i][8:]
        case 1:
            records[i] = rng.choice(IN_A_STATE)(rng, records[i])
        case 2:
            records[i] = records[i][:24] + rng.choice(IN_A_STATE)(rng, records[i][24:])
        case 3:
            records[i] = records[rng.randrange(len(records))]
        case 4:
            rng.shuffle(records)
        case _:
            at = 24 + 8  # behind the blob's own head
            records[i] = records[i][:at] + state_frame(rng, records[i][at:])
    head = CHECKPOINTS_HEAD.pack(b"SCKP", 1, len(records))
    return replace(parts.with_section(Kind.CHECKPOINTS, head), records=tuple(records))


def damage_draft(rng: random.Random, parts: Parts) -> Parts:
    block = parts.section(Kind.DRAFT)
    if block is None:
        return damage_target(rng, parts)
    blobs, at = [], 8
    for _ in range(3):
        (n,) = struct.unpack_from("<Q", block, at)
        blobs.append(block[at + 8 : at + 8 + n])
        at += 8 + n
    match rng.randrange(5):
        case 0:
            fit = json.loads(blobs[0])
            fit[rng.choice(sorted(fit))] = rng.choice(JSON_VALUES)
            blobs[0] = json.dumps(fit).encode()
        case 1:
            blobs[0] = rng.choice((b"", b"[]", b"null", b"{", b"[" * 5000, flip(rng, blobs[0])))
        case 2:
            head, state = blobs[1][:8], blobs[1][8:]
            blobs[1] = head + rng.choice(IN_A_STATE)(rng, state)
        case 3:
            blobs[2] = rng.choice((cut, flip, early_word, splice))(rng, blobs[2])
        case _:
            blobs[1], blobs[2] = blobs[2], blobs[1]
    data = block[:8] + b"".join(struct.pack("<Q", len(blob)) + blob for blob in blobs)
    return parts.with_section(Kind.DRAFT, data)


def damage_facts(rng: random.Random, parts: Parts) -> Parts:
    facts = parts.facts
    match rng.randrange(5) if facts.settings else 2:
        case 0:
            name = rng.choice(sorted(facts.settings))
            value = rng.choice([v for v in JSON_VALUES if not isinstance(v, list | dict) and v != "\ud800"])
            facts = replace(facts, settings={**facts.settings, name: value})  # type: ignore[dict-item]
        case 1:
            facts = replace(facts, settings={})
        case 2:
            facts = replace(facts, target=replace(facts.target, digest=rng.choice(("", "0" * 32))))
        case 3:
            facts = replace(facts, n_tokens=rng.choice((0, 1, 1 << 40)))
        case _:
            facts = replace(facts, draft=None, created=rng.choice((0.0, -1.0, 1e300)))
    return replace(parts, facts=facts)


def damage_table(rng: random.Random, parts: Parts) -> Parts:
    """Sections left out, doubled, moved, or of an unknown kind."""
    sections = list(parts.sections)
    match rng.randrange(4):
        case 0:
            sections.pop(rng.randrange(len(sections)))
        case 1:
            sections.append(rng.choice(sections))
        case 2:
            rng.shuffle(sections)
        case _:
            sections.insert(rng.randrange(2, len(sections) + 1), (rng.randrange(5, 100), rng.randbytes(50)))
    return replace(parts, sections=tuple(sections))


RESEALED = (
    damage_target,
    damage_target,
    damage_tokens,
    damage_checkpoints,
    damage_draft,
    damage_facts,
    damage_table,
)


def mutate(rng: random.Random, parts: Parts) -> tuple[str, bytes]:
    """One damaged file, and what was done to it."""
    kind = rng.random()
    if kind < 0.35:
        damage = rng.choice(RAW)
        return damage.__name__, damage(rng, parts.seal(footer=rng.random() < 0.8))
    change = rng.choice(RESEALED)
    changed = change(rng, parts)
    if kind < 0.45:
        changed = damage_target(rng, changed) if changed.section(Kind.TARGET) else changed
    footer = rng.random() < 0.8
    return f"{change.__name__}{'' if footer else ', no footer'}", changed.seal(footer=footer)
