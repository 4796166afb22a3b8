"""Drafts from text alone, without a model: what followed the last few tokens when they came up before.

`ngram-simple` looks in the slot's own text, `ngram-mod` in that and then in a pool that all slots feed. Both keep an
index in step with the slot token by token; it is a function of the slot's present text, so it is never stored: a
restored slot indexes its tokens again and drafts as the live one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from draft import fit as fit_header
from draft import ngram_pool
from draft.base import EMPTY_DRAFT, Accepted, Draft, DraftRequest, DraftState, DraftStateError, Ints
from draft.ngram_pool import NgramPool, PoolView
from draft.text_index import TextIndex
from spec_server.runtime.batch import Batch

_CANDIDATES = 16  # earlier occurrences that are compared; the longest of them is drafted from
_CATCH_UP = 4096  # tokens indexed in one step where the index lags


@dataclass(slots=True)
class _Verified:
    """A part with drafted tokens, until accept says how much of it stays."""

    pos0: int
    tokens: list[int]


class _NgramDrafter:
    """What both have in common: the slots' texts, kept in step. A text may lag behind its slot, never be ahead."""

    name = ""
    needs_checkpoints = False
    decode_ns = 0
    cannot_rebuild = ""
    n_ctx_seq = 0
    model_identity: tuple[str, str] | None = None

    def __init__(self, n_slots: int, n_gram: int, n_max: int, end: Set[int]) -> None:
        self.n_max = n_max
        self._end = end
        self._texts = [TextIndex(n_gram) for _ in range(n_slots)]
        self._verified: dict[int, _Verified] = {}

    # -- in step with the target

    def begin(self, seq_id: int, tokens: Ints) -> None:
        self._verified.pop(seq_id, None)
        self._texts[seq_id].cut(len(tokens))
        self._catch_up(seq_id, tokens)

    def settle(self, seq_id: int, tokens: Ints) -> None:
        self._catch_up(seq_id, tokens)

    def process(self, batch: Batch) -> None:
        for part in batch.parts:
            text = self._texts[part.seq_id]
            if part.n_tokens == 1 and len(text) == part.pos0:  # a plain step, which should cost little
                self._extend(part.seq_id, (int(batch.tokens[part.start]),))
                continue
            tokens = batch.tokens[part.start : part.start + part.n_tokens].tolist()
            if part.n_draft:
                self._verified[part.seq_id] = _Verified(part.pos0, tokens)
            else:
                self._read(part.seq_id, part.pos0, tokens)

    def may_skip(self, seq_id: int, n_tokens: int) -> bool:
        return seq_id not in self._verified

    def accept(self, accepted: Sequence[Accepted]) -> None:
        for item in accepted:
            part = self._verified.pop(item.seq_id, None)
            if part is not None:
                self._read(item.seq_id, part.pos0, part.tokens[: item.n_accepted + 1])

    def truncate(self, seq_id: int, n_tokens: int) -> None:
        self._verified.pop(seq_id, None)
        self._texts[seq_id].cut(n_tokens)

    def n_tokens(self, seq_id: int) -> int:
        return len(self._texts[seq_id])

    def rewind_floor(self, seq_id: int) -> int:
        return 1

    def prompt_tokens(self, seq_id: int) -> int:
        return 0

    def _read(self, seq_id: int, pos0: int, tokens: Sequence[int]) -> None:
        """Tokens at pos0 stand in the slot. A text that lags is left alone: _catch_up gets all tokens."""
        text = self._texts[seq_id]
        text.cut(pos0)
        if len(text) == pos0:
            self._extend(seq_id, tokens)

    def _catch_up(self, seq_id: int, tokens: Ints) -> bool:
        """Index some of what is missing of the slot's tokens [n]; True where nothing is."""
        have = len(self._texts[seq_id])
        if have < len(tokens):
            self._extend(seq_id, tokens[have : have + _CATCH_UP].tolist())
        return len(self._texts[seq_id]) == len(tokens)

    def _extend(self, seq_id: int, tokens: Iterable[int]) -> None:
        self._texts[seq_id].extend(tokens)

    # -- drafting

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._propose(r) for r in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        text = self._texts[request.seq_id]
        limit = min(request.n_max, self.n_max)
        if limit <= 0 or not self.may_be_free(request.seq_id, request.tokens, request.last_token):
            return EMPTY_DRAFT
        text.append(request.last_token)
        tokens, confidence, n_match = self._follow(text, request, limit)
        text.cut(len(request.tokens))
        for i, token in enumerate(tokens):
            if token in self._end:
                del tokens[i + 1 :]
                break
        if request.length is not None and tokens:
            one = n_match / (n_match + 1.0)
            del tokens[request.length.chooses(self.name, tokens, one) :]
            confidence = [one] * len(tokens)
        if len(tokens) < max(1, request.n_min):
            return EMPTY_DRAFT
        return Draft(tokens, self.name, confidence[: len(tokens)])

    def may_be_free(self, seq_id: int, tokens: Ints, last_token: int) -> bool:
        return self._catch_up(seq_id, tokens)

    def _follow(
        self, text: TextIndex, request: DraftRequest, limit: int
    ) -> tuple[list[int], list[float], int]:
        """At most `limit` tokens that may follow the text, estimates of their probability where p_min asks for some,
        and how many tokens matched before them."""
        raise NotImplementedError

    # -- state

    def state_size(self, seq_id: int, *, partial: bool) -> int:
        return 0

    def capture(self, seq_id: int, out: memoryview, *, partial: bool) -> DraftState:
        return DraftState(b"", b"")

    def apply(self, seq_id: int, state: DraftState, tokens: Ints, *, partial: bool) -> str:
        """A part-way state is a shorter text; a full one may be of any text."""
        self.truncate(seq_id, len(tokens) if partial else 0)
        self._extend(seq_id, tokens[len(self._texts[seq_id]) :].tolist())
        return ""

    def close(self) -> None:
        pass

    def set_threads(self, n_threads: int) -> None:
        pass


class NgramSimpleDrafter(_NgramDrafter):
    """Drafts what followed the longest earlier match of the text's end, in the slot's own text.

    At least `size_n` tokens must match, in at least `min_hits` places. A match of L tokens is worth a draft of L, at
    most `size_m`: a chance match costs little, and a copied passage soon gets the longest drafts. Where a length rule
    is given that decides, and L tokens that agreed make the next one agree with L / (L + 1), until the calibration
    knows better. A match that reaches the text's end goes on in the draft itself, so that a text which repeats itself
    is drafted in full.
    """

    name = "ngram-simple"

    def __init__(self, n_slots: int, *, size_n: int, size_m: int, min_hits: int, end: Set[int]) -> None:
        super().__init__(n_slots, size_n, size_m, end)
        self._min_hits = min_hits

    def may_be_free(self, seq_id: int, tokens: Ints, last_token: int) -> bool:
        return self._catch_up(seq_id, tokens) and self._texts[seq_id].may_recur(last_token)

    def _follow(
        self, text: TextIndex, request: DraftRequest, limit: int
    ) -> tuple[list[int], list[float], int]:
        most = max(text.n, limit)
        found: list[int] = []
        best = longest = 0
        for at in text.occurrences():
            found.append(at)
            n = text.match_length(at, most) if longest < most else 0
            if n > longest:
                best, longest = at, n
            if len(found) >= max(self._min_hits, _CANDIDATES) or (
                longest == most and len(found) >= self._min_hits and request.p_min <= 0.0
            ):
                break
        if not found or len(found) < self._min_hits:
            return [], [], 0
        n_tokens = limit if request.length is not None else min(longest, limit)
        tokens = _copy(text.tokens, best + 1, n_tokens)
        if request.p_min <= 0.0:
            return tokens, [], longest
        return (*_agreed(text.tokens, tokens, found, request.p_min), longest)

    def fit(self, seq_id: int) -> bytes:
        return fit_header.dump(self.name, {}, n_tokens=len(self._texts[seq_id]))

    def unfit(self, fit: bytes, n_tokens: int, context_size: int, spec_size: int) -> str | None:
        header = fit_header.load(fit, self.name)
        if isinstance(header, str):
            return header
        return fit_header.size("context", context_size, 0) or fit_header.size(
            "speculative state", spec_size, 0
        )


class NgramModDrafter(_NgramDrafter):
    """Drafts token by token what followed the last `n_match` tokens: in the slot's own text, else in the pool.

    A slot sees of the pool what other slots had put in when its conversation began; its own former texts are none
    of the present one, so they do not count. That view is the stored state. A draft of fewer than `n_min` tokens is
    not used, unless the request asks for fewer.
    """

    name = "ngram-mod"

    def __init__(
        self,
        n_slots: int,
        *,
        n_match: int,
        n_min: int,
        n_max: int,
        end: Set[int],
        n_vocab: int,
        pool_bits: int = 17,
    ) -> None:
        super().__init__(n_slots, n_match, n_max, end)
        self._n_min = n_min
        self._n_vocab = n_vocab
        self._pool = NgramPool(pool_bits)
        self._views: list[PoolView | None] = [None] * n_slots  # None: the next request begins a conversation
        self._lengths = [0] * n_slots  # of the text before anything was cut off it
        self._facts: dict[str, fit_header.Scalar] = {"n_match": n_match, "pool_bits": pool_bits}

    def begin(self, seq_id: int, tokens: Ints) -> None:
        super().begin(seq_id, tokens)
        # A slot that keeps less than half of its text talks about something else now.
        if self._views[seq_id] is None or 2 * len(tokens) < self._lengths[seq_id]:
            self._views[seq_id] = self._pool.view_for(seq_id)
        self._lengths[seq_id] = len(tokens)

    def truncate(self, seq_id: int, n_tokens: int) -> None:
        super().truncate(seq_id, n_tokens)
        if n_tokens == 0:
            self._views[seq_id] = None

    def _extend(self, seq_id: int, tokens: Iterable[int]) -> None:
        text, put = self._texts[seq_id], self._pool.put
        start = max(len(text), text.n)
        text.extend(tokens)
        for i in range(start, len(text)):
            put(text.keys[i - 1], text.tokens[i], seq_id)
        self._lengths[seq_id] = max(self._lengths[seq_id], len(text))

    def _follow(
        self, text: TextIndex, request: DraftRequest, limit: int
    ) -> tuple[list[int], list[float], int]:
        if len(text) < text.n or request.p_min > 0.5:  # seen once is as likely as not to come again
            return [], [], 0
        view = self._views[request.seq_id] or ngram_pool.NOTHING
        window = text.tokens[-text.n :].tolist()  # and then the draft
        key = text.keys[-1]
        while len(window) < text.n + limit:
            at = text.latest(key)
            token = text.tokens[at + 1] if at >= 0 else view.follower(key)
            if token < 0:
                break
            key = text.roll(key, token, window[-text.n])
            window.append(token)
        tokens = window[text.n :]
        if len(tokens) < min(self._n_min, limit):
            return [], [], 0
        return tokens, [], text.n

    # -- state

    def fit(self, seq_id: int) -> bytes:
        view = self._views[seq_id] or ngram_pool.NOTHING
        return fit_header.dump(
            self.name, self._facts, n_tokens=len(self._texts[seq_id]), n_entries=view.n_entries
        )

    def unfit(self, fit: bytes, n_tokens: int, context_size: int, spec_size: int) -> str | None:
        header = fit_header.load(fit, self.name)
        if isinstance(header, str):
            return header
        n_entries = header.get("n_entries")
        if not isinstance(n_entries, int) or n_entries < 0:
            return "fit header without a number of entries"
        return (
            fit_header.difference(header, self._facts)
            or fit_header.size("context", context_size, 0)
            or fit_header.size("speculative state", spec_size, ngram_pool.packed_size(n_entries))
        )

    def capture(self, seq_id: int, out: memoryview, *, partial: bool) -> DraftState:
        view = self._views[seq_id] or ngram_pool.NOTHING
        return DraftState(b"", b"" if partial else view.pack())

    def apply(self, seq_id: int, state: DraftState, tokens: Ints, *, partial: bool) -> str:
        if not partial:
            try:
                view = ngram_pool.unpack(state.spec, self._pool.bits, self._n_vocab)
            except ValueError as e:
                self.truncate(seq_id, 0)
                raise DraftStateError(str(e)) from e
        super().apply(seq_id, state, tokens, partial=partial)
        if not partial:
            self._views[seq_id] = view
            self._lengths[seq_id] = len(tokens)
        return ""


def _copy(tokens: Sequence[int], start: int, n: int) -> list[int]:
    """n tokens from `start` on, as if the text went on with them: past its end the copy reads itself."""
    copied = list(tokens[start : start + n])
    while len(copied) < n:
        copied.append(copied[len(copied) - (len(tokens) - start)])
    return copied


def _agreed(
    text: Sequence[int], tokens: list[int], found: Sequence[int], p_min: float
) -> tuple[list[int], list[float]]:
    """Of the draft what enough occurrences agree on: k of n agreeing make a probability of k / (n + 1)."""
    confidence: list[float] = []
    agreeing = list(found)
    for i, token in enumerate(tokens):
        agreeing = [at for at in agreeing if at + 1 + i >= len(text) or text[at + 1 + i] == token]
        p = len(agreeing) / (len(found) + 1)
        if p < p_min:
            break
        confidence.append(p)
    return tokens[: len(confidence)], confidence
