"""The llama.cpp implementation of Context; the only place with a native context's pointers.

Everything that makes llama abort is checked here first, and everything that it gets wrong in silence
(rewinds that say True and are not sound) is known here and nowhere else.
"""

from __future__ import annotations

import ctypes
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from spec_server.runtime import _calls, _native, _state_form, _state_rows, logs
from spec_server.runtime._context_params import CACHE_TYPES, RopeSettings, context_params
from spec_server.runtime._native import address_of, ext, lib
from spec_server.runtime.batch import Batch, Output, Part
from spec_server.runtime.errors import (
    BatchError,
    ContextFull,
    LlamaError,
    ModelError,
    RewindError,
    StateError,
)
from spec_server.runtime.model import Model

__all__ = ["LlamaContext", "RopeSettings"]

Floats = npt.NDArray[np.float32]

PARTIAL_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class LlamaContext:
    """A Context (see context.py) on `model`, which it keeps alive until it is closed.

    n_ctx counts cells over all sequences (0: what the model was trained with), n_batch and n_ubatch tokens.
    n_rs_seq is how many tokens recurrent memory can take back after a decode; other memory ignores it.
    `expose_hidden` makes a target give its hidden rows; `mtp` makes this the context of the model's MTP head.
    ModelError: a combination that llama refuses or would abort on.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 0,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        n_threads: int = 1,
        n_threads_batch: int | None = None,
        kv_unified: bool = False,
        flash_attn: str = "auto",
        type_k: str = "f16",
        type_v: str = "f16",
        offload_kqv: bool = True,
        op_offload: bool = True,
        swa_full: bool = False,
        n_rs_seq: int = 0,
        n_outputs_max: int = 0,
        rope: RopeSettings | None = None,
        expose_hidden: bool = False,
        mtp: bool = False,
    ) -> None:
        self._ctx: Any = None
        self._model = model
        self.type_k, self.type_v, self.flash_attn = type_k, type_v, flash_attn
        self.v_transposed = flash_attn == "off"  # the layout of values in the cache and so in a state
        self.swa_full = swa_full
        self.is_mtp = mtp
        params = context_params(
            model,
            rope or RopeSettings(),
            mtp,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_seq_max=n_seq_max,
            n_threads=n_threads,
            n_threads_batch=n_threads_batch or n_threads,
            kv_unified=kv_unified,
            flash_attn=flash_attn,
            type_k=type_k,
            type_v=type_v,
            offload_kqv=offload_kqv,
            op_offload=op_offload,
            swa_full=swa_full,
            n_rs_seq=n_rs_seq,
            n_outputs_max=n_outputs_max,
        )
        self._open(params)
        self.n_outputs_max: int = params.n_outputs_max or self.n_batch
        if mtp or expose_hidden:
            # masked: a row per output (the MTP context); unmasked: a row per batch token (its target)
            ext.llama_set_embeddings_nextn(self._ctx, True, mtp)
        self._has_hidden = mtp or expose_hidden
        self._study_memory(kv_unified)

    def _open(self, params: Any) -> None:
        native = self._model._acquire()
        logs.joiner.take_errors()
        self._ctx = lib.llama_init_from_model(native, params)
        if not self._ctx:
            self._model._release()
            raise ModelError(f"llama refuses the context: {logs.joiner.take_errors() or 'no reason given'}")
        self._memory: Any = lib.llama_get_memory(self._ctx)
        self.n_ctx: int = lib.llama_n_ctx(self._ctx)
        self.n_ctx_seq: int = lib.llama_n_ctx_seq(self._ctx)
        self.n_batch: int = lib.llama_n_batch(self._ctx)
        self.n_ubatch: int = lib.llama_n_ubatch(self._ctx)
        self.n_seq_max: int = lib.llama_n_seq_max(self._ctx)
        self.n_rs_seq: int = lib.llama_n_rs_seq(self._ctx)
        self.n_vocab: int = self._model.n_vocab
        self.n_embd: int = self._model.n_embd_out
        self.decode_ns = 0
        self.n_decodes = 0
        self._counts = [0] * self.n_seq_max
        self._back = [0] * self.n_seq_max  # tokens that recurrent memory can take back now
        self._n_outputs = self._n_rows = 0  # of the last decode
        self._call_batch: Batch | None = None
        self._logits = self._logits_view = self._hidden = np.zeros((0, 0), np.float32)
        self._logits_at = 0  # address of the last decode's rows; -1: gathered from several
        self._hidden_at = 0  # the same of hidden rows, once they were asked for
        self._logits_shown = (0, 0)  # address and rows that _logits_view was made for
        # Rows of that view: right after a decode all is cold, and to make a view takes as long as to search a row.
        self._single_rows: dict[int, Floats] = {}

    def _study_memory(self, kv_unified: bool) -> None:
        self._unified = kv_unified
        n_streams = 1 if kv_unified else self.n_seq_max
        self._head = b""
        partial = bytes(self._read_native(0, PARTIAL_ONLY))
        self._head = partial[: _state_form.HEAD_BYTES]
        self._recurrent_head = partial[_state_form.HEAD_BYTES + _state_form.WORD :]
        self._n_swa = 0 if self.swa_full else self._model.n_swa
        form = _state_form.form_of(
            _native.state_size(self._ctx, 0, 0),
            partial,
            n_streams=n_streams,
            is_windowed=self._n_swa > 0,
            cell_bytes=24 if self._model.has_cell_ext else 12,
        )
        if form is None and n_streams > 1:
            self.close()
            raise ModelError(
                f"{self._model.arch} models need kv_unified: how their states name streams is not known"
            )
        self._form = form or _state_form.UNKNOWN
        self._is_recurrent = self._model.is_recurrent or self._model.is_hybrid
        if form is not None:  # the model's MTP head may have other memory than its trunk
            self._is_recurrent = not all(form.full)
        self._snapshots = self._is_recurrent and self.n_rs_seq > 0
        windows = self._form.partial_is_less and 0 < self._n_swa < self.n_ctx_seq
        self._fragile = self._snapshots or (windows and kv_unified and self.n_seq_max > 1)
        self.needs_checkpoints = self._is_recurrent or windows
        self.n_draft_max = self.n_rs_seq if self._is_recurrent and self.n_rs_seq else self.n_batch - 1
        self.can_rewind_draft = not self._is_recurrent or self._snapshots

    # -- decode

    def decode(self, batch: Batch) -> None:
        n_tokens = batch.n_tokens
        if n_tokens == 0:
            raise BatchError("an empty batch")
        if n_tokens > self.n_batch:
            raise BatchError(f"{n_tokens} tokens in a batch, more than n_batch {self.n_batch}")
        if batch.n_outputs > self.n_outputs_max:
            raise BatchError(f"{batch.n_outputs} output rows, more than {self.n_outputs_max}")
        if batch.n_embd != (self.n_embd if self.is_mtp else 0):
            raise BatchError(f"a batch with hidden rows of {batch.n_embd}, here {self.n_embd * self.is_mtp}")
        if batch.max_token >= self.n_vocab:
            raise BatchError(f"a token id outside 0..{self.n_vocab - 1}")
        ends = self._ends(batch.parts)
        self._n_outputs = self._n_rows = self._logits_at = self._hidden_at = 0
        calls = self._plan(batch.parts) if self._fragile else None
        if calls is not None:
            self._decode_in_calls(batch, calls)
        else:
            code = self._call(batch)
            if code != 0:
                self._fail(code, batch, appended=False)
            if self._snapshots:
                # of the last decode only: a later one may move the rows that they lie in
                self._back = [0] * self.n_seq_max
                for part in batch.parts:
                    self._back[part.seq_id] = min(self.n_rs_seq, part.n_tokens - 1)
        self._n_outputs = batch.n_outputs
        self._n_rows = batch.n_outputs if self.is_mtp else n_tokens
        counts = self._counts
        for seq_id, end in ends.items():
            counts[seq_id] = end

    def _plan(self, parts: list[Part]) -> _calls.Calls | None:
        if self._snapshots:
            return _calls.for_snapshots(parts, self.n_ubatch, self._unified)
        return _calls.for_window(parts, self.n_ubatch)

    def _call(self, batch: Batch) -> int:
        """One timed llama_decode; its return code."""
        c = batch._c
        c.n_tokens = batch.n_tokens
        begin = perf_counter_ns()
        code: int = _native.decode(self._ctx, c)
        self._logits_at = _native.get_logits(self._ctx) or 0  # waits for the device, too
        self.decode_ns += perf_counter_ns() - begin
        self.n_decodes += 1
        return code

    def _decode_in_calls(self, batch: Batch, calls: _calls.Calls) -> None:
        """Several calls for one batch (see _calls), their rows gathered in batch order."""
        self._back = [0] * self.n_seq_max
        logits = np.empty((batch.n_outputs, self.n_vocab), np.float32)
        hidden = np.empty((batch.n_tokens, self.n_embd if self._has_hidden else 0), np.float32)
        call_batch = self._call_batch = self._call_batch or Batch(self.n_batch)
        appended = False
        for parts in calls:
            call_batch.clear()
            for part in parts:
                tokens = batch.tokens[part.start : part.start + part.n_tokens]
                output: Output = "none" if part.n_out == 0 else "last" if part.n_out == 1 else "all"
                call_batch.add(part.seq_id, tokens, part.pos0, output=output)
            code = self._call(call_batch)
            if code != 0:
                self._fail(code, batch, appended)
            appended = True
            self._n_outputs, self._n_rows = call_batch.n_outputs, call_batch.n_tokens
            self._hidden_at = 0
            for part, called in zip(parts, call_batch.parts, strict=True):
                if part.n_out:
                    rows = self.logits(called.out_start, part.n_out)
                    logits[part.out_start : part.out_start + part.n_out] = rows
                if self._has_hidden:
                    rows = self.hidden(called.start, part.n_tokens)
                    hidden[part.start : part.start + part.n_tokens] = rows
                self._back[part.seq_id] = min(self.n_rs_seq, part.n_draft, part.n_tokens - 1)
        self._logits, self._hidden = logits, hidden
        self._logits_at = self._hidden_at = -1

    def _ends(self, parts: list[Part]) -> dict[int, int]:
        """How long each sequence of the batch will be."""
        ends: dict[int, int] = {}
        counts = self._counts
        for part in parts:
            seq_id = part.seq_id
            if seq_id >= self.n_seq_max:
                raise BatchError(f"sequence {seq_id} is not in 0..{self.n_seq_max - 1}")
            if seq_id in ends:
                raise BatchError(f"sequence {seq_id} has two parts in one batch")
            n = counts[seq_id]
            if part.pos0 != n:
                raise BatchError(f"sequence {seq_id} holds {n} tokens, the batch goes on at {part.pos0}")
            ends[seq_id] = n = n + part.n_tokens
            if n > self.n_ctx_seq:
                raise ContextFull(f"sequence {seq_id} would hold {n} tokens, more than {self.n_ctx_seq}")
        if self._unified and sum(counts) + sum([part.n_tokens for part in parts]) > self.n_ctx:
            raise ContextFull(f"no room for the batch beside the {sum(counts)} tokens there, of {self.n_ctx}")
        return ends

    def _fail(self, code: int, batch: Batch, appended: bool) -> None:
        """Raise for a return code; `appended`: an earlier call of the same batch went through."""
        if code == 1 and not appended:
            raise ContextFull(f"no room for {batch.n_tokens} tokens beside the {sum(self._counts)} there")
        reason = logs.joiner.take_errors()
        if code == -1 and not appended:
            raise BatchError(f"llama refuses the batch: {reason}")
        for part in batch.parts:
            self._empty(part.seq_id)
        raise LlamaError(f"llama_decode failed with {code}, the batch's sequences are empty now: {reason}")

    def logits(self, row: int, n_rows: int) -> Floats:
        if row < 0 or n_rows < 0 or row + n_rows > self._n_outputs:
            raise BatchError(f"output rows {row}..{row + n_rows - 1} of {self._n_outputs}")
        if self._logits_at >= 0:
            if self._logits_at != self._logits_shown[0] or self._n_outputs > self._logits_shown[1]:
                self._logits_shown = self._logits_at, self._n_outputs
                self._logits_view = _view(self._logits_at, self._n_outputs, self.n_vocab)
                self._single_rows = {}
            self._logits = self._logits_view
        if n_rows != 1 or self._logits is not self._logits_view:
            return self._logits[row : row + n_rows]
        single = self._single_rows.get(row)
        if single is None:
            single = self._single_rows[row] = self._logits[row : row + 1]
        return single

    def hidden(self, row: int, n_rows: int) -> Floats:
        if row < 0 or n_rows < 0 or row + n_rows > self._n_rows or not self._has_hidden:
            raise BatchError(f"hidden rows {row}..{row + n_rows - 1} of {self._n_rows * self._has_hidden}")
        if not self._hidden_at:
            # never kept: it lies behind the logits, whose size changes with the number of output rows
            self._hidden_at = ctypes.addressof(ext.llama_get_embeddings_nextn(self._ctx).contents)
            self._hidden = _view(self._hidden_at, self._n_rows, self.n_embd)
        return self._hidden[row : row + n_rows]

    # -- length

    def n_tokens(self, seq_id: int) -> int:
        return self._counts[seq_id]

    def pos_range(self, seq_id: int) -> tuple[int, int]:
        self._check_seq(seq_id)
        return _native.pos_min(self._memory, seq_id), _native.pos_max(self._memory, seq_id)

    def rewind_floor(self, seq_id: int) -> int:
        n = self._counts[seq_id]
        if n == 0:
            return 0
        floor = 1
        if self._is_recurrent:
            floor = n - self._back[seq_id]
        # With swa_full too: a state that was loaded holds the window only.
        n_swa = self._model.n_swa
        if n_swa:
            first = _native.pos_min(self._memory, seq_id)
            if first > 0:
                floor = max(floor, first + n_swa - 1)
        return max(1, min(floor, n))

    def prefix_floor(self, seq_id: int) -> int:
        n = self._counts[seq_id]
        # A state holds no snapshots, and of a window only what its tip sees (llama_kv_cache::state_write).
        if self._is_recurrent or 0 < self._n_swa < n:
            return n
        return self.rewind_floor(seq_id)

    def truncate(self, seq_id: int, n_tokens: int) -> None:
        self._check_seq(seq_id)
        n = self._counts[seq_id]
        if n_tokens == n:
            return
        if n_tokens == 0:
            self._empty(seq_id)
            return
        if not 0 < n_tokens < n or n_tokens < self.rewind_floor(seq_id):
            raise RewindError(
                f"sequence {seq_id} holds {n} tokens and cannot be cut to {n_tokens}: "
                f"0 or {self.rewind_floor(seq_id)}..{n} can be reached"
            )
        if not _native.seq_rm(self._memory, seq_id, n_tokens, -1):
            raise RewindError(f"llama cannot cut sequence {seq_id} from {n} to {n_tokens} tokens")
        self._back[seq_id] = 0
        self._counts[seq_id] = n_tokens

    def _empty(self, seq_id: int) -> None:
        _native.seq_rm(self._memory, seq_id, -1, -1)
        self._counts[seq_id] = self._back[seq_id] = 0

    def _check_seq(self, seq_id: int) -> None:
        if not 0 <= seq_id < self.n_seq_max:
            raise BatchError(f"sequence {seq_id} is not in 0..{self.n_seq_max - 1}")

    # -- state

    def state_head(self) -> bytes:
        return self._head

    def state_size(self, seq_id: int, *, partial: bool) -> int:
        self._check_seq(seq_id)
        size: int = _native.state_size(self._ctx, seq_id, PARTIAL_ONLY * partial)
        return size

    def read_state(self, seq_id: int, out: memoryview, *, partial: bool) -> memoryview:
        self._check_seq(seq_id)
        n: int = _native.state_get(self._ctx, address_of(out), out.nbytes, seq_id, PARTIAL_ONLY * partial)
        if n == 0:
            raise StateError(f"no state in {out.nbytes} bytes: {logs.joiner.take_errors()}")
        form = self._form
        tail = 0
        if form.n_streams > 1 and not partial and len(form.full) == 2:
            tail = self.state_size(seq_id, partial=True)
        state = out.cast("B")[:n]
        state = _state_form.to_one_stream(state, seq_id, form, partial=partial, partial_bytes=tail)
        state[: len(self._head)] = self._head
        return state

    def _read_native(self, seq_id: int, flags: int) -> bytearray:
        out = bytearray(_native.state_size(self._ctx, seq_id, flags))
        _native.state_get(self._ctx, address_of(out), len(out), seq_id, flags)
        return out

    def check_state(self, state: memoryview, n_tokens: int, *, partial: bool) -> None:
        state = state.cast("B")
        if not 0 < n_tokens <= self.n_ctx_seq:
            raise StateError(f"a state of {n_tokens} tokens; a sequence holds 1..{self.n_ctx_seq}")
        _state_form.check(state, self._form, self._head, n_tokens, partial=partial)
        type_k, type_v = CACHE_TYPES[self.type_k], CACHE_TYPES[self.type_v]
        _state_rows.check_rows(state, self._form, type_k, type_v, self._recurrent_head, partial=partial)

    def write_state(
        self, seq_id: int, state: memoryview, n_tokens: int, *, partial: bool, spare: int = 0
    ) -> None:
        self._check_seq(seq_id)
        try:
            state = state.cast("B")
            if partial and self._form.partial_is_less and n_tokens > self._counts[seq_id]:
                raise StateError(
                    f"a partial state at {n_tokens} tokens, but only {self._counts[seq_id]} are there"
                )
            if not 0 < n_tokens <= self.n_ctx_seq:
                raise StateError(f"a state of {n_tokens} tokens; a sequence holds 1..{self.n_ctx_seq}")
            content = state[: len(state) - spare]
            _state_form.check(content, self._form, self._head, n_tokens, partial=partial)
            native = _state_form.to_n_streams(state, self._form, partial=partial, spare=spare)
            self._apply(seq_id, native, n_tokens, partial)
        except StateError:
            self._empty(seq_id)
            raise
        self._counts[seq_id] = n_tokens
        self._back[seq_id] = 0

    def _apply(self, seq_id: int, state: memoryview, n_tokens: int, partial: bool) -> None:
        address = np.frombuffer(state, np.uint8).ctypes.data
        if (
            _native.state_set(self._ctx, address, state.nbytes, seq_id, PARTIAL_ONLY * partial)
            != state.nbytes
        ):
            raise StateError(f"llama refuses the state: {logs.joiner.take_errors() or 'bytes are left over'}")
        if partial and not _native.seq_rm(self._memory, seq_id, n_tokens, -1):
            raise StateError(f"llama cannot cut the sequence to the {n_tokens} tokens of its partial state")
        last = _native.pos_max(self._memory, seq_id)
        if last + 1 != n_tokens:
            raise StateError(f"the state holds {last + 1} tokens, not {n_tokens}")

    # -- life

    def set_threads(self, n_threads: int) -> None:
        if n_threads < 1:
            raise BatchError(f"{n_threads} threads")
        lib.llama_set_n_threads(self._ctx, n_threads, n_threads)

    def close(self) -> None:
        """Free the context. May be called twice."""
        if self._ctx is not None:
            lib.llama_free(self._ctx)
            self._ctx = self._memory = None
            self._logits = self._logits_view = self._hidden = np.zeros((0, 0), np.float32)
            self._single_rows = {}
            self._n_outputs = self._n_rows = 0
            self._model._release()

    def __enter__(self) -> LlamaContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_ctx", None) is not None:
            self.close()


def _view(address: int, n_rows: int, width: int) -> Floats:
    """[n_rows, width] on llama's memory. Not read-only, since numpy copies such rows before it searches them."""
    block = (ctypes.c_float * (n_rows * width)).from_address(address)
    view: Floats = np.ctypeslib.as_array(block).reshape(n_rows, width)
    return view
