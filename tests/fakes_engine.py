"""Scripted drafters for engine tests: they propose by a plan, and must hold what the target holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from draft.base import EMPTY_DRAFT, Accepted, Draft, Drafter, DraftRequest, DraftState, DraftStateError, Ints
from spec_server.runtime.batch import Batch

Plan = Callable[[DraftRequest], Sequence[int]]
Known = Mapping[tuple[int, ...], Sequence[int]]  # prompt -> its greedy continuation


class OutOfStep(AssertionError):
    """The engine asked a drafter for a draft while it stood elsewhere than the target."""


class ScriptedDrafter:
    """Proposes what `plan` says. It holds every token it was shown, as a real one holds their state, and
    OutOfStep comes where that is not the request's tokens: a part that was never settled, a rollback that
    forgot the drafter, a state applied to the wrong slot.

    With `needs_checkpoints` it cannot truncate, but has partial states (its tokens), as a recurrent one.
    """

    name = "scripted"
    decode_ns = 0
    n_ctx_seq = 0
    model_identity: tuple[str, str] | None = None

    def __init__(self, plan: Plan, n_max: int, *, needs_checkpoints: bool = False) -> None:
        self.n_max = n_max
        self.needs_checkpoints = needs_checkpoints
        self.cannot_rebuild = "the scripted drafter keeps no text" if needs_checkpoints else ""
        self.refuse_states = False  # apply then raises DraftStateError
        self._plan = plan
        self._held: dict[int, list[int]] = {}
        self._waiting: dict[int, tuple[int, list[int]]] = {}
        self._cold: set[int] = set()

    def begin(self, seq_id: int, tokens: Ints) -> None:
        self.truncate(seq_id, len(tokens))

    def settle(self, seq_id: int, tokens: Ints) -> None:
        pass

    def may_be_free(self, seq_id: int, tokens: Ints, last_token: int) -> bool:
        return True

    def process(self, batch: Batch) -> None:
        for part in batch.parts:
            tokens = batch.tokens[part.start : part.start + part.n_tokens].tolist()
            if part.n_draft:
                self._waiting[part.seq_id] = (part.pos0, tokens)
            else:
                self._append(part.seq_id, part.pos0, tokens)

    def may_skip(self, seq_id: int, n_tokens: int) -> bool:
        return False

    def accept(self, accepted: Sequence[Accepted]) -> None:
        for item in accepted:
            pos0, tokens = self._waiting.pop(item.seq_id)
            self._append(item.seq_id, pos0, tokens[: 1 + item.n_accepted])

    def _append(self, seq_id: int, pos0: int, tokens: list[int]) -> None:
        held = self._held.setdefault(seq_id, [])
        if seq_id in self._cold:
            if pos0:
                return  # lost its state in mid-conversation: nothing to add to
            self._cold.discard(seq_id)
        if len(held) != pos0:
            raise OutOfStep(f"sequence {seq_id}: shown position {pos0}, holds {len(held)} tokens")
        held.extend(tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        if self._waiting:
            raise OutOfStep(f"sequences {sorted(self._waiting)} were never settled")
        drafts = []
        for r in requests:
            if r.seq_id in self._cold:
                drafts.append(EMPTY_DRAFT)
                continue
            if self._held.get(r.seq_id, []) != r.tokens.tolist():
                raise OutOfStep(f"sequence {r.seq_id}: holds other tokens than the target")
            drafts.append(Draft([int(t) for t in self._plan(r)][: r.n_max], self.name))
        return drafts

    def rewind_floor(self, seq_id: int) -> int:
        return self.n_tokens(seq_id) if self.needs_checkpoints else min(1, self.n_tokens(seq_id))

    def truncate(self, seq_id: int, n_tokens: int) -> None:
        held = self._held.get(seq_id, [])
        if n_tokens == 0:
            self._held[seq_id] = []
            self._cold.discard(seq_id)
        elif n_tokens < len(held):
            if self.needs_checkpoints:
                self._lose(seq_id)
            else:
                del held[n_tokens:]

    def _lose(self, seq_id: int) -> None:
        self._held[seq_id] = []
        self._cold.add(seq_id)

    def n_tokens(self, seq_id: int) -> int:
        return len(self._held.get(seq_id, []))

    def fit(self, seq_id: int) -> bytes:
        return b'{"kind":"scripted"}'

    def unfit(self, fit: bytes, n_tokens: int, context_size: int, spec_size: int) -> str | None:
        return None if fit == self.fit(0) else "another kind of drafter"

    def state_size(self, seq_id: int, *, partial: bool) -> int:
        return 0 if partial and not self.needs_checkpoints else 4 * self.n_tokens(seq_id)

    def capture(self, seq_id: int, out: memoryview, *, partial: bool) -> DraftState:
        if partial and not self.needs_checkpoints:
            return DraftState(b"", b"")
        data = np.asarray(self._held.get(seq_id, []), np.int32).tobytes()
        out[: len(data)] = data
        return DraftState(out[: len(data)], b"")

    def apply(self, seq_id: int, state: DraftState, tokens: Ints, *, partial: bool) -> str:
        if partial and not self.needs_checkpoints:
            self.truncate(seq_id, len(tokens))
            return ""
        held = np.frombuffer(state.context, np.int32).tolist()
        if self.refuse_states or held != tokens.tolist():
            self._lose(seq_id)
            raise DraftStateError("not the tokens of this sequence")
        self._held[seq_id] = held
        self._cold.discard(seq_id)
        return ""

    def prompt_tokens(self, seq_id: int) -> int:
        return 0

    def set_threads(self, n_threads: int) -> None:
        pass

    def close(self) -> None:
        self._held.clear()


def scripted(plan: Plan, n_max: int, *, needs_checkpoints: bool = False) -> Callable[..., Drafter]:
    """A drafter factory for a Setup."""
    return lambda *_: ScriptedDrafter(plan, n_max, needs_checkpoints=needs_checkpoints)


def oracle(known: Known) -> Plan:
    """Always right, as long as the text is one of the known ones."""
    return lambda r: _rest(known, r)[: r.n_max]


def always_wrong(known: Known, n_vocab: int) -> Plan:
    """Never right: the token after the right one, at every position."""
    return lambda r: [(t + 1) % n_vocab for t in _rest(known, r)[: r.n_max]]


def right_then_wrong(known: Known, n_vocab: int, n_right: Callable[[int], int]) -> Plan:
    """Right for n_right(position) tokens, wrong from there on."""

    def plan(r: DraftRequest) -> list[int]:
        rest = _rest(known, r)[: r.n_max]
        n = n_right(len(r.tokens))
        return [*rest[:n], *((t + 1) % n_vocab for t in rest[n:])]

    return plan


def mixed(known: Known, n_vocab: int) -> Plan:
    """Every number of accepted tokens, by position."""
    return right_then_wrong(known, n_vocab, lambda position: (0, 2, 1, 8, 0, 3, 1)[position % 7])


def _rest(known: Known, r: DraftRequest) -> list[int]:
    """What follows the request's last token in the known text; empty where it is none of them."""
    have: list[Any] = [*r.tokens.tolist(), r.last_token]
    for prompt, continuation in known.items():
        whole = [*prompt, *continuation]
        if whole[: len(have)] == have:
            return [int(t) for t in whole[len(have) :]]
    return []
