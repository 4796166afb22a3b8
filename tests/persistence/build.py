"""Slot files and their parts for tests, built from the written specification."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from persistence.snapshot import Checkpoint, DraftBlock, FileFacts, ModelIdentity, SequenceState
from persistence.store import DEFAULT_OWNER, DirectoryStore
from persistence.writer import Saved

STATE_HEAD = b"\xd8\x3c\x14\xaf\x00\x00\x00\x00"


def facts(n_tokens: int, **settings: str) -> FileFacts:
    return FileFacts(
        target=ModelIdentity("target.gguf", "00112233445566778899aabbccddeeff"),
        draft=ModelIdentity("draft.gguf", "ffeeddccbbaa99887766554433221100"),
        settings={"type_k": "f16", "flash_attn": True, "rope_freq_base": 10000.0, **settings},
        n_tokens=n_tokens,
        writer="draftkeep 0.1.0",
        created=1750000000.0,
    )


def attention_state(
    n_cells: Sequence[int],
    *,
    transposed: bool = False,
    n_layers: int = 2,
    extra: int = 0,
    values: bool = True,
) -> bytes:
    """An attention cache with `n_cells[i]` cells in stream i, without the 8-byte head."""
    out = struct.pack("<I", len(n_cells))
    for n in n_cells:
        out += struct.pack("<I", n)
        if n == 0:
            continue
        for pos in range(n):
            out += struct.pack("<iI", pos, 1) + b"\x07\0\0\0" * extra + struct.pack("<i", 0)
        out += struct.pack("<II", transposed, n_layers)
        for layer in range(n_layers):
            out += struct.pack("<iQ", 1, 6) + bytes([layer + 1]) * (6 * n)
        for layer in range(n_layers if values else 0):
            if transposed:
                out += struct.pack("<iII", 1, 2, 3) + bytes([layer + 65]) * (2 * 3 * n)
            else:
                out += struct.pack("<iQ", 1, 6) + bytes([layer + 65]) * (6 * n)
    return out


def recurrent_state(pos: int, n_layers: int = 3, n_stored: int = 2) -> bytes:
    """A recurrent memory of one cell, `n_stored` of the layers having one."""
    out = struct.pack("<IiIII", 1, pos, 0, 0, n_layers)
    for row in (8, 20):
        for layer in range(n_stored):
            out += struct.pack("<iQ", 0, row) + bytes([layer + 130]) * row
    return out


def packed_words(tokens: Sequence[int]) -> list[int]:
    return [-1, 1, len(tokens), *tokens, 0]


def stock_file(
    tokens: Sequence[int],
    state: bytes,
    *,
    packed: bool = True,
    checkpoints: Sequence[Checkpoint] | None = None,
    tail: bytes = b"",
) -> bytes:
    """What a stock llama-server writes: `state` without its 8-byte head; no footer."""
    words = packed_words(tokens) if packed else list(tokens)
    out = b"\x71\x73\x67\x67" + struct.pack(f"<II{len(words)}i", 3, len(words), *words) + state
    if checkpoints is not None:
        out += b"\x53\x43\x4b\x50" + struct.pack("<II", 1, len(checkpoints))
        for c in checkpoints:
            out += struct.pack("<qii", c.n_tokens, c.pos_min, c.pos_max)
            for blob in (c.state.target, c.state.draft, c.state.spec):
                out += struct.pack("<Q", len(blob)) + bytes(blob)
    return out + tail


def draft_bytes(fit: bytes, context: bytes, spec: bytes, version: int = 1) -> bytes:
    out = b"DKDB" + struct.pack("<I", version)
    for blob in (fit, context, spec):
        out += struct.pack("<Q", len(blob)) + blob
    return out


def checkpoint(n_tokens: int, target: bytes = b"t", draft: bytes = b"", spec: bytes = b"") -> Checkpoint:
    return Checkpoint(n_tokens, 0, n_tokens - 1, SequenceState(target, draft, spec))


def save(
    store: DirectoryStore,
    name: str,
    tokens: Sequence[int] = (1, 2, 3),
    state: bytes = STATE_HEAD + b"state",
    checkpoints: Sequence[Checkpoint] = (),
    draft: DraftBlock | None = None,
    owner: str = DEFAULT_OWNER,
    file_facts: FileFacts | None = None,
) -> Saved:
    with store.create(owner, name) as writer:
        writer.payload(tokens, state)
        writer.checkpoints(len(checkpoints), checkpoints)
        if draft is not None:
            writer.draft(draft.fit, draft.context, draft.spec)
        return writer.commit(file_facts or facts(len(tokens)))


FULL_TOKENS = (5, 300, 70000, 8)
FULL_CHECKPOINTS = (checkpoint(1, b"first", b"d", b"s"), checkpoint(3, b"second" * 4, b"", b"sp"))
FULL_DRAFT = DraftBlock(b'{"drafter":"draft-mtp"}', b"draft context", b"pending row")


def full_file(directory: Path, state: bytes | None = None) -> Path:
    """A small file with every section, written by the code under test."""
    state = attention_state([4]) if state is None else state
    store = DirectoryStore(directory)
    save(store, "full.bin", FULL_TOKENS, STATE_HEAD + state, FULL_CHECKPOINTS, FULL_DRAFT)
    return directory / "full.bin"


def same(found: Checkpoint, expected: Checkpoint) -> bool:
    return (found.n_tokens, found.pos_min, found.pos_max) == (
        expected.n_tokens,
        expected.pos_min,
        expected.pos_max,
    ) and all(
        bytes(a) == bytes(b)
        for a, b in (
            (found.state.target, expected.state.target),
            (found.state.draft, expected.state.draft),
            (found.state.spec, expected.state.spec),
        )
    )


blobs = st.binary(max_size=40)
token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=20)
states = st.one_of(st.just(b""), st.binary(max_size=60).map(lambda body: STATE_HEAD + body))
drafts = st.none() | st.builds(DraftBlock, fit=blobs, context=blobs, spec=blobs)
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=10)


@st.composite
def checkpoint_lists(draw: st.DrawFn, n_tokens: int) -> list[Checkpoint]:
    ends = sorted(draw(st.sets(st.integers(0, n_tokens), max_size=4)))
    return [
        Checkpoint(
            n, draw(st.integers(-(2**31), 2**31 - 1)), n, SequenceState(*(draw(blobs) for _ in range(3)))
        )
        for n in ends
    ]
