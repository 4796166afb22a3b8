"""The Drafter protocol and the plain data that crosses it; no drafter knows the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from draft.length import DraftLength
from spec_server.runtime.batch import Batch

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
# (ids [n], probs [n]): what a token was drawn from; each id once, probs summing to 1.
Distribution = tuple[npt.NDArray[Any], npt.NDArray[np.float64]]


class DraftError(Exception):
    """Base of this package's errors."""


class DraftSetupError(DraftError):
    """This drafter cannot serve this target; the message says why. Raised at start-up only."""


class DraftStateError(DraftError):
    """A verified state was refused on apply; the drafter's sequence is cold (empty) now."""


class DraftSampling(Protocol):
    """How the request samples at this place in its text; drafters with logits of their own draw by it."""

    @property
    def is_greedy(self) -> bool:
        """Always the most probable token: `draw` need not be asked."""

    def draw(self, logits: Floats, drafted: Sequence[int]) -> tuple[int, Distribution | None]:
        """The draft's next token from the drafter's logits [n_vocab] behind the tokens `drafted` so far.

        With it what it was drawn from, for Draft.probs; None where the verifier does not ask for it.
        """


class GreedyDrafting:
    """The absence of sampling."""

    is_greedy = True

    def draw(self, logits: Floats, drafted: Sequence[int]) -> tuple[int, Distribution | None]:
        return int(logits.argmax()), None


GREEDY_DRAFTING = GreedyDrafting()


@dataclass(slots=True)
class DraftRequest:
    """Ask for at most n_max tokens after `last_token`, which stands at position len(tokens) and is in no context yet.

    `tokens` is a view of the slot's tokens, [n], alive until the next step.
    """

    seq_id: int
    tokens: Ints
    last_token: int
    n_max: int
    n_min: int = 0
    p_min: float = 0.0
    sampling: DraftSampling = GREEDY_DRAFTING
    length: DraftLength | None = None  # None: as long as n_max and p_min allow
    only: str = ""  # the name of the one drafter that may answer; "": any


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens; may be empty. `confidence` is the drafter's own probability of each, where it has one; where
    tokens are drawn, that of the most probable one in the place.

    `probs` has for each token the distribution it was drawn from, and is empty where the tokens follow from the
    text alone. A draft with probs is verified as it was drawn. It may end before a draw, by anything that is known
    by then; whoever drops a token after its draw, or the draft because of what is in it, bends the distribution of
    the text.
    """

    tokens: list[int]
    drafter: str = ""
    confidence: list[float] = field(default_factory=list)
    probs: list[Distribution] = field(default_factory=list)


EMPTY_DRAFT = Draft([])
UNKNOWN_SIZE = -1


@dataclass(frozen=True, slots=True)
class Accepted:
    """Of a verified part of the last batch, the first `n_accepted` drafted tokens stay in the target. `n_stood`: with
    how many the target agreed; more, where the answer ends inside the draft."""

    seq_id: int
    n_accepted: int
    n_stood: int


@dataclass(frozen=True, slots=True)
class DraftState:
    """The drafter's state of one sequence; `context` may be a view into the caller's buffer."""

    context: bytes | bytearray | memoryview
    spec: bytes | bytearray | memoryview


class Drafter(Protocol):
    """Drafts for all slots; sequence ids are slot ids.

    The order of calls per sequence: begin, then process after each prompt chunk, then rounds of
    propose -> (the target decodes) -> process -> accept. Between steps the drafter stands where the target stands, or
    behind it by what it reads with its next draft.
    `process` gets every target batch before the next decode, since hidden rows are views, save what `may_skip` allows;
    a part whose n_draft is not 0 is settled by the `accept` that follows, whoever proposed it.
    """

    name: str
    n_max: int  # most tokens it will propose for one request
    needs_checkpoints: bool
    cannot_rebuild: str  # why a lost state does not come back from the tokens alone; "" where it does
    n_ctx_seq: int  # longest text it looks back on; 0 where it has no context of its own
    model_identity: tuple[str, str] | None  # (name, digest) of the model that drafts

    @property
    def decode_ns(self) -> int:
        """Wall time inside llama_decode so far."""

    def begin(self, seq_id: int, tokens: Ints) -> None:
        """A request starts; `tokens` [n] is what the target keeps of the sequence before prefill."""

    def settle(self, seq_id: int, tokens: Ints) -> None:
        """Read now what the next draft would read of `tokens` [n], the target's; before a capture."""

    def process(self, batch: Batch) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order."""

    def may_be_free(self, seq_id: int, tokens: Ints, last_token: int) -> bool:
        """A quick look: could it draft at no cost behind the sequence's `tokens` [n] and `last_token`? Who drafts from
        text reads for that what it lacks of them."""

    def may_skip(self, seq_id: int, n_tokens: int) -> bool:
        """May the plain steps from this one on be kept from `process` until the sequence's next `propose`? It holds
        n_tokens now; True is also a promise to read them then, as what was left out by choice."""

    def accept(self, accepted: Sequence[Accepted]) -> None:
        """Settle every part of the last batch that had n_draft > 0."""

    def rewind_floor(self, seq_id: int) -> int: ...

    def truncate(self, seq_id: int, n_tokens: int) -> None:
        """Keep the first n_tokens; where that is out of reach the sequence becomes cold. Never raises."""

    def n_tokens(self, seq_id: int) -> int:
        """Tokens whose state it holds; the target's count, or less where it is cold or windowed."""

    def fit(self, seq_id: int) -> bytes:
        """The fit header of this sequence's present state: JSON that `unfit` of a like drafter can judge."""

    def unfit(self, fit: bytes, n_tokens: int, context_size: int, spec_size: int) -> str | None:
        """None where a stored state fits this drafter, else the one reason why not. Touches nothing.

        `n_tokens` is how many the target holds of the sequence; a size of UNKNOWN_SIZE is judged by apply only.
        """

    def state_size(self, seq_id: int, *, partial: bool) -> int:
        """Buffer bytes that capture needs."""

    def capture(self, seq_id: int, out: memoryview, *, partial: bool) -> DraftState: ...

    def apply(self, seq_id: int, state: DraftState, tokens: Ints, *, partial: bool) -> str:
        """Replace the sequence's state; `tokens` [n] are those it stands for. DraftStateError: cold.

        Returns what of it had to be left out and why, "" where nothing was.
        """

    def prompt_tokens(self, seq_id: int) -> int:
        """Prompt tokens that the drafter itself processed since begin."""

    def set_threads(self, n_threads: int) -> None:
        """From its next decode on."""

    def close(self) -> None: ...
