"""Drafts with a small model of the same vocabulary in a context of its own; greedy, all slots in one batch.

The draft context holds tokens[base : base + n] of a sequence. It normally stands where the target stands. Where it
lags (a state that was dropped, a window smaller than the text) `propose` catches up in bounded chunks before it
drafts, so that a lost draft state costs draft time only.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from draft.base import (
    Accepted,
    Draft,
    DraftRequest,
    DraftSetupError,
    DraftState,
    DraftStateError,
    Ints,
)
from draft.growing import GrowingDraft
from spec_server.runtime.batch import Batch
from spec_server.runtime.context import Context
from spec_server.runtime.errors import LlamaError, StateError
from spec_server.runtime.model import Model

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
    base: int = 0
    trail: int = 0  # tokens behind the target's tip that the last propose left in the context
    prompt_tokens: int = 0
    rebuild: bool = True


class DraftModelDrafter:
    """Draft-model drafter over `context`; its sequence ids are the slots'."""

    name = "draft-simple"

    def __init__(
        self, context: Context, model: Model, identity: DraftModelIdentity, *, n_max: int, rebuild: bool = True
    ) -> None:
        self.n_max = n_max
        self.needs_checkpoints = context.needs_checkpoints
        self.n_ctx_seq = context.n_ctx_seq
        self.model_identity: tuple[str, str] | None = (model.path.name, identity.model)
        self._ctx = context
        self._model = model
        self._identity = identity
        self._rebuild = rebuild
        self._batch = Batch(context.n_batch)
        self._seqs = [_Sequence() for _ in range(context.n_seq_max)]
        self._tokens: dict[int, tuple[int, Ints, int]] = {}  # parts that wait for accept: pos0, tokens, n_draft
        self._window = max(1, context.n_ctx_seq - n_max - 2)

    @property
    def decode_ns(self) -> int:
        return self._ctx.decode_ns

    # -- in step with the target

    def begin(self, seq_id: int, tokens: Ints) -> None:
        seq = self._seqs[seq_id]
        seq.prompt_tokens = 0
        seq.rebuild = self._rebuild
        self.truncate(seq_id, len(tokens))

    def process(self, batch: Batch) -> None:
        """Decode what is certain in `batch`; parts with drafted tokens wait for accept."""
        self._batch.clear()
        for part in batch.parts:
            tokens = batch.tokens[part.start : part.start + part.n_tokens]
            if part.n_draft:
                self._tokens[part.seq_id] = (part.pos0, tokens.copy(), part.n_draft)
                continue
            self._drop_trail(part.seq_id)
            if self.n_tokens(part.seq_id) == part.pos0:
                self._queue(part.seq_id, tokens)
        self._flush()

    def accept(self, accepted: Sequence[Accepted]) -> None:
        """Keep what the target kept: cut a draft that was rejected, decode what is missing of an accepted one."""
        self._batch.clear()
        for item in accepted:
            pos0, tokens, _ = self._tokens.pop(item.seq_id)
            seq = self._seqs[item.seq_id]
            want = pos0 + 1 + item.n_accepted
            if not seq.trail and self.n_tokens(item.seq_id) < pos0:
                continue  # lagging: propose catches up
            have = self.n_tokens(item.seq_id)
            seq.trail = 0
            if have >= want:
                self._cut(item.seq_id, want)
            else:
                self._queue(item.seq_id, tokens[have - pos0 : want - pos0])
        self._flush()

    def truncate(self, seq_id: int, n_tokens: int) -> None:
        self._seqs[seq_id].trail = 0
        if self.n_tokens(seq_id) > n_tokens:
            self._cut(seq_id, n_tokens)

    def n_tokens(self, seq_id: int) -> int:
        return self._seqs[seq_id].base + self._ctx.n_tokens(seq_id)

    def rewind_floor(self, seq_id: int) -> int:
        return self._seqs[seq_id].base + self._ctx.rewind_floor(seq_id)

    def prompt_tokens(self, seq_id: int) -> int:
        return self._seqs[seq_id].prompt_tokens

    # -- drafting

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = [GrowingDraft(r, self.n_max, self._model.eog) for r in requests]
        active = [d for d in drafts if d.n_max > 0 and self._caught_up(d.request)]
        while active:
            self._batch.clear()
            for d in active:
                seq = self._seqs[d.request.seq_id]
                pos = len(d.request.tokens) + len(d.tokens) - seq.base
                self._batch.add(d.request.seq_id, (d.last,), pos, output="last")
                seq.trail = len(d.tokens) + 1
            try:
                self._ctx.decode(self._batch)
            except LlamaError:
                for d in active:
                    self._cold(d.request.seq_id)
                break
            rows = self._ctx.logits(0, len(active))
            best = rows.argmax(axis=1).tolist()
            active = [d for i, d in enumerate(active) if d.take(best[i], rows[i])]
        return [d.done(self.name) for d in drafts]

    def _caught_up(self, request: DraftRequest) -> bool:
        """Bring a lagging sequence nearer by at most one micro-batch; True where it stands at the target's tip."""
        seq = self._seqs[request.seq_id]
        self._drop_trail(request.seq_id)
        n = len(request.tokens)
        held = self.n_tokens(request.seq_id)
        if n - seq.base > self._window or held > n:
            self._cut(request.seq_id, 0)
            seq.base = max(0, n - self._window // 2)
            held = seq.base
        if held == n:
            return True
        if not seq.rebuild:
            return False
        chunk = request.tokens[held : held + self._ctx.n_ubatch]
        self._batch.clear()
        self._queue(request.seq_id, chunk)
        self._flush()
        seq.prompt_tokens += len(chunk)
        return self.n_tokens(request.seq_id) == n

    # -- state

    def fit(self, seq_id: int) -> bytes:
        i = self._identity
        return orjson.dumps(
            {
                "kind": self.name,
                "version": 1,
                "model": i.model,
                "type_k": i.type_k,
                "type_v": i.type_v,
                "v_transposed": i.v_transposed,
                "rope": i.rope,
                "n_tokens": self._ctx.n_tokens(seq_id),
                "base": self._seqs[seq_id].base,
            }
        )

    def unfit(self, fit: bytes, n_tokens: int, context_size: int, spec_size: int) -> str | None:
        try:
            header = orjson.loads(fit)
        except orjson.JSONDecodeError:
            return "fit header is not JSON"
        if not isinstance(header, dict) or header.get("version") != 1:
            return "fit header of another version"
        if header.get("kind") != self.name:
            return f"kind of drafter: stored {header.get('kind')}, running {self.name}"
        for name in ("model", "type_k", "type_v", "v_transposed", "rope"):
            if header.get(name) != getattr(self._identity, name):
                label = "draft model" if name == "model" else name
                return f"{label}: stored {header.get(name)}, running {getattr(self._identity, name)}"
        held, base = header.get("n_tokens"), header.get("base")
        if not isinstance(held, int) or not isinstance(base, int) or held < 0 or base < 0:
            return "fit header without positions"
        if base + held > n_tokens:
            return f"position: the draft holds {base + held} tokens, the target {n_tokens}"
        if held > self._ctx.n_ctx_seq:
            return f"draft context too small: stored {held} tokens, running {self._ctx.n_ctx_seq}"
        if spec_size != _SPEC.size:
            return f"speculative state size: stored {spec_size}, running {_SPEC.size}"
        return None

    def state_size(self, seq_id: int, *, partial: bool) -> int:
        # A context that truncates needs nothing of a checkpoint; its partial state would be the whole one.
        return 0 if partial and not self.needs_checkpoints else self._ctx.state_size(seq_id, partial=partial)

    def capture(self, seq_id: int, out: memoryview, *, partial: bool) -> DraftState:
        self._drop_trail(seq_id)
        if partial and not self.needs_checkpoints:
            return DraftState(b"", b"")
        spec = _SPEC.pack(self._seqs[seq_id].base, self._ctx.n_tokens(seq_id))
        return DraftState(self._ctx.read_state(seq_id, out, partial=partial), spec)

    def apply(self, seq_id: int, state: DraftState, tokens: Ints, *, partial: bool) -> None:
        if not state.spec:
            self.truncate(seq_id, len(tokens))
            return
        seq = self._seqs[seq_id]
        seq.trail = 0
        base, held = _SPEC.unpack(state.spec)
        try:
            if base + held > len(tokens):
                raise StateError(f"the draft state holds {base + held} tokens, the target {len(tokens)}")
            self._ctx.write_state(seq_id, memoryview(state.context), held, partial=partial)
        except LlamaError as e:
            self._cold(seq_id)
            raise DraftStateError(str(e)) from e
        seq.base = base

    def close(self) -> None:
        self._batch.close()
        self._ctx.close()
        self._model.close()

    # -- the draft context

    def _queue(self, seq_id: int, tokens: Ints) -> None:
        """Add tokens behind what the context holds; a window that is full lags instead."""
        n = self._ctx.n_tokens(seq_id)
        if n + len(tokens) <= self._ctx.n_ctx_seq and len(tokens):
            self._batch.add(seq_id, tokens, n, output="none")

    def _flush(self) -> None:
        if not self._batch.n_tokens:
            return
        try:
            self._ctx.decode(self._batch)
        except LlamaError:
            for part in self._batch.parts:
                self._cold(part.seq_id)

    def _drop_trail(self, seq_id: int) -> None:
        seq = self._seqs[seq_id]
        if seq.trail:
            self._cut(seq_id, self.n_tokens(seq_id) - seq.trail)
            seq.trail = 0

    def _cut(self, seq_id: int, n_tokens: int) -> None:
        seq = self._seqs[seq_id]
        keep = n_tokens - seq.base
        if keep <= 0 or (keep < self._ctx.n_tokens(seq_id) and keep < self._ctx.rewind_floor(seq_id)):
            self._cold(seq_id)
        else:
            self._ctx.truncate(seq_id, keep)

    def _cold(self, seq_id: int) -> None:
        self._ctx.truncate(seq_id, 0)
        self._seqs[seq_id] = _Sequence(
            prompt_tokens=self._seqs[seq_id].prompt_tokens, rebuild=self._seqs[seq_id].rebuild
        )


def check_vocabulary(target: Model, draft: Model) -> None:
    """DraftSetupError, naming the first difference, where drafted token ids would mean something else."""
    mismatch = target.vocab_mismatch(draft)
    if mismatch:
        raise DraftSetupError(f"the draft model's vocabulary does not fit the target's: {mismatch}")
