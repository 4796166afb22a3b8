"""What the rest of the house may ask of a llama context; no ctypes here."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from spec_server.runtime.batch import Batch

Floats = npt.NDArray[np.float32]


class Context(Protocol):
    """A target or a draft context with sequences 0 .. n_seq_max-1. One thread only.

    Positions are token counts: token i of a sequence has position i, and a sequence is always a prefix.
    States are in the one-stream form whatever the number of KV streams is.
    """

    n_ctx: int  # cells over all sequences
    n_ctx_seq: int  # longest sequence
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    n_vocab: int
    n_embd: int
    needs_checkpoints: bool  # sliding-window or recurrent memory: truncate cannot reach everywhere
    can_rewind_draft: (
        bool  # a rewind inside the last decoded batch is sound (False: take a partial state first)
    )
    n_draft_max: int  # most tokens at the end of a decode that a rewind can take back
    decode_ns: int  # wall time spent inside llama_decode, always counted
    n_decodes: int

    def decode(self, batch: Batch) -> None:
        """Append the batch's tokens. ContextFull, BatchError: nothing was appended."""

    def logits(self, row: int, n_rows: int) -> Floats:
        """[n_rows, n_vocab] of output rows row .. row+n_rows-1 of the last decode; a view that dies with the next
        one, on memory that is llama's: nobody writes to it."""

    def hidden(self, row: int, n_rows: int) -> Floats:
        """[n_rows, n_embd] NextN rows by *batch* row (target) or *output* row (MTP context); a view."""

    def n_tokens(self, seq_id: int) -> int: ...

    def pos_range(self, seq_id: int) -> tuple[int, int]:
        """(pos_min, pos_max) as llama has them; (-1, -1) where empty."""

    def rewind_floor(self, seq_id: int) -> int:
        """The shortest non-empty prefix that truncate can reach soundly; n_tokens where it can reach none."""

    def prefix_floor(self, seq_id: int) -> int:
        """The rewind floor that a copy of the sequence by its state has too; never below rewind_floor."""

    def truncate(self, seq_id: int, n_tokens: int) -> None:
        """Keep the first n_tokens. 0 and the present length always work; RewindError below the floor."""

    def state_size(self, seq_id: int, *, partial: bool) -> int:
        """Bytes that read_state needs as its buffer (in streams a little more than it returns)."""

    def read_state(self, seq_id: int, out: memoryview, *, partial: bool) -> memoryview:
        """Serialise into `out` and return the slice of it that holds the state, 8-byte head included."""

    def check_state(self, state: memoryview, n_tokens: int, *, partial: bool) -> None:
        """StateError where the bytes cannot be a state of n_tokens tokens that this context wrote.

        For states from outside; every value is looked at. Touches nothing, and may be called on any thread.
        """

    def write_state(
        self, seq_id: int, state: memoryview, n_tokens: int, *, partial: bool, spare: int = 0
    ) -> None:
        """Replace the sequence by a state of n_tokens tokens. StateError: the sequence is empty then.

        The last `spare` bytes of `state` are no part of it, and all of it may be overwritten where there are any:
        8 for each sequence of the context save a copy.
        """

    def state_head(self) -> bytes:
        """The 8 bytes that a state of this build begins with (io magic, sequence id 0)."""

    def set_threads(self, n_threads: int) -> None:
        """From the next decode on, for prompts as well."""

    def close(self) -> None: ...
