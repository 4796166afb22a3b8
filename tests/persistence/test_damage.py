"""Cut, flipped and stretched files: each damage is found, named by its section, and costs nothing else."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from persistence.errors import FooterDamaged, NotASlotFile, SlotFileError, UnsupportedVersion
from persistence.format import Kind
from persistence.reader import SlotFile
from tests.persistence.build import (
    FULL_CHECKPOINTS,
    FULL_DRAFT,
    FULL_TOKENS,
    attention_state,
    draft_bytes,
    full_file,
    same,
    stock_file,
)
from tests.persistence.memory_files import MemoryFiles

STATE = attention_state([4])
EXTREMES = (0, 1, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


@dataclass(frozen=True)
class Outcome:
    """What reading a file gave: where it was refused, or what was dropped."""

    refused: str | None = None
    dropped: tuple[tuple[str, int], ...] = ()
    checksum: str = ""
    notes: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return self.refused is None and not self.dropped and self.checksum == "verified" and not self.notes


def read(path: Target, *, trust_framing: bool = False) -> Outcome:
    """Read everything. What is given out as verified must be what was written; only our errors may come.

    `trust_framing`: what is given out unverified must be right as well.
    """
    try:
        with path.open() as file:
            if file.checksum == "absent" and not trust_framing:
                return Outcome(checksum="absent")
            assert tuple(file.tokens) == FULL_TOKENS
            assert bytes(file.read_target()[8:]) == STATE
            checkpoints = {c.n_tokens: c for c in file.checkpoints()}
            for expected in FULL_CHECKPOINTS:
                if expected.n_tokens in checkpoints:
                    assert same(checkpoints.pop(expected.n_tokens), expected)
            assert not checkpoints
            block = file.draft()
            if block is not None:
                assert (block.fit, bytes(block.context), bytes(block.spec)) == (
                    FULL_DRAFT.fit,
                    FULL_DRAFT.context,
                    FULL_DRAFT.spec,
                )
            dropped = tuple((d.section, d.index) for d in file.dropped)
            return Outcome(None, dropped, file.checksum, tuple(file.notes))
    except SlotFileError as error:
        return Outcome(refused=error.section)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_file(tmp_path_factory.mktemp("whole"), STATE)


class Target:
    """A damaged file, in memory: thousands of them would otherwise be written to the disk."""

    def __init__(self) -> None:
        self._files = MemoryFiles()
        self._files.read_limit = 1 << 20

    def write_bytes(self, data: bytes) -> None:
        self._files.put(Path("/damaged.bin"), bytes(data))

    def open(self) -> SlotFile:
        return SlotFile.open(Path("/damaged.bin"), self._files)

    @property
    def n_bytes(self) -> int:
        return self._files.info(Path("/damaged.bin")).size


@pytest.fixture
def target() -> Target:
    return Target()


@cache
def section_at(whole: Path, offset: int) -> tuple[str, int]:
    """Which section a byte belongs to, and which checkpoint, where it is a checkpoint's."""
    with SlotFile.open(whole) as file:
        for section in file.sections:
            if section.offset <= offset < section.end:
                for index, entry in enumerate(file._layout.checkpoints):
                    if entry.offset <= offset < entry.offset + entry.length:
                        return "checkpoints", index
                return section.label, -1
    return "footer", -1


def test_the_undamaged_file_reads_clean(whole: Path, target: Target) -> None:
    target.write_bytes(whole.read_bytes())
    assert read(target).clean
    assert section_at(whole, 0) == ("tokens", -1)
    assert section_at(whole, whole.stat().st_size - 1) == ("footer", -1)


def test_every_truncation_is_found(whole: Path, target: Target) -> None:
    data = whole.read_bytes()
    with SlotFile.open(whole) as file:
        ends = [section.end for section in file.sections if section.kind != Kind.TOKENS]
    for n in range(len(data)):
        target.write_bytes(data[:n])
        outcome = read(target, trust_framing=True)
        section, index = section_at(whole, n)
        if n in ends:
            # What is left is a whole file without a footer, and it says that nothing was verified.
            assert outcome == Outcome(None, (), "absent", outcome.notes), f"cut at {n}"
            assert "no footer" in outcome.notes[0]
        elif section == "checkpoints":
            assert outcome.refused is None, f"cut at {n}"
            assert outcome.dropped == (("checkpoints", max(index, 0)),), f"cut at {n}"
        elif section == "draft":
            assert outcome == Outcome(None, (("draft", 0),), "absent", outcome.notes), f"cut at {n}"
        else:
            assert outcome.refused == section, f"cut at {n}"


def test_every_flipped_bit_is_found_and_attributed(whole: Path, target: Target) -> None:
    data = whole.read_bytes()
    for at in range(len(data)):
        section, index = section_at(whole, at)
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        target.write_bytes(flipped)
        outcome = read(target)
        assert not outcome.clean, f"byte {at}"
        if section in ("tokens", "target", "footer"):
            assert outcome.refused == section, f"byte {at}"
        elif section == "checkpoints" and index >= 0:
            assert outcome == Outcome(None, (("checkpoints", index),), "verified"), f"byte {at}"
        elif section == "checkpoints":
            assert outcome.dropped == ()
            assert "head is damaged" in outcome.notes[0]
        else:
            assert outcome == Outcome(None, (("draft", 0),), "verified"), f"byte {at}"


def test_verify_names_the_damaged_section(whole: Path, target: Target) -> None:
    data = whole.read_bytes()
    with SlotFile.open(whole) as file:
        places = [(s.label, s.end - 1) for s in file.sections if s.kind != Kind.TOKENS]
        head = next(s.offset for s in file.sections if s.kind == Kind.CHECKPOINTS)
    for label, at in [*places, ("checkpoints", head + 4)]:
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        target.write_bytes(flipped)
        with target.open() as file:
            assert [error.section for error in file.verify()] == [label]


@pytest.mark.property
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_overwritten_and_moved_bytes_never_pass(whole: Path, target: Target, data: st.DataObject) -> None:
    original = whole.read_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        what = data.draw(st.sampled_from(["overwrite", "insert", "delete", "swap"]))
        piece = data.draw(st.binary(min_size=1, max_size=24))
        if what == "overwrite":
            damaged[at : at + len(piece)] = piece
        elif what == "insert":
            damaged[at:at] = piece
        elif what == "delete" and len(damaged) > len(piece):
            del damaged[at : at + len(piece)]
        else:
            damaged[at:] = damaged[at:][::-1]
    target.write_bytes(damaged)
    # Damage may undo itself; otherwise something must show. `read` checks whatever is given out.
    assert bytes(damaged) == original or not read(target).clean


@contextmanager
def allocation_limit(n_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < n_bytes
    finally:
        tracemalloc.stop()


def footerless(whole: Path) -> bytes:
    return stock_file(FULL_TOKENS, STATE, checkpoints=FULL_CHECKPOINTS) + draft_bytes(
        FULL_DRAFT.fit, FULL_DRAFT.context, FULL_DRAFT.spec
    )


@pytest.mark.parametrize("with_footer", [True, False], ids=["footer", "no footer"])
@pytest.mark.parametrize("form", ["<I", "<Q"], ids=["u32", "u64"])
def test_extreme_numbers_anywhere_allocate_nothing(
    whole: Path, target: Target, form: str, with_footer: bool
) -> None:
    data = whole.read_bytes() if with_footer else footerless(whole)
    width = struct.calcsize(form)
    # Every third byte meets every field of four bytes or more, at one alignment or another.
    for at in range(0, len(data) - width, 3):
        for value in EXTREMES:
            if value >= 2 ** (8 * width):
                continue
            stretched = bytearray(data)
            struct.pack_into(form, stretched, at, value)
            target.write_bytes(stretched)
            if with_footer:
                assert bytes(stretched) == data or not read(target).clean
            else:
                read_unverified(target)


def read_unverified(path: Target) -> None:
    """Without checksums wrong values may pass; only our errors may come, and all parts are bounded."""
    size = path.n_bytes
    try:
        with path.open() as file:
            assert file.checksum == "absent"
            assert len(file.read_target()) <= size + 8
            assert sum(c.state.n_bytes for c in file.checkpoints()) <= size
            file.draft()
            file.verify()
    except SlotFileError:
        pass


@pytest.mark.parametrize("value", EXTREMES[3:])
def test_length_fields_never_allocate_more_than_the_file(whole: Path, target: Target, value: int) -> None:
    data = footerless(whole)
    appendix = data.index(b"SCKP")
    draft = data.index(b"DKDB")
    places = [8, 20, appendix + 8, appendix + 12 + 16, draft + 8, draft + 16 + len(FULL_DRAFT.fit)]
    for at in places:
        width = 4 if at in (8, 20, appendix + 8) else 8
        stretched = bytearray(data)
        stretched[at : at + width] = (value & (2 ** (8 * width) - 1)).to_bytes(width, "little")
        target.write_bytes(stretched)
        # The interpreter's own objects need some kilobytes whatever the file is.
        with allocation_limit(len(data) + 200_000):
            read_unverified(target)


def reseal(data: bytes, at: int, value: bytes) -> bytes:
    """Change bytes of a footer and give it a valid checksum again: a wrong writer, not a damaged file."""
    out = bytearray(data)
    out[at : at + len(value)] = value
    length = int.from_bytes(out[-32:-24], "little")
    start = len(out) - length
    out[-24:-8] = xxhash.xxh3_128_digest(bytes(out[start:-24]))
    return bytes(out)


FOOTER_FIELDS = {"min_reader": 12, "n_sections": 16, "n_checkpoints": 20, "facts_bytes": 24}


@pytest.mark.parametrize("field", FOOTER_FIELDS)
def test_extreme_numbers_in_a_valid_footer_are_refused(whole: Path, target: Target, field: str) -> None:
    data = whole.read_bytes()
    at = len(data) - int.from_bytes(data[-32:-24], "little") + FOOTER_FIELDS[field]
    (old,) = struct.unpack_from("<I", data, at)
    for value in {value & 0xFFFFFFFF for value in EXTREMES} - {old}:
        target.write_bytes(reseal(data, at, struct.pack("<I", value)))
        if field == "min_reader" and value == 0:
            assert read(target).clean
        else:
            assert read(target).refused == "footer", value


@pytest.mark.parametrize("at", [8, 28], ids=["version", "reserved"])
def test_what_a_footer_may_change_for_old_readers_is_ignored(whole: Path, target: Target, at: int) -> None:
    data = whole.read_bytes()
    start = len(data) - int.from_bytes(data[-32:-24], "little")
    target.write_bytes(reseal(data, start + at, b"\xff\xff\xff\xff"))
    assert read(target).clean


def test_sections_that_overlap_or_leave_a_hole_are_refused(whole: Path, target: Target) -> None:
    data = whole.read_bytes()
    start = len(data) - int.from_bytes(data[-32:-24], "little")
    for row in range(4):
        for field in (8, 16):
            at = start + 32 + 40 * row + field
            (old,) = struct.unpack_from("<Q", data, at)
            for value in (old + 1, max(old - 1, 0), *EXTREMES):
                if value == old:
                    continue
                target.write_bytes(reseal(data, at, struct.pack("<Q", value)))
                assert read(target).refused is not None, (row, field, value)


def test_checkpoint_rows_that_overlap_or_leave_a_hole_are_refused(whole: Path, target: Target) -> None:
    data = whole.read_bytes()
    start = len(data) - int.from_bytes(data[-32:-24], "little")
    for row in range(2):
        for field in (0, 8):
            at = start + 32 + 40 * 4 + 32 * row + field
            (old,) = struct.unpack_from("<Q", data, at)
            for value in {old + 1, old - 1, *EXTREMES} - {old}:
                target.write_bytes(reseal(data, at, struct.pack("<Q", value)))
                assert read(target).refused == "checkpoints", (row, field, value)


def test_bytes_after_the_footer_are_refused(whole: Path, target: Target) -> None:
    target.write_bytes(whole.read_bytes() + b"\0")
    with pytest.raises(FooterDamaged):
        target.open()


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (b"", NotASlotFile, "empty"),
        (b"GGUF\3\0\0\0" + bytes(40), NotASlotFile, "GGUF"),
        (b"qsgn" + bytes(40), NotASlotFile, "qsgn"),
    ],
)
def test_foreign_files_are_refused_by_name(
    target: Target, data: bytes, error: type[SlotFileError], text: str
) -> None:
    target.write_bytes(data)
    with pytest.raises(error, match=text):
        target.open()


@pytest.mark.parametrize("version", [0, 2, 4, 2**32 - 1])
def test_another_ggsq_version_is_refused_with_both_numbers(whole: Path, target: Target, version: int) -> None:
    data = bytearray(whole.read_bytes())
    struct.pack_into("<I", data, 4, version)
    target.write_bytes(data)
    with pytest.raises(UnsupportedVersion, match=rf"version {version} .* version 3") as caught:
        target.open()
    assert (caught.value.found, caught.value.known) == (version, 3)
