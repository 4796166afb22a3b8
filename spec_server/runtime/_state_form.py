"""The bytes of a sequence state: how many KV streams it names, and how to name one instead of many; pure.

A state is an 8-byte head (u32 io magic, i32 sequence id) and one or two parts. An attention part is
u32 n_streams, then for each stream a u32 cell count and, where that is not 0, the cells; all streams but the
sequence's own are empty. A recurrent part names no streams. See llama_kv_cache::state_write in llama.cpp.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from spec_server.runtime.errors import StateError

HEAD_BYTES = 8
WORD = 4
_ONE = struct.pack("<I", 1)
_U32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class StateForm:
    """What the states of one context consist of; True: an attention part, False: a recurrent one."""

    n_streams: int
    full: tuple[bool, ...]
    partial: tuple[bool, ...]
    is_windowed: bool
    cell_bytes: int  # of what an attention part says about one cell
    recurrent_bytes: int = 0  # of a recurrent part that holds a sequence

    @property
    def partial_is_less(self) -> bool:
        """Whether a partial state needs the rest of the sequence to be there."""
        return self.full != self.partial or not self.full


# Read and written as llama does it; only for one stream, and nothing behind the head can be checked.
UNKNOWN = StateForm(1, (), (), False, 0)


def form_of(
    full_bytes: int, partial: bytes, *, n_streams: int, is_windowed: bool, cell_bytes: int
) -> StateForm | None:
    """The form of a context's states, told from those of an empty sequence; None: one that we do not know."""
    attention = WORD + WORD * n_streams
    less = full_bytes - len(partial)
    body = len(partial) - HEAD_BYTES
    recurrent = _recurrent_bytes(partial)
    if less == 0 and body == attention:
        return StateForm(n_streams, (True,), (True,), is_windowed, cell_bytes)
    if less == attention and body == attention:
        return StateForm(n_streams, (True, True), (True,), True, cell_bytes)
    if recurrent is not None and less == attention and not is_windowed:
        return StateForm(n_streams, (True, False), (False,), False, cell_bytes, recurrent)
    if recurrent is not None and less == 0:
        return StateForm(n_streams, (False,), (False,), False, cell_bytes, recurrent)
    return None


def _recurrent_bytes(partial: bytes) -> int | None:
    """Length of a recurrent part that holds a sequence, from an empty one: cell, then the announced rows."""
    prefix = HEAD_BYTES + 3 * WORD  # cell count, transposed flag, layer count
    records = len(partial) - prefix
    if records <= 0 or records % 12 or partial[HEAD_BYTES : HEAD_BYTES + WORD] != b"\0" * WORD:
        return None
    rows = sum(struct.unpack_from("<q", partial, at + 4)[0] for at in range(prefix, len(partial), 12))
    return len(partial) - HEAD_BYTES + 2 * WORD + int(rows)


def to_one_stream(
    state: memoryview, seq_id: int, form: StateForm, *, partial: bool, partial_bytes: int
) -> memoryview:
    """Rewrite `state`, read from a context with `form`, in place; the slice that holds the one-stream form.

    `partial_bytes` is the length of the same sequence's partial state. The cells of the first part stay where
    they are; the head moves up to them, and a second part, which is small, moves down.
    """
    parts = form.partial if partial else form.full
    if form.n_streams == 1 or not parts[0]:
        return state
    split = len(state) if len(parts) == 1 else len(state) - (partial_bytes - HEAD_BYTES)
    before, after = WORD * seq_id, WORD * (form.n_streams - 1 - seq_id)
    _check_streams(state, HEAD_BYTES, split, before, after, form.n_streams)
    begin = before + HEAD_BYTES + WORD
    end = split - after
    head = bytes(state[:HEAD_BYTES])
    if len(parts) == 2:
        source = split
        if parts[1]:
            _check_streams(state, split, len(state), before, after, form.n_streams)
            state[end : end + WORD] = _ONE
            end += WORD
            source = split + WORD + before
        length = len(state) - source - (after if parts[1] else 0)
        state[end : end + length] = state[source : source + length]
        end += length
    state[begin - WORD : begin] = _ONE
    state[begin - WORD - HEAD_BYTES : begin - WORD] = head
    return state[begin - WORD - HEAD_BYTES : end]


def _check_streams(state: memoryview, at: int, end: int, before: int, after: int, n_streams: int) -> None:
    if (
        end - at < WORD + WORD * n_streams
        or _U32.unpack_from(state, at)[0] != n_streams
        or any(state[at + WORD : at + WORD + before])
        or any(state[end - after : end])
    ):
        raise StateError("llama wrote a state of another form than its empty one announced")


def check(state: memoryview, form: StateForm, magic: bytes, n_tokens: int, *, partial: bool) -> None:
    """StateError unless `state` is of this build, says one stream, and stands for tokens 0 .. n_tokens-1.

    llama takes any positions, and cells at some of them cannot even be removed again. Values are not
    looked at.
    """
    if len(state) < HEAD_BYTES + 2 * WORD:
        raise StateError(f"a state of {len(state)} bytes is too short")
    if state[:WORD] != magic[:WORD]:
        found, ours = bytes(state[:WORD]).hex(), magic[:WORD].hex()
        raise StateError(f"a state of another build: magic {found}, here {ours}")
    parts = form.partial if partial else form.full
    if not parts:
        return
    split = split_of(state, form, parts)
    for is_attention, at in zip(parts, (HEAD_BYTES, split), strict=False):
        if is_attention:
            is_whole = at == HEAD_BYTES and not (form.is_windowed and len(parts) == 1)
            _check_cells(state, at, form.cell_bytes, n_tokens, is_whole)
        elif state[at : at + 3 * WORD] != struct.pack("<IiI", 1, n_tokens - 1, 0):
            raise StateError(f"a recurrent state that does not stand at {n_tokens} tokens")


def _check_cells(state: memoryview, at: int, cell_bytes: int, n_tokens: int, is_whole: bool) -> None:
    n_streams, n_cells = struct.unpack_from("<2I", state, at)
    if n_streams != 1:
        raise StateError(f"a state with {n_streams} KV streams; here one is expected")
    at += 2 * WORD
    if n_cells == 0 or n_cells > n_tokens or (is_whole and n_cells < n_tokens):
        raise StateError(f"a state with {n_cells} cells for {n_tokens} tokens")
    if at + n_cells * cell_bytes > len(state):
        raise StateError("a state that ends inside its cells")
    cells = np.frombuffer(state, "<i4", n_cells * cell_bytes // WORD, at).reshape(n_cells, -1)
    expected = np.arange(n_tokens - n_cells, n_tokens)
    if not np.array_equal(cells[:, 0], expected) and not np.array_equal(np.sort(cells[:, 0]), expected):
        raise StateError(f"a state whose cells are not at the last positions of {n_tokens} tokens")


def split_of(state: memoryview, form: StateForm, parts: tuple[bool, ...]) -> int:
    """Where the second part begins; the end where there is none."""
    if len(parts) == 1:
        return len(state)
    split = _attention_end(state, form.cell_bytes) if parts[1] else len(state) - form.recurrent_bytes
    if not HEAD_BYTES + 2 * WORD <= split <= len(state) - 2 * WORD:
        raise StateError(f"a state of {len(state)} bytes is too short for its second part")
    return split


def to_n_streams(state: memoryview, form: StateForm, *, partial: bool, spare: int = 0) -> memoryview:
    """A checked one-stream state as a context with `form` reads it.

    The last `spare` bytes of `state` are no part of it: with enough of them it is rewritten in place, else copied.
    """
    parts = form.partial if partial else form.full
    whole, state = state, state[: len(state) - spare]
    if form.n_streams == 1 or not parts[0]:
        return state
    split = split_of(state, form, parts)
    streams, empty = _U32.pack(form.n_streams), b"\0" * (WORD * (form.n_streams - 1))
    second: list[bytes] = []
    if len(parts) == 2:  # small, so that moving it up is no matter
        second = [streams, bytes(state[split + WORD :]), empty] if parts[1] else [bytes(state[split:])]
    if sum(parts) * len(empty) > spare:
        first = (state[:HEAD_BYTES], streams, state[HEAD_BYTES + WORD : split])
        return memoryview(b"".join((*first, empty, *second)))
    whole[HEAD_BYTES : HEAD_BYTES + WORD] = streams
    at = split
    for piece in (empty, *second):
        whole[at : at + len(piece)] = piece
        at += len(piece)
    return whole[:at]


def _attention_end(state: memoryview, cell_bytes: int) -> int:
    """Where the one-stream attention part behind the head ends. StateError: past the end of `state`."""
    try:
        n_cells = _U32.unpack_from(state, HEAD_BYTES + WORD)[0]
        at = HEAD_BYTES + 2 * WORD + n_cells * cell_bytes
        transposed, n_layers = struct.unpack_from("<2I", state, at)
        at += 2 * WORD
        for _ in range(n_layers):
            at += 12 + n_cells * struct.unpack_from("<iQ", state, at)[1]
        for _ in range(n_layers):
            if transposed:
                _, element, width = struct.unpack_from("<iII", state, at)
                at += 12 + n_cells * element * width
            else:
                at += 12 + n_cells * struct.unpack_from("<iQ", state, at)[1]
    except (struct.error, OverflowError) as error:
        raise StateError("a state that ends inside its attention part") from error
    return int(at)
