"""Drafts with the target model's own MTP head, in a second context on the target's weights; all slots in one batch.

The head reads token p+1 together with the target's hidden row of p, so the row of the last token that it holds waits
for the token after it: that pending row is the speculative state. The head's context holds tokens[base : base + n] of
a sequence, at positions from 0. `base` is above 0 where a state was lost or a smaller context was full; the head then
drafts with what it has, since nothing but the target can make the rows of the tokens in front.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from draft import fit as fit_header
from draft.base import (
    EMPTY_DRAFT,
    Accepted,
    Draft,
    DraftRequest,
    DraftState,
    DraftStateError,
    Floats,
    Ints,
)
from draft.growing import DraftClock, GrowingDraft, opens
from spec_server.runtime.batch import Batch
from spec_server.runtime.context import Context
from spec_server.runtime.errors import LlamaError
from spec_server.runtime.model import Model
from spec_server.runtime.sampler import argmax_rows

_SPEC = struct.Struct("<III")  # base, tokens held, floats in the pending row that follows


@dataclass(frozen=True, slots=True)
class _Verified:
    """A part with drafted tokens: what the target read and its rows, copied, until accept says how much stays."""

    pos0: int
    tokens: Ints  # [n]
    rows: Floats  # [n, n_embd]


class _Head:
    """One sequence. `row` belongs to its last token, which is the target's last; zeros where that row is lost."""

    __slots__ = ("base", "row", "verified")

    def __init__(self, n_embd: int) -> None:
        self.base = 0
        self.row: Floats = np.zeros(n_embd, np.float32)
        self.verified: _Verified | None = None


class MtpHeadDrafter:
    """MTP drafter over `context` (made with mtp=True); `target` gives hidden rows. Sequence ids are the slots'."""

    name = "draft-mtp"
    needs_checkpoints = False  # attention only: it is cut, and a checkpoint holds the row alone
    cannot_rebuild = "the MTP head needs the target's hidden rows, which only reading the prompt again makes"

    def __init__(
        self,
        context: Context,
        target: Context,
        model: Model,
        facts: Mapping[str, fit_header.Scalar],
        *,
        n_max: int,
    ) -> None:
        self.n_max = n_max
        self.n_ctx_seq = context.n_ctx_seq
        self.model_identity: tuple[str, str] | None = model.identity()
        self._ctx = context
        self._target = target
        self._model = model
        self._facts = dict(facts)
        self._batch = Batch(context.n_batch, context.n_embd)
        self._heads = [_Head(context.n_embd) for _ in range(context.n_seq_max)]
        self._spec_size = _SPEC.size + 4 * context.n_embd

    @property
    def decode_ns(self) -> int:
        return self._ctx.decode_ns

    # -- in step with the target

    def begin(self, seq_id: int, tokens: Ints) -> None:
        self.truncate(seq_id, len(tokens))
        if self.n_tokens(seq_id) != len(tokens):
            self._restart(seq_id, len(tokens))

    def settle(self, seq_id: int, tokens: Ints) -> None:
        pass

    def process(self, batch: Batch) -> None:
        """Read what is certain in `batch`, all slots in one decode; parts with drafted tokens wait for accept."""
        self._batch.clear()
        for part in batch.parts:
            tokens = batch.tokens[part.start : part.start + part.n_tokens]
            rows = self._target.hidden(part.start, part.n_tokens)
            if part.n_draft:
                self._heads[part.seq_id].verified = _Verified(part.pos0, tokens.copy(), rows.copy())
            else:
                self._queue(part.seq_id, part.pos0, tokens, rows)
        self._flush()

    def may_be_free(self, seq_id: int, tokens: Ints, last_token: int) -> bool:
        return False

    def may_skip(self, seq_id: int, n_tokens: int) -> bool:
        return False  # the rows of a step are gone with the next

    def accept(self, accepted: Sequence[Accepted]) -> None:
        self._batch.clear()
        for item in accepted:
            head = self._heads[item.seq_id]
            verified, head.verified = head.verified, None
            if verified is not None:
                n = item.n_accepted + 1
                self._queue(item.seq_id, verified.pos0, verified.tokens[:n], verified.rows[:n])
        self._flush()

    def truncate(self, seq_id: int, n_tokens: int) -> None:
        """The row of an earlier token is not kept: it becomes zeros, which costs the next few drafts a little."""
        head = self._heads[seq_id]
        head.verified = None
        if n_tokens >= self.n_tokens(seq_id):
            return
        if n_tokens > head.base:
            self._ctx.truncate(seq_id, n_tokens - head.base)
            head.row[:] = 0.0
        else:
            self._restart(seq_id, n_tokens)

    def n_tokens(self, seq_id: int) -> int:
        return self._heads[seq_id].base + self._ctx.n_tokens(seq_id)

    def rewind_floor(self, seq_id: int) -> int:
        return 1

    def prompt_tokens(self, seq_id: int) -> int:
        return 0  # it reads what the target reads and nothing more

    # -- drafting

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Step by step, all slots in one decode; then the steps are cut off again."""
        drafts: list[GrowingDraft | None] = [self._start_draft(r) for r in requests]
        started = [d for d in drafts if d is not None]
        clock = DraftClock()
        self._grow(started, clock)
        clock.report(started)
        for draft in started:
            self._cut_trace(draft.request)
        return [EMPTY_DRAFT if d is None else d.done() for d in drafts]

    def _start_draft(self, request: DraftRequest) -> GrowingDraft | None:
        """None where the head cannot draft now: nothing wanted, or it does not stand where the target stands."""
        n, n_max = len(request.tokens), min(self.n_max, self._ctx.n_ctx_seq)
        if self.n_tokens(request.seq_id) != n or not opens(request, n_max, self.name):
            return None
        draft = GrowingDraft(request, n_max, self._model.eog, self.name)
        if self._ctx.n_tokens(request.seq_id) + draft.n_max > self._ctx.n_ctx_seq:
            self._restart(request.seq_id, n, keep_row=True)
        return draft

    def _grow(self, active: list[GrowingDraft], clock: DraftClock) -> None:
        batch, ctx = self._batch, self._ctx
        for i, draft in enumerate(active):
            batch.embd[i] = self._heads[draft.request.seq_id].row
        while active:
            batch.clear()
            for draft in active:
                seq_id = draft.request.seq_id
                batch.add(seq_id, (draft.last,), ctx.n_tokens(seq_id), output="last")
            try:
                ctx.decode(batch)
            except LlamaError:
                return  # what was drafted so far stands; _cut_trace looks at what is left of the context
            logits = ctx.logits(0, len(active))
            best = argmax_rows(logits)
            going_on = [i for i, draft in enumerate(active) if draft.take(best[i], logits[i])]
            if going_on:
                # The next step reads the head's own rows; copied here, before the decode that overwrites them.
                batch.embd[: len(going_on)] = ctx.hidden(0, len(active))[going_on]
            active = [active[i] for i in going_on]
            clock.step()

    def _cut_trace(self, request: DraftRequest) -> None:
        keep = len(request.tokens) - self._heads[request.seq_id].base
        if self._ctx.n_tokens(request.seq_id) >= keep:
            self._ctx.truncate(request.seq_id, keep)
        else:
            self._restart(request.seq_id, len(request.tokens), keep_row=True)

    # -- state

    def fit(self, seq_id: int) -> bytes:
        held, base = self._ctx.n_tokens(seq_id), self._heads[seq_id].base
        return fit_header.dump(self.name, self._facts, n_tokens=held, base=base)

    def unfit(self, fit: bytes, n_tokens: int, context_size: int, spec_size: int) -> str | None:
        header = fit_header.load(fit, self.name)
        if isinstance(header, str):
            return header
        return (
            fit_header.difference(header, self._facts)
            or fit_header.positions(header, n_tokens, self._ctx.n_ctx_seq)
            or fit_header.size("speculative state", spec_size, self._spec_size)
            or _elsewhere(header["base"] + header["n_tokens"], n_tokens)
        )

    def state_size(self, seq_id: int, *, partial: bool) -> int:
        return 0 if partial else self._ctx.state_size(seq_id, partial=False)

    def capture(self, seq_id: int, out: memoryview, *, partial: bool) -> DraftState:
        head, held = self._heads[seq_id], self._ctx.n_tokens(seq_id)
        spec = _SPEC.pack(head.base, held, len(head.row)) + head.row.astype("<f4").tobytes()
        if partial or held == 0:
            return DraftState(b"", spec)
        return DraftState(self._ctx.read_state(seq_id, out, partial=False), spec)

    def apply(self, seq_id: int, state: DraftState, tokens: Ints, *, partial: bool) -> str:
        if partial and not len(state.spec):
            self.truncate(seq_id, len(tokens))
            return ""
        try:
            base, held, row = self._read_spec(state.spec, len(tokens))
            if partial:
                self._stand_at(seq_id, len(tokens))
            else:
                self._restart(seq_id, base)
                if held:
                    self._ctx.check_state(memoryview(state.context), held, partial=False)
                    self._ctx.write_state(seq_id, memoryview(state.context), held, partial=False)
        except (LlamaError, DraftStateError) as e:
            self._restart(seq_id, len(tokens))
            raise DraftStateError(str(e)) from e
        self._heads[seq_id].row[:] = row
        return ""

    def _read_spec(self, spec: bytes | bytearray | memoryview, n_tokens: int) -> tuple[int, int, Floats]:
        if len(spec) != self._spec_size:
            raise DraftStateError(f"a speculative state of {len(spec)} bytes, {self._spec_size} are wanted")
        base, held, n_embd = _SPEC.unpack_from(spec)
        row: Floats = np.frombuffer(spec, "<f4", offset=_SPEC.size)
        if n_embd != len(row) or base + held != n_tokens:
            raise DraftStateError(f"a row of {n_embd} floats behind {base + held} tokens of {n_tokens}")
        if not np.isfinite(row).all():
            raise DraftStateError("the pending row holds values that are not finite")
        return base, held, row

    def close(self) -> None:
        self._batch.close()
        self._ctx.close()

    def set_threads(self, n_threads: int) -> None:
        self._ctx.set_threads(n_threads)

    # -- the head's context

    def _queue(self, seq_id: int, pos0: int, tokens: Ints, rows: Floats) -> None:
        """Add tokens [n] at pos0 to the batch, each with the row of the token before it; rows [n, n_embd] are theirs.

        Where the context is full it starts anew with them, and with the last that fit.
        """
        head, n = self._heads[seq_id], len(tokens)
        if self.n_tokens(seq_id) != pos0:
            self._restart(seq_id, pos0)
        if self._ctx.n_tokens(seq_id) + n > self._ctx.n_ctx_seq:
            self._restart(seq_id, pos0, keep_row=True)
            skip = n - min(n, self._ctx.n_ctx_seq)
            if skip:
                head.row[:] = rows[skip - 1]
                head.base += skip
                tokens, rows, n = tokens[skip:], rows[skip:], n - skip
        for start in range(0, n, self._batch.capacity):
            end = min(n, start + self._batch.capacity)
            self._add(seq_id, tokens[start:end], rows[start:end])

    def _add(self, seq_id: int, tokens: Ints, rows: Floats) -> None:
        head, n = self._heads[seq_id], len(tokens)
        if n > self._batch.room:
            self._flush()
        part = self._batch.add(seq_id, tokens, self._ctx.n_tokens(seq_id), output="none")
        self._batch.embd[part.start] = head.row
        self._batch.embd[part.start + 1 : part.start + n] = rows[: n - 1]
        head.row[:] = rows[n - 1]

    def _flush(self) -> None:
        """Decode what was queued. Where that fails the rows are still right, so the heads go on behind it."""
        if not self._batch.n_tokens:
            return
        parts = self._batch.parts
        try:
            self._ctx.decode(self._batch)
        except LlamaError:
            for part in parts:
                end = self._heads[part.seq_id].base + part.pos0 + part.n_tokens
                self._restart(part.seq_id, end, keep_row=True)
        self._batch.clear()

    def _stand_at(self, seq_id: int, n_tokens: int) -> None:
        """Hold what there is of the first n_tokens, and stand behind them."""
        self.truncate(seq_id, n_tokens)
        if self.n_tokens(seq_id) != n_tokens:
            self._restart(seq_id, n_tokens)

    def _restart(self, seq_id: int, n_tokens: int, *, keep_row: bool = False) -> None:
        """An empty context whose first token will be that at n_tokens."""
        head = self._heads[seq_id]
        self._ctx.truncate(seq_id, 0)
        head.base = n_tokens
        if not keep_row:
            head.row[:] = 0.0


def _elsewhere(stands: int, n_tokens: int) -> str | None:
    """The pending row is one token's: a head that stands elsewhere than the target would read another's."""
    return (
        None
        if stands == n_tokens
        else f"position: the head stands at {stands} tokens, the target at {n_tokens}"
    )
