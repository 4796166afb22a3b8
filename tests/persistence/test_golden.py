"""Files of every version and variant, stored in tests/golden, are read as was decided when they were made."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from persistence.errors import (
    NotASlotFile,
    SlotFileError,
    StateNotFramed,
    UnsupportedContent,
    UnsupportedVersion,
)
from persistence.reader import SlotFile
from persistence.snapshot import Checkpoint, DraftBlock, FileFacts, ModelIdentity, SequenceState
from persistence.store import DEFAULT_OWNER, DirectoryStore

GOLDEN = Path(__file__).parents[1] / "golden"

TARGET = ModelIdentity("target.gguf", "00112233445566778899aabbccddeeff")
DRAFT = ModelIdentity("draft.gguf", "ffeeddccbbaa99887766554433221100")
SETTINGS = {"type_k": "f16", "flash_attn": True, "rope_freq_base": 10000.0, "rope_scale": None}
TOKENS = [1, 300, 70000]
CHECKPOINTS = [(1, 0, 0, b"first", b"d", b"s"), (3, 0, 2, b"second", b"", b"sp")]
BLOCK = (b'{"drafter":"draft-mtp"}', b"draft context", b"pending row")

# Written out by hand: one stream, 3 cells (position, 1 sequence, id 0), rows, 1 layer, type 1, 4 bytes a row.
ATTENTION = (
    bytes.fromhex("01000000 03000000")
    + bytes.fromhex("00000000 01000000 00000000 01000000 01000000 00000000 02000000 01000000 00000000")
    + bytes.fromhex("00000000 01000000")
    + bytes.fromhex("01000000 0400000000000000")
    + b"KKKKKKKKKKKK"
    + bytes.fromhex("01000000 0400000000000000")
    + b"VVVVVVVVVVVV"
)


@dataclass(frozen=True)
class Expected:
    n_bytes: int
    verified: bool
    tokens: bool = True
    n_state: int = len(ATTENTION)
    checkpoints: bool = False
    draft: bool = False
    dropped: str = ""
    note: str = ""


READ = {
    "v1-target": Expected(537, True),
    "v1-checkpoints": Expected(809, True, checkpoints=True),
    "v1-draft": Expected(717, True, draft=True),
    "v1-full": Expected(928, True, checkpoints=True, draft=True),
    "v1-hybrid": Expected(865, True, n_state=156, checkpoints=True),
    "v1-empty": Expected(425, True, tokens=False, n_state=0),
    "v1-plain-tokens": Expected(582, True),
    "v1-unknown-section": Expected(772, True, draft=True, note="kind 77, 15 bytes"),
    "v2-readable": Expected(608, True),
    "v1-draft-block-2": Expected(717, True, dropped="draft 0 version"),
    "stock-packed": Expected(140, False),
    "stock-plain": Expected(124, False),
    "stock-packed-sckp": Expected(247, False, checkpoints=True),
    "stock-plain-sckp": Expected(231, False, checkpoints=True),
    "stock-sckp-2": Expected(247, False, dropped="checkpoints 0 version"),
    "stock-streams": Expected(152, False, n_state=112),
    "stock-window": Expected(220, False, n_state=180),
    "stock-hybrid": Expected(196, False, n_state=156),
    "stock-empty": Expected(36, False, tokens=False, n_state=8),
    "stock-unknown-section": Expected(277, False, checkpoints=True, note="skipped 30 unknown bytes"),
    "no-footer-draft": Expected(326, False, checkpoints=True, draft=True),
}

REFUSED: dict[str, tuple[type[SlotFileError], str]] = {
    "v2-unreadable": (UnsupportedVersion, "footer version 2 .* version 1"),
    "refused-ggsq-4": (UnsupportedVersion, "ggsq version 4 .* version 3"),
    "refused-packed-2": (UnsupportedVersion, "packed token list version 2 .* version 1"),
    "refused-media": (UnsupportedContent, "images or audio"),
    "refused-gguf": (NotASlotFile, "GGUF"),
    "refused-cut": (StateNotFramed, "cut off|no known border"),
}


@pytest.mark.golden
@pytest.mark.parametrize("name", READ)
def test_a_golden_file_is_read_as_decided(name: str) -> None:
    expected = READ[name]
    path = GOLDEN / f"{name}.bin"
    assert path.stat().st_size == expected.n_bytes
    with SlotFile.open(path) as file:
        assert file.checksum == ("verified" if expected.verified else "absent")
        assert list(file.tokens) == (TOKENS if expected.tokens else [])
        state = bytes(file.read_target()[8:])
        assert len(state) == expected.n_state
        if expected.tokens and "streams" not in name:
            assert state.startswith(ATTENTION)
        found = [
            (
                c.n_tokens,
                c.pos_min,
                c.pos_max,
                bytes(c.state.target),
                bytes(c.state.draft),
                bytes(c.state.spec),
            )
            for c in file.checkpoints()
        ]
        assert found == (CHECKPOINTS if expected.checkpoints else [])
        block = file.draft()
        got = None if block is None else (block.fit, bytes(block.context), bytes(block.spec))
        assert got == (BLOCK if expected.draft else None)
        assert [f"{d.section} {d.index} {d.reason}" for d in file.dropped] == (
            [expected.dropped] if expected.dropped else []
        )
        notes = [note for note in file.notes if "no footer" not in note]
        assert len(notes) == bool(expected.note)
        assert all(expected.note in note for note in notes)
        assert ("no footer" in "".join(file.notes)) == (not expected.verified)
        if expected.verified:
            draft = None if name in ("v1-target", "v1-empty") else DRAFT
            n_tokens = len(file.tokens)
            assert file.facts == FileFacts(TARGET, draft, SETTINGS, n_tokens, "draftkeep 0.1.0", 1750000000.0)
            assert file.verify() == []
        else:
            assert file.facts is None


@pytest.mark.golden
@pytest.mark.parametrize("name", REFUSED)
def test_a_golden_file_is_refused_as_decided(name: str) -> None:
    error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        SlotFile.open(GOLDEN / f"{name}.bin")


def load_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.golden
def test_every_golden_file_is_there_has_a_test_and_is_what_the_script_makes() -> None:
    stored = {path.stem: path.read_bytes() for path in GOLDEN.glob("*.bin")}
    assert set(stored) == READ.keys() | REFUSED.keys()
    assert stored == load_maker().GOLDEN


@pytest.mark.golden
def test_todays_writer_writes_the_golden_bytes(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    with store.create(DEFAULT_OWNER, "full.bin") as writer:
        writer.payload(TOKENS, bytes(8) + ATTENTION)
        writer.checkpoints(
            2, (Checkpoint(n, low, high, SequenceState(*blobs)) for n, low, high, *blobs in CHECKPOINTS)
        )
        block = DraftBlock(*BLOCK)
        writer.draft(block.fit, block.context, block.spec)
        writer.commit(FileFacts(TARGET, DRAFT, SETTINGS, 3, "draftkeep 0.1.0", 1750000000.0))
    assert (tmp_path / "full.bin").read_bytes() == (GOLDEN / "v1-full.bin").read_bytes()
