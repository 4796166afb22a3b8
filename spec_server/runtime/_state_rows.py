"""What lies in the rows of a state that came from outside: types, lengths, and values that are numbers; pure.

llama refuses rows of another type or size, but only after it has emptied the sequence. It takes any values, and one
that is not finite outlives its sequence: cells that are masked or cleared are still multiplied by 0, so that a slot
that is filled later, or a neighbour, answers with nothing but NaN. The scan costs about as much as the checksum
does; states that this process made itself need none.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from spec_server.runtime._state_form import HEAD_BYTES, WORD, StateForm, split_of
from spec_server.runtime.errors import StateError

_ROW = struct.Struct("<iQ")  # type, bytes of a row
_COLUMN = struct.Struct("<iII")  # type, bytes of an element, elements of a row
_SCAN = 1 << 18  # bytes looked at twice while they are in the processor's cache


@dataclass(frozen=True, slots=True)
class _Floats:
    """Where a ggml type holds floats: in each block of block_bytes, the first n_floats of float_bytes each."""

    float_bytes: int
    exponent: int  # all its bits set: not finite
    block_bytes: int
    n_floats: int = 1


# ggml's type numbers; a type that is not here holds integers only, or is not one of a cache.
_FLOATS = {
    0: _Floats(4, 0x7F800000, 4),
    1: _Floats(2, 0x7C00, 2),
    30: _Floats(2, 0x7F80, 2),  # bf16
    2: _Floats(2, 0x7C00, 18),  # q4_0
    3: _Floats(2, 0x7C00, 20, 2),  # q4_1
    6: _Floats(2, 0x7C00, 22),  # q5_0
    7: _Floats(2, 0x7C00, 24, 2),  # q5_1
    8: _Floats(2, 0x7C00, 34),  # q8_0
    20: _Floats(2, 0x7C00, 18),  # iq4_nl
}


def check_rows(
    state: memoryview, form: StateForm, type_k: int, type_v: int, recurrent_head: bytes, *, partial: bool
) -> None:
    """StateError unless the rows fill the state, are of these types, and hold numbers.

    The state has passed `_state_form.check`. `recurrent_head` is what a recurrent part of this context says about
    its rows while it is empty, from the transposed flag on.
    """
    parts = form.partial if partial else form.full
    if not parts:
        return
    split = split_of(state, form, parts)
    borders = (HEAD_BYTES, split, len(state))
    for is_attention, start, end in zip(parts, borders, borders[1:], strict=False):
        try:
            if is_attention:
                at = _attention_rows(state, start, end, form.cell_bytes, type_k, type_v)
            else:
                at = _recurrent_rows(state, start, recurrent_head)
        except struct.error as error:
            raise StateError("a state that ends inside its rows") from error
        if at != end:
            raise StateError("a state whose rows do not fill it")


def _attention_rows(state: memoryview, at: int, end: int, cell_bytes: int, type_k: int, type_v: int) -> int:
    (n_cells,) = struct.unpack_from("<I", state, at + WORD)
    at += 2 * WORD + n_cells * cell_bytes
    transposed, n_layers = struct.unpack_from("<2I", state, at)
    at += 2 * WORD
    for wanted, is_transposed in ((type_k, False), (type_v, transposed)):
        # caches of models with latent attention keep no values
        for _ in range(n_layers if at < end else 0):
            if is_transposed:
                kind, element, width = _COLUMN.unpack_from(state, at)
                length = n_cells * element * width
            else:
                kind, row = _ROW.unpack_from(state, at)
                length = n_cells * row
            if kind != wanted:
                raise StateError(f"a state with a cache of type {kind}; here it is {wanted}")
            at += _ROW.size
            if length > end - at:
                raise StateError("a state that ends inside its rows")
            _check_finite(state[at : at + length], kind)
            at += length
    return at


def _recurrent_rows(state: memoryview, at: int, head: bytes) -> int:
    at += 3 * WORD  # cell count, position, number of sequences
    if state[at : at + 2 * WORD] != head[: 2 * WORD]:
        raise StateError("a recurrent state with other layers than here")
    at += 2 * WORD
    for first in range(2 * WORD, len(head), _ROW.size):
        if state[at : at + _ROW.size] != head[first : first + _ROW.size]:
            raise StateError("a recurrent state with rows of another type or size than here")
        kind, row = _ROW.unpack_from(state, at)
        at += _ROW.size
        _check_finite(state[at : at + row], kind)
        at += row
    return at


def _check_finite(rows: memoryview, kind: int) -> None:
    floats = _FLOATS.get(kind)
    if floats is None or len(rows) % floats.block_bytes:
        return
    n = len(rows) // floats.block_bytes
    width = floats.block_bytes // floats.float_bytes
    unsigned = np.frombuffer(rows, f"<u{floats.float_bytes}").reshape(n, width)
    if width > 1:
        unsigned = unsigned[:, : floats.n_floats]
    sign = 1 << (8 * floats.float_bytes - 1)
    step = max(1, _SCAN // floats.block_bytes)
    for first in range(0, n, step):
        block = unsigned[first : first + step]
        # The positive ones are the largest of all as signed numbers, the negative ones as unsigned.
        if (
            block.view(f"<i{floats.float_bytes}").max() >= floats.exponent
            or block.max() >= sign | floats.exponent
        ):
            raise StateError("a state with values that are not finite numbers")
