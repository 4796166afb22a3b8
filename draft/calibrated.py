"""A drafter, or a chain, with what is known of its confidence: learns from every verified draft, and stores it.

Everything else is the inner drafter's. Where a length rule is given its drafts are as long as that says; without
one they are as long as the request allows, and nothing is learnt.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import orjson

from draft.base import Accepted, Draft, Drafter, DraftRequest, DraftState, Ints
from draft.calibration import Calibration
from draft.length import DraftLength
from draft.window import LengthPolicy
from spec_server.runtime.batch import Batch

_HEAD = struct.Struct("<4sI")  # magic, bytes of all calibrations behind it
_MAGIC = b"CAL3"
_KIND = _MAGIC[:3]  # of another version the length is read, and no more
_FIELD = "calibration_bytes"
_FROM_OTHERS = 6.0  # observations that a new text takes over from those before it, by cell

Blob = bytes | bytearray | memoryview


class CalibratedDrafter:
    """`members` are the names under which drafts come; `policy` None: fixed lengths."""

    def __init__(
        self, inner: Drafter, members: Sequence[str], n_slots: int, policy: LengthPolicy | None = None
    ) -> None:
        self.inner = inner
        self.policy = policy
        self.name = inner.name
        self.n_max = inner.n_max
        self.needs_checkpoints = inner.needs_checkpoints
        self.cannot_rebuild = inner.cannot_rebuild
        self.n_ctx_seq = inner.n_ctx_seq
        self.model_identity = inner.model_identity
        self._overall = {name: Calibration() for name in members}  # over all texts: where a new one begins
        self._calibrations: list[dict[str, Calibration]] = [{}] * n_slots
        self._lengths: list[DraftLength | None] = [None] * n_slots
        for seq_id in range(n_slots):
            self._set(seq_id, self._fresh())
        self._proposed: dict[int, Draft] = {}

    def _fresh(self) -> dict[str, Calibration]:
        return {name: overall.start_text(_FROM_OTHERS) for name, overall in self._overall.items()}

    def _set(self, seq_id: int, calibrations: dict[str, Calibration]) -> None:
        self._calibrations[seq_id] = calibrations
        if self.policy is not None:
            self._lengths[seq_id] = DraftLength(self.policy, calibrations, seq_id)

    @property
    def decode_ns(self) -> int:
        return self.inner.decode_ns

    # -- drafting

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        policy = self.policy
        if policy is None:
            return self.inner.propose(requests)
        for request in requests:
            request.length = length = self._lengths[request.seq_id]
            if length is not None:
                length.read(request.tokens, request.last_token)
        drafts = self.inner.propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            self._proposed[request.seq_id] = draft
        return drafts

    def may_be_free(self, seq_id: int, tokens: Ints, last_token: int) -> bool:
        return self.inner.may_be_free(seq_id, tokens, last_token)

    def may_skip(self, seq_id: int, n_tokens: int) -> bool:
        return self.inner.may_skip(seq_id, n_tokens)

    def accept(self, accepted: Sequence[Accepted]) -> None:
        self.inner.accept(accepted)
        if self.policy is None:
            return
        for item in accepted:
            draft = self._proposed.pop(item.seq_id, None)
            length = self._lengths[item.seq_id]
            if draft is not None and draft.tokens and length is not None:
                self._calibrations[item.seq_id][draft.drafter].learn(draft.confidence, item.n_stood)
                length.stood(item.n_stood)

    # -- state

    def fit(self, seq_id: int) -> bytes:
        inner = self.inner.fit(seq_id)
        if not inner:
            return inner
        return orjson.dumps({**orjson.loads(inner), _FIELD: len(self._pack(seq_id))})

    def unfit(self, fit: bytes, n_tokens: int, context_size: int, spec_size: int) -> str | None:
        return self.inner.unfit(fit, n_tokens, context_size, spec_size - _calibration_bytes(fit, spec_size))

    def state_size(self, seq_id: int, *, partial: bool) -> int:
        return self.inner.state_size(seq_id, partial=partial)

    def capture(self, seq_id: int, out: memoryview, *, partial: bool) -> DraftState:
        state = self.inner.capture(seq_id, out, partial=partial)
        if partial:
            return state
        return DraftState(state.context, self._pack(seq_id) + bytes(state.spec))

    def apply(self, seq_id: int, state: DraftState, tokens: Ints, *, partial: bool) -> str:
        if partial:
            return self.inner.apply(seq_id, state, tokens, partial=True)
        calibrations, spec = self._unpack(state.spec)
        self._set(seq_id, self._fresh())  # holds where the rest of the state is refused
        left_out = self.inner.apply(seq_id, DraftState(state.context, spec), tokens, partial=False)
        self._set(seq_id, calibrations)
        return left_out

    def _pack(self, seq_id: int) -> bytes:
        body = b"".join(
            bytes([len(name)]) + name.encode() + calibration.pack()
            for name, calibration in self._calibrations[seq_id].items()
        )
        return _HEAD.pack(_MAGIC, len(body)) + body

    def _unpack(self, spec: Blob) -> tuple[dict[str, Calibration], Blob]:
        """Calibrations of the members that run here, and what is behind them. Bytes that are none count as none."""
        calibrations = self._fresh()
        view = memoryview(spec)
        if len(view) < _HEAD.size or bytes(view[:3]) != _KIND:
            return calibrations, view
        magic, n_bytes = _HEAD.unpack_from(view)
        body, rest = view[_HEAD.size : _HEAD.size + n_bytes], view[_HEAD.size + n_bytes :]
        if magic != _MAGIC:
            return calibrations, rest
        while len(body) > Calibration.n_bytes:
            end = 1 + body[0]
            name, packed = (
                bytes(body[1:end]).decode("utf-8", "replace"),
                body[end : end + Calibration.n_bytes],
            )
            body = body[end + Calibration.n_bytes :]
            if name in calibrations:
                try:
                    calibrations[name].unpack(packed)
                except ValueError:
                    break
        return calibrations, rest

    # -- the inner drafter's

    def begin(self, seq_id: int, tokens: Ints) -> None:
        if not len(tokens):
            self._set(seq_id, self._fresh())
        length = self._lengths[seq_id]
        if length is not None:
            length.begin()
        self.inner.begin(seq_id, tokens)

    def settle(self, seq_id: int, tokens: Ints) -> None:
        self.inner.settle(seq_id, tokens)

    def process(self, batch: Batch) -> None:
        self.inner.process(batch)

    def rewind_floor(self, seq_id: int) -> int:
        return self.inner.rewind_floor(seq_id)

    def truncate(self, seq_id: int, n_tokens: int) -> None:
        if n_tokens == 0:
            self._set(seq_id, self._fresh())
        self.inner.truncate(seq_id, n_tokens)

    def n_tokens(self, seq_id: int) -> int:
        return self.inner.n_tokens(seq_id)

    def prompt_tokens(self, seq_id: int) -> int:
        return self.inner.prompt_tokens(seq_id)

    def set_threads(self, n_threads: int) -> None:
        self.inner.set_threads(n_threads)

    def close(self) -> None:
        self.inner.close()


def _calibration_bytes(fit: bytes, spec_size: int) -> int:
    """How much of a stored speculative state the calibrations take; 0 where the header does not say so."""
    try:
        n = orjson.loads(fit).get(_FIELD, 0)
    except (orjson.JSONDecodeError, AttributeError):
        return 0
    return n if isinstance(n, int) and 0 <= n <= spec_size else 0
