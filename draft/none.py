"""NoDrafter: the absence of a drafter, so that nobody has to ask whether there is one."""

from __future__ import annotations

from collections.abc import Sequence

from draft.base import EMPTY_DRAFT, Accepted, Draft, DraftRequest, DraftState, Ints
from spec_server.runtime.batch import Batch


class NoDrafter:
    """Proposes nothing and keeps nothing."""

    name = "none"
    n_max = 0
    needs_checkpoints = False
    decode_ns = 0
    n_ctx_seq = 0
    model_identity: tuple[str, str] | None = None
    cannot_rebuild = ""

    def begin(self, seq_id: int, tokens: Ints) -> None:
        pass

    def settle(self, seq_id: int, tokens: Ints) -> None:
        pass

    def process(self, batch: Batch) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [EMPTY_DRAFT] * len(requests)

    def may_be_free(self, seq_id: int, tokens: Ints, last_token: int) -> bool:
        return False

    def may_skip(self, seq_id: int, n_tokens: int) -> bool:
        return True

    def accept(self, accepted: Sequence[Accepted]) -> None:
        pass

    def rewind_floor(self, seq_id: int) -> int:
        return 1

    def truncate(self, seq_id: int, n_tokens: int) -> None:
        pass

    def n_tokens(self, seq_id: int) -> int:
        return 0

    def fit(self, seq_id: int) -> bytes:
        return b""

    def unfit(self, fit: bytes, n_tokens: int, context_size: int, spec_size: int) -> str | None:
        return "this server runs without a drafter"

    def state_size(self, seq_id: int, *, partial: bool) -> int:
        return 0

    def capture(self, seq_id: int, out: memoryview, *, partial: bool) -> DraftState:
        return DraftState(b"", b"")

    def apply(self, seq_id: int, state: DraftState, tokens: Ints, *, partial: bool) -> str:
        return ""

    def prompt_tokens(self, seq_id: int) -> int:
        return 0

    def close(self) -> None:
        pass

    def set_threads(self, n_threads: int) -> None:
        pass
