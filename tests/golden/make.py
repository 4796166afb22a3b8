"""Makes the golden files from the words of persistence/FORMAT.md, with none of the code that they check.

Run it from the checkout's root to add a file: `python tests/golden/make.py`. It never changes or removes one.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import xxhash

HERE = Path(__file__).parent

TOKENS = [1, 300, 70000]


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def i32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def blob(data: bytes) -> bytes:
    return u64(len(data)) + data


def head(words: Sequence[int], version: int = 3) -> bytes:
    return bytes.fromhex("71736767") + u32(version, len(words)) + i32(*words)


def packed(tokens: Sequence[int]) -> list[int]:
    return [-1, 1, len(tokens), *tokens, 0]


def attention(n_cells: int, streams: int = 1) -> bytes:
    """`n_cells` cells in the last of the streams, one layer, rows of 4 bytes."""
    out = u32(streams) + u32(*[0] * (streams - 1)) + u32(n_cells)
    for pos in range(n_cells):
        out += i32(pos) + u32(1) + i32(0)
    out += u32(0, 1)
    out += i32(1) + u64(4) + b"KKKK" * n_cells
    return out + i32(1) + u64(4) + b"VVVV" * n_cells


def recurrent(pos: int) -> bytes:
    """One cell, one of two layers stored."""
    out = u32(1) + i32(pos) + u32(0) + u32(0, 2)
    return out + i32(0) + u64(4) + b"RRRR" + i32(0) + u64(8) + b"SSSSSSSS"


def record(n_tokens: int, target: bytes, draft: bytes = b"", spec: bytes = b"") -> bytes:
    return struct.pack("<qii", n_tokens, 0, n_tokens - 1) + blob(target) + blob(draft) + blob(spec)


def appendix(records: Sequence[bytes], version: int = 1) -> bytes:
    return b"SCKP" + u32(version, len(records)) + b"".join(records)


def draft_block(fit: bytes = b'{"drafter":"draft-mtp"}', version: int = 1) -> bytes:
    return b"DKDB" + u32(version) + blob(fit) + blob(b"draft context") + blob(b"pending row")


FACTS = {
    "target": {"name": "target.gguf", "digest": "00112233445566778899aabbccddeeff"},
    "draft": {"name": "draft.gguf", "digest": "ffeeddccbbaa99887766554433221100"},
    "settings": {"type_k": "f16", "flash_attn": True, "rope_freq_base": 10000.0, "rope_scale": None},
    "n_tokens": 3,
    "writer": "draftkeep 0.1.0",
    "created": 1750000000.0,
    "extra": {},
}


def sealed(
    sections: Sequence[tuple[int, bytes]],
    records: Sequence[bytes] = (),
    *,
    facts: dict[str, object] = FACTS,
    version: int = 1,
    min_reader: int = 1,
) -> bytes:
    """The sections and a footer over them; `records` are those of the checkpoint section, kind 3."""
    table, rows, at = b"", b"", 0
    for kind, data in sections:
        # A checkpoint section's own hash covers its first 12 bytes; each record has a row of its own.
        covered = data[:12] if kind == 3 else data
        table += u32(kind, 0) + u64(at, len(data)) + xxhash.xxh3_128_digest(covered)
        if kind == 3:
            start = at + 12
            for one in records:
                rows += u64(start, len(one)) + xxhash.xxh3_128_digest(one)
                start += len(one)
        at += len(data)
    text = json.dumps(facts, separators=(",", ":")).encode()
    footer = b"DKFOOTER" + u32(version, min_reader, len(sections), len(records), len(text), 0)
    footer += table + rows + text
    footer += u64(len(footer) + 32)
    return b"".join(data for _, data in sections) + footer + xxhash.xxh3_128_digest(footer) + b"DKEEPEND"


RECORDS = [record(1, b"first", b"d", b"s"), record(3, b"second", b"", b"sp")]
TOKEN_PART = (1, head(packed(TOKENS)))
TARGET_PART = (2, attention(3))
CHECKPOINT_PART = (3, appendix(RECORDS))
DRAFT_PART = (4, draft_block())
EMPTY_FACTS = {**FACTS, "draft": None, "n_tokens": 0}
STOCK = head(packed(TOKENS)) + attention(3)

GOLDEN: dict[str, bytes] = {
    # Version 1, as written today.
    "v1-target": sealed([TOKEN_PART, TARGET_PART], facts={**FACTS, "draft": None}),
    "v1-checkpoints": sealed([TOKEN_PART, TARGET_PART, CHECKPOINT_PART], RECORDS),
    "v1-draft": sealed([TOKEN_PART, TARGET_PART, DRAFT_PART]),
    "v1-full": sealed([TOKEN_PART, TARGET_PART, CHECKPOINT_PART, DRAFT_PART], RECORDS),
    "v1-hybrid": sealed([TOKEN_PART, (2, attention(3) + recurrent(2)), CHECKPOINT_PART], RECORDS),
    "v1-empty": sealed([(1, head(packed([]))), (2, b"")], facts=EMPTY_FACTS),
    "v1-plain-tokens": sealed([(1, head(TOKENS)), TARGET_PART]),
    # What a later writer may do.
    "v1-unknown-section": sealed([TOKEN_PART, TARGET_PART, (77, b"from the future"), DRAFT_PART]),
    "v2-readable": sealed([TOKEN_PART, TARGET_PART], facts={**FACTS, "new": [1]}, version=2),
    "v2-unreadable": sealed([TOKEN_PART, TARGET_PART], version=2, min_reader=2),
    "v1-draft-block-2": sealed([TOKEN_PART, TARGET_PART, (4, draft_block(version=2))]),
    # Stock llama-server, and files of ours without a footer.
    "stock-packed": STOCK,
    "stock-plain": head(TOKENS) + attention(3),
    "stock-packed-sckp": STOCK + appendix(RECORDS),
    "stock-plain-sckp": head(TOKENS) + attention(3) + appendix(RECORDS),
    "stock-sckp-2": STOCK + appendix(RECORDS, version=2),
    "stock-streams": head(packed(TOKENS)) + attention(3, streams=4),
    "stock-window": STOCK + attention(2),
    "stock-hybrid": STOCK + recurrent(2),
    "stock-empty": head(packed([])) + u32(1, 0),
    "stock-unknown-section": STOCK + appendix(RECORDS) + b"DRFT" + u32(1) + blob(b"newer upstream"),
    "no-footer-draft": STOCK + appendix(RECORDS) + draft_block(),
    # Refused, each for one reason.
    "refused-ggsq-4": head(packed(TOKENS), version=4) + attention(3),
    "refused-packed-2": head([-1, 2, *packed(TOKENS)[2:]]) + attention(3),
    "refused-media": head([-1, 1, 3, 1, -1, -1, 1, 1, 4, 0]) + attention(3),
    "refused-gguf": b"GGUF" + u32(3) + bytes(24),
    "refused-cut": STOCK[:-1],
}


def main() -> int:
    changed = 0
    for name, data in GOLDEN.items():
        path = HERE / f"{name}.bin"
        if not path.exists():
            path.write_bytes(data)
            print(f"made {path.name}, {len(data)} bytes")
        elif path.read_bytes() != data:
            print(f"{path.name} differs from what this script makes; golden files do not change")
            changed += 1
    return min(changed, 1)


if __name__ == "__main__":
    sys.exit(main())
