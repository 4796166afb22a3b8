"""Drafts with a small model of the same vocabulary in a context of its own; greedy, all slots in one batch.

The draft context holds tokens[base : base + n] of a sequence. It normally stands where the target stands, or a few
tokens behind: the first step of a draft reads those too, which saves a step. Where it lags further (a state that was
dropped, a window smaller than the text) `propose` catches up in bounded chunks before it drafts, so that a lost draft
state costs draft time only.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from draft import fit as fit_header
from draft.base import (
    EMPTY_DRAFT,
    Accepted,
    Draft,
    DraftRequest,
    DraftSetupError,
    DraftState,
    DraftStateError,
    Ints,
)
from draft.growing import DraftClock, GrowingDraft, opens
from spec_server.runtime.batch import Batch
from spec_server.runtime.context import Context
from spec_server.runtime.errors import LlamaError, StateError
from spec_server.runtime.model import Model
from spec_server.runtime.sampler import argmax_rows

_LATE = 16  # tokens that are read with the first step of a draft; more are read before it
_SPEC = struct.Struct("<II")  # base: target tokens in front of the draft context's first; tokens it holds


@dataclass(frozen=True, slots=True)
class DraftModelIdentity:
    """What a stored draft state depends on; every field is compared by `unfit`."""

    model: str  # digest of the draft model's content
    type_k: str
    type_v: str
    v_transposed: bool
    rope: str


@dataclass(slots=True)
class _Sequence:
    """`trail` are tokens behind the target's tip that the last propose left in the context."""

    base: int = 0
    trail: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    lags_by_choice: bool = False  # its window moved, or it rests; no state was lost
    # Where the context cannot take its own drafts back: its part-way state in front of them, and its length there.
    before: memoryview | None = None
    before_n: int = 0
    buffer: bytearray = field(default_factory=bytearray)


class DraftModelDrafter:
    """Draft-model drafter over `context`; its sequence ids are the slots'."""

    name = "draft-simple"
    cannot_rebuild = ""

    def __init__(
        self,
        context: Context,
        model: Model,
        identity: DraftModelIdentity,
        *,
        n_max: int,
        rebuild: bool = True,
        reads_late: bool = False,
    ) -> None:
        """`reads_late`: what the drafter lacks of a text is read with the first step of the next draft, not at once."""
        self.n_max = n_max
        self.needs_checkpoints = context.needs_checkpoints
        self.n_ctx_seq = context.n_ctx_seq
        self.model_identity: tuple[str, str] | None = (model.path.name, identity.model)
        self._ctx = context
        self._model = model
        self._ends = model.eog  # now, since it asks about every token
        self._facts: dict[str, fit_header.Scalar] = asdict(identity)
        self._rebuild = rebuild
        # What is lost stays lost without rebuild, and a context that needs checkpoints has to stand where they are.
        self._reads_late = reads_late and rebuild and not context.needs_checkpoints
        # So that every slot's first step fits into one batch.
        self._most_late = min(_LATE, context.n_batch // context.n_seq_max - 1) if self._reads_late else 0
        self._batch = Batch(context.n_batch)
        self._seqs = [_Sequence() for _ in range(context.n_seq_max)]
        self._verified: dict[int, tuple[int, list[int]]] = {}  # parts that wait for accept: pos0, tokens
        self._resting: set[int] = set()  # sequences for which the length rule wants no drafts at present
        self._window = max(1, context.n_ctx_seq - n_max - 2)

    @property
    def decode_ns(self) -> int:
        return self._ctx.decode_ns

    # -- in step with the target

    def begin(self, seq_id: int, tokens: Ints) -> None:
        self.truncate(seq_id, len(tokens))
        if self.n_tokens(seq_id) < len(tokens) and not self._rebuild:
            self._cold(seq_id, len(tokens))  # it drafts with what comes from here on
        self.settle(seq_id, tokens)  # so that the prompt behind it is read as it comes
        self._seqs[seq_id].prompt_tokens = 0

    def settle(self, seq_id: int, tokens: Ints) -> None:
        held = self.n_tokens(seq_id)
        self._drop_trail(seq_id, [], held)
        if 0 < len(tokens) - held <= _LATE and self._seqs[seq_id].lags_by_choice:
            self._batch.clear()
            self._queue(seq_id, tokens[held:])
            self._flush()

    def process(self, batch: Batch) -> None:
        """Decode what is certain in `batch`; parts with drafted tokens wait for accept."""
        self._batch.clear()
        for part in batch.parts:
            seq_id, is_single = part.seq_id, part.n_tokens == 1
            if is_single and self.may_skip(seq_id, part.pos0):  # a plain step, which should cost little
                continue
            tokens = batch.tokens[part.start : part.start + part.n_tokens]
            if part.n_draft:
                self._verified[seq_id] = (part.pos0, tokens.tolist())
                continue
            self._drop_trail(seq_id, tokens.tolist(), part.pos0)
            self._read(seq_id, tokens, part.pos0, later=is_single and self._may_wait(seq_id))
        self._flush()

    def may_be_free(self, seq_id: int, tokens: Ints, last_token: int) -> bool:
        return False

    def may_skip(self, seq_id: int, n_tokens: int) -> bool:
        seq = self._seqs[seq_id]
        if not self._may_wait(seq_id) or seq.trail or seq_id in self._verified:
            return False
        seq.lags_by_choice |= self._end(seq_id) == n_tokens
        return True

    def _may_wait(self, seq_id: int) -> bool:
        """May a single token wait for the next draft? Where nothing is drafted for now, what is missing is read in one
        go when a draft is tried again."""
        return self._reads_late or (self._rebuild and seq_id in self._resting)

    def accept(self, accepted: Sequence[Accepted]) -> None:
        """Keep what the target kept, whoever drafted it: cut what it rejected, decode what is missing."""
        self._batch.clear()
        for item in accepted:
            pos0, tokens = self._verified.pop(item.seq_id, (-1, []))
            if pos0 < 0:
                continue
            kept = tokens[: item.n_accepted + 1]
            self._drop_trail(item.seq_id, kept, pos0)
            self._read(item.seq_id, kept, pos0, later=self._reads_late)
        self._flush()

    def truncate(self, seq_id: int, n_tokens: int) -> None:
        self._verified.pop(seq_id, None)
        self._drop_trail(seq_id, [], self.n_tokens(seq_id))
        if n_tokens == 0:
            self._seqs[seq_id].lags_by_choice = False
        if self._end(seq_id) > n_tokens:
            self._cut(seq_id, n_tokens)

    def n_tokens(self, seq_id: int) -> int:
        return self._end(seq_id) - len(self._seqs[seq_id].trail)

    def rewind_floor(self, seq_id: int) -> int:
        return self._seqs[seq_id].base + self._ctx.rewind_floor(seq_id)

    def prompt_tokens(self, seq_id: int) -> int:
        return self._seqs[seq_id].prompt_tokens

    # -- drafting

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        wanted = []
        for r in requests:
            if opens(r, self.n_max, self.name):
                self._resting.discard(r.seq_id)
                wanted.append(GrowingDraft(r, self.n_max, self._ends, self.name))
            elif r.length is not None:
                self._resting.add(r.seq_id)
        if not wanted:
            return [EMPTY_DRAFT] * len(requests)
        clock = DraftClock()
        self._catch_up([d.request for d in wanted])
        clock.read()
        active = [d for d in wanted if self._lag(d.request) <= self._most_late]
        self._before_drafts(active)
        late = {
            d.request.seq_id: d.request.tokens[-n:].tolist() for d in active if (n := self._lag(d.request))
        }
        while active:
            self._batch.clear()
            for d in active:
                seq_id = d.request.seq_id
                tokens = (*late.pop(seq_id, ()), d.last)
                self._batch.add(seq_id, tokens, self._ctx.n_tokens(seq_id), output="last")
                self._seqs[seq_id].trail.append(d.last)
            try:
                self._ctx.decode(self._batch)
            except LlamaError:
                for d in active:
                    self._cold(d.request.seq_id)
                break
            rows = self._ctx.logits(0, len(active))
            best = argmax_rows(rows)
            active = [d for i, d in enumerate(active) if d.take(best[i], rows[i])]
            clock.step()
        clock.report(wanted)
        made = {d.request.seq_id: d.done() for d in wanted}
        return [made.get(r.seq_id, EMPTY_DRAFT) for r in requests]

    def _before_drafts(self, drafts: Sequence[GrowingDraft]) -> None:
        """Recurrent memory cannot take single tokens back: keep what it held in front of them."""
        if self._ctx.can_rewind_draft:
            return
        for d in drafts:
            seq_id = d.request.seq_id
            seq = self._seqs[seq_id]
            seq.before_n = self._ctx.n_tokens(seq_id)
            if seq.before_n == 0:
                continue
            size = self._ctx.state_size(seq_id, partial=True)
            if len(seq.buffer) < size:
                seq.buffer = bytearray(size)
            seq.before = self._ctx.read_state(seq_id, memoryview(seq.buffer), partial=True)

    def _catch_up(self, requests: Sequence[DraftRequest]) -> None:
        """Bring lagging sequences nearer to the target's tip, by one micro-batch over all of them."""
        self._batch.clear()
        room = self._ctx.n_ubatch
        for r in requests:
            seq, n = self._seqs[r.seq_id], len(r.tokens)
            self._drop_trail(r.seq_id, [], n)
            held = self.n_tokens(r.seq_id)
            if n - seq.base > self._window or held > n:
                by_choice = held == n or seq.lags_by_choice
                self._cold(r.seq_id, max(0, n - self._window // 2))
                seq.lags_by_choice = by_choice
                held = seq.base
            if n - held <= self._most_late:
                seq.prompt_tokens += 0 if seq.lags_by_choice else n - held
                seq.lags_by_choice = False
                continue
            chunk = r.tokens[held : held + room]
            if len(chunk):
                self._queue(r.seq_id, chunk)
                room -= len(chunk)
                seq.prompt_tokens += 0 if seq.lags_by_choice else len(chunk)
        self._flush()

    # -- state

    def fit(self, seq_id: int) -> bytes:
        held, base = self._ctx.n_tokens(seq_id) - len(self._seqs[seq_id].trail), self._seqs[seq_id].base
        return fit_header.dump(self.name, self._facts, n_tokens=held, base=base)

    def unfit(self, fit: bytes, n_tokens: int, context_size: int, spec_size: int) -> str | None:
        header = fit_header.load(fit, self.name)
        if isinstance(header, str):
            return header
        return (
            fit_header.difference(header, self._facts, {"model": "draft model"})
            or fit_header.positions(header, n_tokens, self._ctx.n_ctx_seq)
            or fit_header.size("speculative state", spec_size, _SPEC.size)
        )

    def state_size(self, seq_id: int, *, partial: bool) -> int:
        # A context that truncates needs nothing of a checkpoint; its partial state would be the whole one.
        return 0 if partial and not self.needs_checkpoints else self._ctx.state_size(seq_id, partial=partial)

    def capture(self, seq_id: int, out: memoryview, *, partial: bool) -> DraftState:
        self._drop_trail(seq_id, [], self.n_tokens(seq_id))
        seq, held = self._seqs[seq_id], self._ctx.n_tokens(seq_id)
        if held == 0 or (partial and not self.needs_checkpoints):
            return DraftState(b"", b"" if partial else _SPEC.pack(seq.base, 0))
        return DraftState(self._ctx.read_state(seq_id, out, partial=partial), _SPEC.pack(seq.base, held))

    def apply(self, seq_id: int, state: DraftState, tokens: Ints, *, partial: bool) -> str:
        if partial and not len(state.spec):
            self.truncate(seq_id, len(tokens))
            return ""
        seq = self._seqs[seq_id]
        self._forget_trail(seq_id)
        try:
            if len(state.spec) != _SPEC.size:
                raise StateError(f"a speculative state of {len(state.spec)} bytes, {_SPEC.size} are wanted")
            base, held = _SPEC.unpack(state.spec)
            if base + held > len(tokens):
                raise StateError(f"the draft state holds {base + held} tokens, the target {len(tokens)}")
            if partial and base != seq.base:
                raise StateError(f"the draft's window has moved from {base} to {seq.base}")
            if held:
                self._ctx.check_state(memoryview(state.context), held, partial=partial)
                self._ctx.write_state(seq_id, memoryview(state.context), held, partial=partial)
            else:
                self._ctx.truncate(seq_id, 0)
        except LlamaError as e:
            self._cold(seq_id)
            raise DraftStateError(str(e)) from e
        seq.base = base
        seq.lags_by_choice = base + held < len(tokens)  # saved so, and so not lost
        return ""

    def close(self) -> None:
        self._batch.close()
        self._ctx.close()
        self._model.close()

    def set_threads(self, n_threads: int) -> None:
        self._ctx.set_threads(n_threads)

    # -- the draft context

    def _end(self, seq_id: int) -> int:
        """The position behind what the context holds, a trail included."""
        return self._seqs[seq_id].base + self._ctx.n_tokens(seq_id)

    def _lag(self, request: DraftRequest) -> int:
        """How many tokens of the text the context lacks."""
        return len(request.tokens) - self.n_tokens(request.seq_id)

    def _read(self, seq_id: int, tokens: Sequence[int] | Ints, pos0: int, *, later: bool) -> None:
        """Queue what the context lacks of tokens [n], which stand at pos0, or leave it to propose, as always where more
        than they is lacking."""
        have = self._end(seq_id) - pos0
        if 0 <= have < len(tokens):
            if later:
                self._seqs[seq_id].lags_by_choice = True
            else:
                self._queue(seq_id, tokens[have:])

    def _queue(self, seq_id: int, tokens: Sequence[int] | Ints) -> None:
        """Add tokens behind what the context holds; a window that is full lags instead."""
        n = self._ctx.n_tokens(seq_id)
        if n + len(tokens) <= self._ctx.n_ctx_seq and len(tokens) <= self._batch.room:
            self._batch.add(seq_id, tokens, n, output="none")
        else:
            self._seqs[seq_id].lags_by_choice = True

    def _flush(self) -> None:
        if not self._batch.n_tokens:
            return
        try:
            self._ctx.decode(self._batch)
        except LlamaError:
            for part in self._batch.parts:
                self._cold(part.seq_id)

    def _drop_trail(self, seq_id: int, tokens: Sequence[int], pos0: int) -> None:
        """Of the draft behind pos0 keep what `tokens`, which stand there, begin with."""
        seq = self._seqs[seq_id]
        if seq.trail:
            n = 0
            while n < min(len(seq.trail), len(tokens)) and seq.trail[n] == tokens[n]:
                n += 1
            if n < len(seq.trail):
                self._cut(seq_id, pos0 + n)
        self._forget_trail(seq_id)

    def _forget_trail(self, seq_id: int) -> None:
        self._seqs[seq_id].trail.clear()
        self._seqs[seq_id].before = None

    def _cut(self, seq_id: int, n_tokens: int) -> None:
        """Keep the first n_tokens, or fewer where that is out of reach; what is missing is read again."""
        seq, ctx = self._seqs[seq_id], self._ctx
        keep = n_tokens - seq.base
        if keep > 0 and ctx.rewind_floor(seq_id) <= keep <= ctx.n_tokens(seq_id):
            ctx.truncate(seq_id, keep)
            return
        if seq.before is None or keep < seq.before_n:
            self._cold(seq_id)
            return
        try:
            ctx.write_state(seq_id, seq.before, seq.before_n, partial=True)
        except StateError:
            self._cold(seq_id)

    def _cold(self, seq_id: int, base: int = 0) -> None:
        """An empty context whose first token will be that at `base`."""
        self._forget_trail(seq_id)
        self._ctx.truncate(seq_id, 0)
        self._seqs[seq_id].base = base
        self._seqs[seq_id].lags_by_choice = False


def check_vocabulary(target: Model, draft: Model) -> None:
    """DraftSetupError, naming the first difference, where drafted token ids would mean something else."""
    mismatch = target.vocab_mismatch(draft)
    if mismatch:
        raise DraftSetupError(f"the draft model's vocabulary does not fit the target's: {mismatch}")
