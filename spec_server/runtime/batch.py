"""Batch: what one decode appends, as numpy views on the C arrays; knows no model."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from spec_server.runtime._native import lib
from spec_server.runtime.errors import BatchError

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Output = Literal["none", "last", "all"]


@dataclass(slots=True)  # not frozen: one is made for each slot and step, and that costs three times as much
class Part:
    """One sequence's share of a batch; never changed once it is made.

    Batch rows start .. start+n_tokens-1 hold tokens at positions pos0 .. pos0+n_tokens-1; the last n_draft of
    them are drafted. Output rows out_start .. out_start+n_out-1 are this part's, in the same order.
    """

    seq_id: int
    start: int
    n_tokens: int
    pos0: int
    n_draft: int
    out_start: int
    n_out: int


class Batch:
    """Room for `capacity` tokens; with n_embd > 0 each row also carries a hidden row (an MTP head's input).

    The arrays are numpy's own and the C struct points at them, so there is nothing to free by hand.
    Only `add` and `clear` may move n_tokens and parts; the views are for reading and for filling `embd`.
    """

    def __init__(self, capacity: int, n_embd: int = 0) -> None:
        if capacity < 1:
            raise BatchError(f"a batch needs room for at least one token, not {capacity}")
        self.capacity = capacity
        self.n_embd = n_embd
        self.n_tokens = 0
        self.n_outputs = 0
        self.max_token = 0  # so that a decode need not look at each against its vocabulary
        self.parts: list[Part] = []
        self.tokens: Ints = np.zeros(capacity, np.int32)  # [capacity], as the three below
        self.pos: Ints = np.zeros(capacity, np.int32)
        self.seq_id: Ints = np.zeros(capacity, np.int32)
        self.logits: npt.NDArray[np.int8] = np.zeros(capacity, np.int8)
        self.embd: Floats = np.zeros((capacity, n_embd), np.float32)  # [capacity, n_embd]
        self._iota: Ints = np.arange(capacity, dtype=np.int32)
        self._ones: Ints = np.ones(capacity, np.int32)
        self._pointers = self.seq_id.ctypes.data + 4 * np.arange(capacity, dtype=np.uint64)
        self._c = self._make_struct()

    def _make_struct(self) -> Any:
        fields = dict(lib.llama_batch._fields_)
        arrays: dict[str, npt.NDArray[Any]] = {
            "token": self.tokens,
            "pos": self.pos,
            "n_seq_id": self._ones,
            "seq_id": self._pointers,
            "logits": self.logits,
        }
        if self.n_embd:
            arrays["embd"] = self.embd
        c = lib.llama_batch()
        for name, array in arrays.items():
            setattr(c, name, ctypes.cast(array.ctypes.data, fields[name]))
        return c

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self.capacity - self.n_tokens

    def clear(self) -> None:
        """Empty it. The parts handed out before stay as they are."""
        self.n_tokens = 0
        self.n_outputs = 0
        self.max_token = 0
        self.parts = []

    def add(
        self,
        seq_id: int,
        tokens: Sequence[int] | npt.NDArray[Any],
        pos0: int,
        *,
        output: Output = "last",
        n_draft: int = 0,
    ) -> Part:
        """Append tokens [n] of one sequence at positions pos0 .. pos0+n-1.

        BatchError: no tokens, no room, more drafted than given, or a number that is no token; unchanged then.
        """
        n = len(tokens)
        start = self.n_tokens
        end = start + n
        if not 0 < n <= self.capacity - start:
            raise BatchError(f"{n} tokens for a batch with room for {self.capacity - start}")
        if not 0 <= n_draft <= n or pos0 < 0 or seq_id < 0:
            raise BatchError(
                f"sequence {seq_id}, position {pos0}, {n_draft} of {n} tokens drafted: out of range"
            )
        try:
            if n == 1:  # an element costs a third of a slice
                self.tokens[start] = tokens[0]
                largest = int(tokens[0]) & 0xFFFFFFFF  # unsigned: a negative id is above every vocabulary too
            else:
                self.tokens[start:end] = tokens
                largest = int(self.tokens[start:end].view(np.uint32).max())
        except (OverflowError, ValueError, TypeError) as error:
            raise BatchError(f"not token ids: {error}") from error
        self.max_token = max(self.max_token, largest)
        n_out = n if output == "all" else 1 if output == "last" else 0
        if n == 1:
            self.pos[start] = pos0
            self.seq_id[start] = seq_id
        else:
            np.add(self._iota[:n], pos0, out=self.pos[start:end])
            self.seq_id[start:end] = seq_id
            self.logits[start:end] = n_out == n
        self.logits[end - 1] = n_out > 0
        part = Part(seq_id, start, n, pos0, n_draft, self.n_outputs, n_out)
        self.parts.append(part)
        self.n_tokens = end
        self.n_outputs += n_out
        return part

    def close(self) -> None:
        """Give the arrays back; the batch is of no use afterwards. May be called twice."""
        self.clear()
        self.capacity = 0
        self._c = None
