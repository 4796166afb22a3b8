"""Several drafters as one: asked in order for each request, the first draft that is not empty is taken.

All members are kept in step whoever drafted, so each is ready at any time. Their states are stored side by side, each
with its own fit header, and each is judged and dropped alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from draft import fit as fit_header
from draft.base import (
    EMPTY_DRAFT,
    UNKNOWN_SIZE,
    Accepted,
    Draft,
    Drafter,
    DraftRequest,
    DraftState,
    DraftStateError,
    Ints,
)
from spec_server.runtime.batch import Batch

KIND = "chain"
_COUNT = struct.Struct("<I")
_SIZES = struct.Struct("<IQI")  # bytes of one member's fit header, context and speculative state

Blob = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class _Stored:
    """One member's part of a stored state."""

    fit: bytes
    state: DraftState


class ChainDrafter:
    """`members` in the order in which they are asked; each has a name of its own."""

    def __init__(self, members: Sequence[Drafter]) -> None:
        self.name = ",".join(m.name for m in members)
        self.members = tuple(members)
        self.n_max = max(m.n_max for m in members)
        self.needs_checkpoints = any(m.needs_checkpoints for m in members)
        self.cannot_rebuild = "; ".join(f"{m.name}: {m.cannot_rebuild}" for m in members if m.cannot_rebuild)
        self.n_ctx_seq = min((m.n_ctx_seq for m in members if m.n_ctx_seq), default=0)
        self.model_identity = next((m.model_identity for m in members if m.model_identity), None)
        self._timed = tuple(m for m in members if m.n_ctx_seq)  # who decodes at all

    @property
    def decode_ns(self) -> int:
        return sum([m.decode_ns for m in self._timed])

    # -- in step with the target

    def begin(self, seq_id: int, tokens: Ints) -> None:
        for m in self.members:
            m.begin(seq_id, tokens)

    def settle(self, seq_id: int, tokens: Ints) -> None:
        for m in self.members:
            m.settle(seq_id, tokens)

    def process(self, batch: Batch) -> None:
        for m in self.members:
            m.process(batch)

    def may_be_free(self, seq_id: int, tokens: Ints, last_token: int) -> bool:
        return any([m.may_be_free(seq_id, tokens, last_token) for m in self.members])

    def may_skip(self, seq_id: int, n_tokens: int) -> bool:
        return all([m.may_skip(seq_id, n_tokens) for m in self.members])

    def accept(self, accepted: Sequence[Accepted]) -> None:
        for m in self.members:
            m.accept(accepted)

    def truncate(self, seq_id: int, n_tokens: int) -> None:
        for m in self.members:
            m.truncate(seq_id, n_tokens)

    def n_tokens(self, seq_id: int) -> int:
        return max(m.n_tokens(seq_id) for m in self.members)

    def rewind_floor(self, seq_id: int) -> int:
        return max(m.rewind_floor(seq_id) for m in self.members)

    def prompt_tokens(self, seq_id: int) -> int:
        return sum(m.prompt_tokens(seq_id) for m in self.members)

    # -- drafting

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(requests)
        for m in self.members:
            asked = [i for i, r in enumerate(requests) if not drafts[i].tokens and r.only in ("", m.name)]
            if asked:
                for i, draft in zip(asked, m.propose([requests[i] for i in asked]), strict=True):
                    drafts[i] = draft
        return drafts

    # -- state

    def fit(self, seq_id: int) -> bytes:
        fits = [orjson.Fragment(m.fit(seq_id)) for m in self.members]
        return fit_header.dump(KIND, {}, members=fits)

    def unfit(self, fit: bytes, n_tokens: int, context_size: int, spec_size: int) -> str | None:
        """None where at least one member can use its part; `apply` names the others."""
        header = fit_header.load(fit, KIND)
        if isinstance(header, str):
            return header
        stored = header.get("members")
        if not isinstance(stored, list):
            return "fit header without members"
        fits = [orjson.dumps(one) for one in stored]
        reasons = []
        for m in self.members:
            mine = next((one for one in fits if _kind(one) == m.name), None)
            reason = (
                "not in the file" if mine is None else m.unfit(mine, n_tokens, UNKNOWN_SIZE, UNKNOWN_SIZE)
            )
            if reason is None:
                return None
            reasons.append(f"{m.name}: {reason}")
        return "; ".join(reasons)

    def state_size(self, seq_id: int, *, partial: bool) -> int:
        return sum(m.state_size(seq_id, partial=partial) for m in self.members)

    def capture(self, seq_id: int, out: memoryview, *, partial: bool) -> DraftState:
        parts: list[_Stored] = []
        end = 0
        for m in self.members:
            size = m.state_size(seq_id, partial=partial)
            state = m.capture(seq_id, out[end : end + size], partial=partial)
            n = len(state.context)
            # A context may return less than it asked for, from anywhere in its room: close the gap.
            out[end : end + n] = state.context
            end += n
            parts.append(_Stored(m.fit(seq_id), state))
        return DraftState(out[:end], _pack(parts))

    def apply(self, seq_id: int, state: DraftState, tokens: Ints, *, partial: bool) -> str:
        """DraftStateError where no member could use its part."""
        parts = {_kind(part.fit): part for part in _unpack(state)} if len(state.spec) else {}
        reasons = []
        for m in self.members:
            reason = self._apply_to(m, seq_id, parts.get(m.name), tokens, partial=partial)
            if reason:
                m.truncate(seq_id, len(tokens) if partial else 0)
                reasons.append(f"{m.name}: {reason}")
        if len(reasons) == len(self.members):
            raise DraftStateError("; ".join(reasons))
        return "; ".join(reasons)

    def _apply_to(
        self, member: Drafter, seq_id: int, part: _Stored | None, tokens: Ints, *, partial: bool
    ) -> str:
        if part is None:
            if not partial:
                return "not in the file"
            return member.apply(seq_id, DraftState(b"", b""), tokens, partial=True)
        context, spec = part.state.context, part.state.spec
        # The sizes of a part-way state are its own; its maker checks them when it is applied.
        sizes = (UNKNOWN_SIZE, UNKNOWN_SIZE) if partial else (len(context), len(spec))
        try:
            return member.unfit(part.fit, len(tokens), *sizes) or member.apply(
                seq_id, part.state, tokens, partial=partial
            )
        except DraftStateError as e:
            return str(e)

    def close(self) -> None:
        for m in self.members:
            m.close()

    def set_threads(self, n_threads: int) -> None:
        for m in self.members:
            m.set_threads(n_threads)


def _kind(fit: bytes) -> str:
    try:
        header = orjson.loads(fit)
    except orjson.JSONDecodeError:
        return ""
    return str(header.get("kind")) if isinstance(header, dict) else ""


def _pack(parts: Sequence[_Stored]) -> bytes:
    """All sizes first, then fit header and speculative state of each; their contexts lie in the context block."""
    sizes = [_SIZES.pack(len(p.fit), len(p.state.context), len(p.state.spec)) for p in parts]
    blobs = [blob for p in parts for blob in (p.fit, bytes(p.state.spec))]
    return b"".join([_COUNT.pack(len(parts)), *sizes, *blobs])


def _unpack(state: DraftState) -> list[_Stored]:
    """DraftStateError where the lengths do not add up to the blocks."""
    context, spec = memoryview(state.context), memoryview(state.spec)
    try:
        (n,) = _COUNT.unpack_from(spec)
        at = _COUNT.size + n * _SIZES.size
        sizes = list(_SIZES.iter_unpack(spec[_COUNT.size : at]))
    except struct.error as e:
        raise DraftStateError(f"a chain's state whose table is cut off: {e}") from e
    n_context = sum(c for _, c, _ in sizes)
    if len(sizes) != n or at + sum(f + s for f, _, s in sizes) != len(spec) or n_context != len(context):
        raise DraftStateError("a chain's state whose lengths do not add up")
    parts, start = [], 0
    for n_fit, n_own, n_spec in sizes:
        end = at + n_fit + n_spec
        own = DraftState(context[start : start + n_own], spec[at + n_fit : end])
        parts.append(_Stored(bytes(spec[at : at + n_fit]), own))
        at, start = end, start + n_own
    return parts
