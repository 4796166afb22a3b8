"""The n-grams of all slots' texts in one hashed table of fixed size; knows neither slots' texts nor drafts.

A slot looks into a view of it that stands still, so that what other slots do in the meantime does not move its
drafts, and so that a stored view makes the same drafts again in another process.
"""

from __future__ import annotations

import struct
from array import array

import numpy as np
import numpy.typing as npt

from draft.text_index import KEY_BITS

_HEAD = struct.Struct("<II")  # entries, bits of the table
_TAG_SHIFT = KEY_BITS - 32
_SLOT_MASK = 0xFF << 24
_TOKEN_MASK = (1 << 24) - 1
_TAG = ~np.uint64(_SLOT_MASK)
MAX_SLOTS = 256

Entries = npt.NDArray[
    np.uint64
]  # [2 ** bits]: 32 bits of the key, 8 of the slot, 24 of the token + 1; 0: empty


class PoolView:
    """What a slot sees of the pool; it never changes."""

    __slots__ = ("_entries", "_mask", "n_entries")

    def __init__(self, entries: Entries | None) -> None:
        self._entries = entries
        self._mask = 0 if entries is None else len(entries) - 1
        self.n_entries = 0 if entries is None else int(np.count_nonzero(entries))

    def follower(self, key: int) -> int:
        """The token that followed the n-gram, -1: not known."""
        if self._entries is None:
            return -1
        entry = int(self._entries[key & self._mask])
        return (entry & _TOKEN_MASK) - 1 if entry >> 32 == key >> _TAG_SHIFT else -1

    def pack(self) -> bytes:
        if self._entries is None:
            return _HEAD.pack(0, 0)
        at = np.flatnonzero(self._entries)
        head = _HEAD.pack(len(at), len(self._entries).bit_length() - 1)
        return head + at.astype("<u4").tobytes() + (self._entries[at] & _TAG).astype("<u8").tobytes()

    @property
    def packed_size(self) -> int:
        return packed_size(self.n_entries)


NOTHING = PoolView(None)


def packed_size(n_entries: int) -> int:
    return _HEAD.size + 12 * n_entries


def unpack(data: bytes | bytearray | memoryview, bits: int, n_vocab: int) -> PoolView:
    """ValueError where the bytes are no view of a pool of that size, or name a token that there is none of."""
    if len(data) < _HEAD.size:
        raise ValueError(f"a view of the pool has at least {_HEAD.size} bytes, not {len(data)}")
    n, stored_bits = _HEAD.unpack_from(data)
    if len(data) != packed_size(n):
        raise ValueError(f"{len(data)} bytes for {n} entries of the pool")
    if n == 0:
        return NOTHING
    at = np.frombuffer(data, "<u4", n, _HEAD.size)
    stored = np.frombuffer(data, "<u8", n, _HEAD.size + 4 * n)
    tokens = stored & np.uint64(_TOKEN_MASK)
    if (
        stored_bits != bits
        or int(at.max()) >> bits
        or not 1 <= int(tokens.min()) <= int(tokens.max()) <= n_vocab
    ):
        raise ValueError("the view is of a pool of another size, or holds tokens that are none")
    entries = np.zeros(1 << bits, np.uint64)
    entries[at] = stored
    return PoolView(entries)


class NgramPool:
    """Direct-mapped: 2 ** bits n-grams at most, a newer one takes the place of an older one."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self._mask = (1 << bits) - 1
        self._entries = array("Q", bytes(8 << bits))

    def put(self, key: int, token: int, slot: int) -> None:
        """`token` followed the n-gram of `key` in the text of `slot`."""
        self._entries[key & self._mask] = (key >> _TAG_SHIFT) << 32 | slot << 24 | token + 1

    def view_for(self, slot: int) -> PoolView:
        """The pool as it is now, without what `slot` itself put in: its own text has an index of its own."""
        entries = np.frombuffer(self._entries, np.uint64)
        others = (entries != 0) & ((entries >> np.uint64(24)) & np.uint64(0xFF) != slot)
        return PoolView(np.where(others, entries, np.uint64(0))) if others.any() else NOTHING
