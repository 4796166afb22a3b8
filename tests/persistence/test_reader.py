"""Files that are damaged, or have no footer: what is lost, what is kept, and what is said of it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import xxhash

from persistence.errors import SectionsInvalid, Truncated
from persistence.files import FileInfo, SystemFiles
from persistence.format import CheckpointEntry, Section, check_coverage, encode_footer
from persistence.reader import Dropped, SlotFile
from persistence.source import Source
from persistence.store import DEFAULT_OWNER, DirectoryStore
from tests.persistence.build import (
    FULL_CHECKPOINTS,
    attention_state,
    checkpoint,
    draft_bytes,
    facts,
    full_file,
    save,
    stock_file,
)

STATE = attention_state([3])
TOKENS = [4, 5, 6]
CHECKPOINTS = [checkpoint(1, b"one"), checkpoint(2, b"two"), checkpoint(3, b"three")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.bin"


def kept(file: SlotFile) -> list[int]:
    return [c.n_tokens for c in file.checkpoints()]


def test_a_cut_appendix_keeps_the_checkpoints_before_the_cut(path: Path) -> None:
    data = stock_file(TOKENS, STATE, checkpoints=CHECKPOINTS)
    path.write_bytes(data[:-1])
    with SlotFile.open(path) as file:
        assert kept(file) == [1, 2]
        assert file.dropped == [Dropped("checkpoints", 2, "truncated", "of 3")]
        assert bytes(file.read_target()[8:]) == STATE
        assert [error.section for error in file.verify()] == ["checkpoints"]


def test_a_count_beyond_the_records_is_noticed(path: Path) -> None:
    data = bytearray(stock_file(TOKENS, STATE, checkpoints=CHECKPOINTS))
    struct.pack_into("<I", data, data.index(b"SCKP") + 8, 2**32 - 1)
    path.write_bytes(data)
    with SlotFile.open(path) as file:
        assert kept(file) == [1, 2, 3]
        assert [(d.index, d.reason) for d in file.dropped] == [(3, "truncated")]


def test_more_records_than_a_file_may_have_are_dropped(path: Path) -> None:
    data = stock_file(TOKENS, STATE, checkpoints=[checkpoint(1, b"")] * 4098)
    path.write_bytes(data)
    with SlotFile.open(path) as file:
        assert len(kept(file)) == 4096
        assert [(d.index, d.reason) for d in file.dropped] == [(4096, "framing")]


@pytest.mark.parametrize("n_tokens", [-1, 4, 2**62])
def test_a_checkpoint_beyond_the_tokens_is_dropped_alone(tmp_path: Path, path: Path, n_tokens: int) -> None:
    odd = [CHECKPOINTS[0], checkpoint(0, b"odd"), CHECKPOINTS[2]]
    data = bytearray(stock_file(TOKENS, STATE, checkpoints=odd))
    struct.pack_into("<q", data, data.index(b"odd") - 24, n_tokens)
    path.write_bytes(data)
    with SlotFile.open(path) as file:
        assert kept(file) == [1, 3]
        assert [(d.index, d.reason) for d in file.dropped] == [(1, "position")]


def test_a_checkpoint_whose_blobs_do_not_fill_it_is_dropped_alone(tmp_path: Path) -> None:
    # A record with a right checksum and wrong lengths: only a wrong writer makes one.
    store = DirectoryStore(tmp_path)
    with store.create(DEFAULT_OWNER, "a.bin") as writer, pytest.MonkeyPatch.context() as patch:
        writer.payload(TOKENS, bytes(8) + STATE)
        original = writer._write_blob
        patch.setattr(writer, "_write_blob", lambda blob: (original(blob), writer._write(b"extra"))[0])
        writer.checkpoints(3, CHECKPOINTS)
        patch.undo()
        writer.commit(facts(3))
    with store.open(DEFAULT_OWNER, "a.bin") as file:
        assert kept(file) == []
        assert [(d.index, d.reason) for d in file.dropped] == [(0, "framing"), (1, "framing"), (2, "framing")]
        assert bytes(file.read_target()[8:]) == STATE


@pytest.mark.parametrize("n", range(1, len(draft_bytes(b"{}", b"ctx", b"spec"))))
def test_a_cut_draft_block_costs_the_draft_alone(path: Path, n: int) -> None:
    path.write_bytes(
        stock_file(TOKENS, STATE, checkpoints=CHECKPOINTS, tail=draft_bytes(b"{}", b"ctx", b"spec")[:n])
    )
    with SlotFile.open(path) as file:
        assert kept(file) == [1, 2, 3]
        assert file.draft() is None
        assert [(d.section, d.reason) for d in file.dropped] in (
            [("draft", "truncated")],
            [("draft", "framing")],
        )
        assert [error.section for error in file.verify()] == ["draft"]


def test_asking_twice_reports_the_damage_once(path: Path) -> None:
    path.write_bytes(stock_file(TOKENS, STATE, checkpoints=CHECKPOINTS)[:-1])
    with SlotFile.open(path) as file:
        assert kept(file) == kept(file) == [1, 2]
        assert len(file.dropped) == 1


def test_a_file_that_shrinks_while_open_drops_what_is_gone(tmp_path: Path) -> None:
    path = full_file(tmp_path)
    with SlotFile.open(path) as file:
        end = file.sections[2].offset + 30
        with path.open("r+b") as raw:
            raw.truncate(end)
        file.read_target()
        assert kept(file) == []
        assert file.draft() is None
        assert [(d.section, d.reason) for d in file.dropped] == [
            ("checkpoints", "truncated"),
            ("checkpoints", "truncated"),
            ("draft", "truncated"),
        ]


def test_sizes_are_known_before_anything_is_read(tmp_path: Path) -> None:
    with SlotFile.open(full_file(tmp_path)) as file:
        assert file.n_checkpoints == len(FULL_CHECKPOINTS)
        assert file.largest_checkpoint_bytes == 16 + 3 * 8 + len(b"second" * 4) + len(b"sp")
        assert file.target_bytes == 8 + len(attention_state([4]))
        assert file.draft_bytes == file.sections[3].length


def test_a_draft_is_read_into_the_callers_buffer(tmp_path: Path) -> None:
    with SlotFile.open(full_file(tmp_path)) as file:
        buffer = bytearray(file.draft_bytes + 10)
        block = file.draft(memoryview(buffer))
        assert block is not None
        assert block == file.draft()
        assert memoryview(block.context).obj is buffer
        assert bytes(buffer[-10:]) == bytes(10)
        with pytest.raises(ValueError, match=f"buffer of {file.draft_bytes - 1} bytes"):
            file.draft(memoryview(buffer)[: file.draft_bytes - 1])


def test_a_file_is_closed_when_it_is_refused(tmp_path: Path) -> None:
    closed: list[int] = []

    class Watching(SystemFiles):
        def close(self, fd: int) -> None:
            closed.append(fd)
            super().close(fd)

    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(Exception, match="not a slot file"):
        SlotFile.open(tmp_path / "junk", Watching())
    assert len(closed) == 1


def test_a_failing_stat_closes_the_file(tmp_path: Path) -> None:
    closed: list[int] = []

    class Failing(SystemFiles):
        def info_of(self, fd: int) -> FileInfo:
            raise OSError(5, "Input/output error")

        def close(self, fd: int) -> None:
            closed.append(fd)
            super().close(fd)

    with pytest.raises(Exception, match="Input/output"):
        SlotFile.open(full_file(tmp_path), Failing())
    assert len(closed) == 1


def test_verify_reads_every_byte_and_reports_progress(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    saved = save(store, "big.bin", TOKENS, bytes(8) + bytes(3 << 20), CHECKPOINTS)
    steps: list[int] = []
    with store.open(DEFAULT_OWNER, "big.bin") as file:
        assert file.verify(steps.append) == []
    assert len(steps) > 4
    assert sum(steps) == saved.n_written


@pytest.mark.parametrize(
    ("kinds", "fault"),
    [
        ((1, 2, 2), "kinds"),
        ((2, 1), "kinds"),
        ((1,), "kinds"),
        ((1, 2, 4, 4), "kinds"),
        ((1, 2), "no section"),
    ],
    ids=str,
)
def test_a_table_that_names_a_section_twice_or_not_at_all_is_refused(
    kinds: tuple[int, ...], fault: str
) -> None:
    sections = [Section(kind, 10 * n, 10, bytes(16)) for n, kind in enumerate(kinds)]
    rows = [CheckpointEntry(0, 40, bytes(16))] if fault == "no section" else []
    with pytest.raises(SectionsInvalid, match=fault):
        check_coverage(sections, rows, 10 * len(kinds))


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (b"DKD", "truncated"),
        (b"XXXX" + draft_bytes(b"", b"", b"")[4:], "framing"),
        (draft_bytes(b"", b"", b"", version=9), "version"),
        (draft_bytes(b"", b"", b"") + b"more", "framing"),
    ],
    ids=["head", "magic", "version", "rest"],
)
def test_a_draft_block_of_a_wrong_writer_is_dropped_alone(path: Path, block: bytes, reason: str) -> None:
    payload = stock_file(TOKENS, STATE)
    sections = [(1, payload[: -len(STATE)]), (2, STATE), (4, block)]
    rows, at = [], 0
    for kind, data in sections:
        rows.append(Section(kind, at, len(data), xxhash.xxh3_128_digest(data)))
        at += len(data)
    path.write_bytes(payload + block + encode_footer(rows, [], facts(3)))
    with SlotFile.open(path) as file:
        assert file.draft() is None
        assert [(d.section, d.reason) for d in file.dropped] == [("draft", reason)]
        assert bytes(file.read_target()[8:]) == STATE


@pytest.mark.parametrize(("offset", "length"), [(0, 11), (10, 1), (-1, 1), (5, -1), (2**63, 1), (0, 2**62)])
def test_no_buffer_is_made_for_bytes_outside_the_file(offset: int, length: int) -> None:
    source = Source(SystemFiles(), -1, 10, "a.bin")
    with pytest.raises(Truncated):
        source.buffer(offset, length, "target")
    assert len(source.buffer(0, 10, "target")) == 10
