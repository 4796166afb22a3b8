"""Finds where a llama sequence state ends, for files without a footer; looks at framing, never at values.

A state is one or two parts: an attention cache, a second one for sliding windows, or a recurrent memory. Each
part says how many cells and layers it has and how large a row is, so its end can be computed. Layout as of
llama.cpp's state_write functions (src/llama-kv-cache.cpp, src/llama-memory-recurrent.cpp).

Caches without stored values (MLA) are left out: with them, a state cut off
right after its keys would pass for one.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from persistence.errors import StateNotFramed, Truncated
from persistence.source import Source

MAX_STREAMS = 256
MAX_LAYERS = 1024
MAX_TYPE = 255
BLOCK_CELLS = 4096  # read at a time
CELL_EXTRA_WORDS = 3  # x, y and token of a cell with two-dimensional positions

_U32 = struct.Struct("<I")
_ROW = struct.Struct("<iQ")  # type, bytes of a row
_COLUMN = struct.Struct("<iII")  # type, bytes of an element, elements of a row

Border = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class _Reader:
    source: Source

    def numbers(self, form: struct.Struct, at: int) -> tuple[int, ...]:
        return form.unpack(self.source.read(at, form.size, "target"))

    def u32(self, at: int) -> int:
        return self.numbers(_U32, at)[0]

    def words(self, at: int, n: int) -> array[int]:
        words = array("I", self.source.read(at, 4 * n, "target"))
        if sys.byteorder == "big":
            words.byteswap()
        return words


class _NotThis(Exception):
    """The bytes are not of the part that is being tried."""


def state_end(source: Source, start: int, is_border: Border) -> int:
    """Where the state that begins at `start` ends; `is_border` tells whether a section begins at an offset.

    Raises StateNotFramed where no known memory kind ends at a border: the state is cut off, damaged in its
    framing, or of a kind that is not known here.
    """
    reader = _Reader(source)
    for end in _ends(reader, start, is_border, depth=3):
        return end
    raise StateNotFramed("there is no footer, and the target state ends at no known border", "target")


def _ends(reader: _Reader, start: int, is_border: Border, depth: int) -> Iterator[int]:
    after = {end for end in _attention_ends(reader, start)}
    for end in sorted(after):
        if is_border(end):
            yield end
    if depth:
        for end in sorted(after):
            yield from _ends(reader, end, is_border, depth - 1)
    try:
        end = _recurrent_end(reader, start, is_border)
    except (_NotThis, Truncated):
        return
    if is_border(end):
        yield end


def _attention_ends(reader: _Reader, start: int) -> Iterator[int]:
    # Whether cells have two-dimensional positions is not written down.
    for extra in (0, CELL_EXTRA_WORDS):
        try:
            yield _attention_end(reader, start, extra)
        except (_NotThis, Truncated):
            continue


def _attention_end(reader: _Reader, at: int, extra: int) -> int:
    n_streams = reader.u32(at)
    _require(1 <= n_streams <= MAX_STREAMS)
    at += 4
    for _ in range(n_streams):
        n_cells = reader.u32(at)
        at += 4
        if n_cells:
            at = _cells_end(reader, at, n_cells, extra)
            at = _layers_end(reader, at, n_cells)
    return at


def _cells_end(reader: _Reader, at: int, n_cells: int, extra: int) -> int:
    # A cell: position, number of sequences (1: one was asked for), the extra words, that sequence's id.
    stride = 3 + extra
    end = at + 4 * stride * n_cells
    _require(end <= reader.source.size)
    for first in range(0, n_cells, BLOCK_CELLS):
        n = min(BLOCK_CELLS, n_cells - first)
        words = reader.words(at + 4 * stride * first, n * stride)
        _require(words[1::stride].count(1) == n)
        _require(max(words[stride - 1 :: stride]) < MAX_STREAMS)
    return end


def _layers_end(reader: _Reader, at: int, n_cells: int) -> int:
    transposed, n_layers = reader.u32(at), reader.u32(at + 4)
    _require(transposed <= 1 and 1 <= n_layers <= MAX_LAYERS)
    at += 8
    for _ in range(n_layers):
        at = _rows_end(reader, at, n_cells)
    for _ in range(n_layers):
        if transposed:
            kind, element, width = reader.numbers(_COLUMN, at)
            _require(0 <= kind <= MAX_TYPE and element > 0 and width > 0)
            at += _COLUMN.size + n_cells * element * width
        else:
            at = _rows_end(reader, at, n_cells)
    return at


def _rows_end(reader: _Reader, at: int, n_cells: int) -> int:
    kind, row = reader.numbers(_ROW, at)
    _require(0 <= kind <= MAX_TYPE and row > 0)
    return at + _ROW.size + n_cells * row


def _recurrent_end(reader: _Reader, at: int, is_border: Border) -> int:
    n_cells = reader.u32(at)
    _require(n_cells <= MAX_STREAMS)
    words = reader.words(at + 4, 2 * n_cells)
    _require(words[1::2].count(0) == n_cells)
    at += 4 + 4 * len(words)
    _require(reader.u32(at) == 0)
    n_layers = reader.u32(at + 4)
    _require(1 <= n_layers <= MAX_LAYERS)
    at += 8
    rows: list[int] = []
    # Layers without a recurrent state are left out, so only the border tells how many there are.
    while len(rows) < 2 * n_layers and not is_border(at):
        kind, row = reader.numbers(_ROW, at)
        _require(0 <= kind <= MAX_TYPE)
        at += _ROW.size + n_cells * row
        rows.append(row)
    # First one kind of row for all those layers, then another; their sizes differ in every architecture, so a
    # state cut off between two rows shows.
    half = len(rows) // 2
    _require(len(rows) == 2 * half > 0)
    _require(rows == [rows[0]] * half + [rows[-1]] * half and rows[0] != rows[-1])
    return at


def _require(condition: bool) -> None:
    if not condition:
        raise _NotThis
