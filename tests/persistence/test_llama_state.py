"""The end of a state is found by its framing, for every memory kind; a cut one has no end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from persistence.errors import StateNotFramed
from persistence.format import Kind
from persistence.reader import SlotFile
from tests.persistence.build import (
    attention_state,
    checkpoint,
    draft_bytes,
    recurrent_state,
    same,
    stock_file,
)

TOKENS = [3, 1, 4]
EMPTY_APPENDIX_BYTES = 12

STATES = {
    "attention": attention_state([3]),
    "transposed values": attention_state([3], transposed=True),
    "two-dimensional positions": attention_state([3], extra=3),
    "three streams": attention_state([0, 3, 0]),
    "sliding window": attention_state([3]) + attention_state([2]),
    "sliding window in streams": attention_state([3, 0]) + attention_state([2, 0]),
    "hybrid": attention_state([3]) + recurrent_state(2),
    "hybrid in streams": attention_state([0, 3]) + recurrent_state(2),
    "hybrid with window": attention_state([3]) + attention_state([2]) + recurrent_state(2),
    "recurrent": recurrent_state(2),
    "many cells": attention_state([9000], n_layers=1),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.bin"


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("kind", STATES)
def test_every_kind_ends_where_the_file_ends(path: Path, kind: str, packed: bool) -> None:
    path.write_bytes(stock_file(TOKENS, STATES[kind], packed=packed))
    with SlotFile.open(path) as file:
        assert list(file.tokens) == TOKENS
        assert bytes(file.read_target()[8:]) == STATES[kind]
        assert [section.kind for section in file.sections] == [Kind.TOKENS, Kind.TARGET]
        assert (file.checksum, file.facts, file.draft()) == ("absent", None, None)
        assert list(file.checkpoints()) == []


@pytest.mark.parametrize("kind", STATES)
def test_every_kind_ends_where_the_next_section_begins(path: Path, kind: str) -> None:
    checkpoints = [checkpoint(1, b"one"), checkpoint(2, b"two", b"d", b"s")]
    data = stock_file(TOKENS, STATES[kind], checkpoints=checkpoints, tail=draft_bytes(b"{}", b"ctx", b"spec"))
    path.write_bytes(data)
    with SlotFile.open(path) as file:
        assert bytes(file.read_target()[8:]) == STATES[kind]
        found = list(file.checkpoints())
        assert len(found) == 2
        assert all(same(a, b) for a, b in zip(found, checkpoints, strict=True))
        block = file.draft()
        assert block is not None
        assert (block.fit, bytes(block.context), bytes(block.spec)) == (b"{}", b"ctx", b"spec")
        assert file.dropped == []


@pytest.mark.parametrize("kind", [kind for kind in STATES if kind != "many cells"])
def test_a_cut_state_is_refused_at_every_byte(path: Path, kind: str) -> None:
    state = STATES[kind]
    for n in range(len(state)):
        path.write_bytes(stock_file(TOKENS, state[:n]))
        if is_whole_part(state[:n]):
            SlotFile.open(path).close()
            continue
        with pytest.raises(StateNotFramed) as caught:
            SlotFile.open(path)
        assert caught.value.section == "target"


def is_whole_part(first: bytes) -> bool:
    """A state of two parts cut exactly between them is a whole state of another kind of model."""
    parts = [attention_state([3]), attention_state([3, 0]), attention_state([0, 3])]
    parts.append(attention_state([3]) + attention_state([2]))
    return first in parts


@pytest.mark.parametrize(
    ("what", "damage"),
    [
        ("no streams", lambda s: b"\0\0\0\0" + s[4:]),
        ("too many streams", lambda s: b"\1\1\0\0" + s[4:]),
        ("a cell of two sequences", lambda s: s[:12] + b"\2\0\0\0" + s[16:]),
        ("a sequence id out of range", lambda s: s[:16] + b"\0\1\0\0" + s[20:]),
        ("neither row nor column order", lambda s: s[:44] + b"\2\0\0\0" + s[48:]),
        ("no layers", lambda s: s[:48] + b"\0\0\0\0" + s[52:]),
        ("too many layers", lambda s: s[:48] + b"\1\4\0\0" + s[52:]),
        ("a negative type", lambda s: s[:52] + b"\xff\xff\xff\xff" + s[56:]),
        ("rows of no bytes", lambda s: s[:56] + bytes(8) + s[64:]),
        ("values left out", lambda s: attention_state([3], values=False)),
        ("one byte more", lambda s: s + b"\0"),
        ("no state at all", lambda s: b""),
    ],
)
def test_broken_framing_is_refused(path: Path, what: str, damage: Callable[[bytes], bytes]) -> None:
    path.write_bytes(stock_file(TOKENS, damage(attention_state([3]))))
    with pytest.raises(StateNotFramed):
        SlotFile.open(path)


@pytest.mark.parametrize("at", [4, 12, 16])
def test_broken_recurrent_framing_is_refused(path: Path, at: int) -> None:
    state = bytearray(recurrent_state(2))
    state[at + 3] = 0x7F
    if at == 4:
        state[:4] = b"\1\1\0\0"
    path.write_bytes(stock_file(TOKENS, bytes(state)))
    with pytest.raises(StateNotFramed):
        SlotFile.open(path)


def test_uneven_recurrent_rows_are_refused(path: Path) -> None:
    state = recurrent_state(2)
    path.write_bytes(stock_file(TOKENS, state + state[-32:]))
    with pytest.raises(StateNotFramed):
        SlotFile.open(path)


@pytest.mark.parametrize("state", [b"", attention_state([0])], ids=["no bytes", "no cells"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_an_empty_slot_is_read(path: Path, state: bytes, packed: bool) -> None:
    path.write_bytes(stock_file([], state, packed=packed, checkpoints=[]))
    with SlotFile.open(path) as file:
        assert len(file.tokens) == 0
        assert bytes(file.read_target()[8:]) == state
        assert list(file.checkpoints()) == []
        assert file.sections[-1].length == EMPTY_APPENDIX_BYTES


def test_an_unknown_section_after_the_state_is_skipped_with_a_note(path: Path) -> None:
    path.write_bytes(stock_file(TOKENS, STATES["hybrid"], tail=b"DRFT\1\0\0\0" + bytes(100)))
    with SlotFile.open(path) as file:
        assert bytes(file.read_target()[8:]) == STATES["hybrid"]
        assert any("skipped 108 unknown bytes" in note and "DRFT" in note for note in file.notes)
        assert (file.dropped, file.draft()) == ([], None)


def test_an_unknown_section_after_the_checkpoints_is_skipped_with_a_note(path: Path) -> None:
    path.write_bytes(stock_file(TOKENS, STATES["hybrid"], checkpoints=[checkpoint(1)], tail=b"\xff" * 9))
    with SlotFile.open(path) as file:
        assert len(list(file.checkpoints())) == 1
        assert any("skipped 9 unknown bytes" in note for note in file.notes)
        assert file.dropped == []
