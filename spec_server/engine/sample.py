"""How one request picks its tokens and has its drafts drawn; knows neither slots nor drafters.

Random numbers are keyed by (seed, position, purpose), never by call order, so that neither a restore nor
other slots' traffic moves them. A request that names a seed gets a text that does not depend on drafts
either: target and draft look at the same noise (`verify.race`). One that names none gets accept-and-resample,
which accepts more, by a seed of the engine's own.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from draft.base import GREEDY_DRAFTING, Distribution, Draft, DraftSampling
from spec_server.engine import verify
from spec_server.engine.base import SamplingParams
from spec_server.runtime.context import Floats
from spec_server.runtime.errors import LlamaError
from spec_server.runtime.sampler import MAX_HISTORY, Ints, SamplerChain, argmax_rows

Rule = Literal["exact-match", "token", "block"]
DEFAULT_RULE: Rule = "block"

Accept = Callable[[verify.Target, Sequence[int], Sequence[Distribution], Callable[[int], float]], list[int]]
_ACCEPT: dict[Rule, Accept] = {"token": verify.accept_tokens, "block": verify.accept_block}


class TokenSampler(Protocol):
    """One request's way to its tokens.

    `position` is that of the first token to be picked; `history` [<= n_history] are the tokens right before it.
    """

    @property
    def seed(self) -> int: ...

    @property
    def n_history(self) -> int:
        """How many of the last tokens it wants to see."""

    def drafting(self, position: int, history: Ints) -> DraftSampling:
        """How a draft that begins at `position` is to be drawn."""

    def pick(self, logits: Floats, draft: Draft, position: int, history: Ints) -> list[int]:
        """The tokens of one round: the drafted ones that stand, then one recovered or bonus token.

        `logits` is [len(draft.tokens) + 1, n_vocab]; row i follows draft.tokens[:i], for `position` + i.
        """


@dataclass(frozen=True, slots=True)
class GreedySampler:
    """Temperature 0: a drafted token stands where it is the argmax of the tokens that are not banned."""

    banned: frozenset[int] = frozenset()
    seed: int = 0
    n_history: int = 0

    def drafting(self, position: int, history: Ints) -> DraftSampling:
        return GREEDY_DRAFTING

    def pick(self, logits: Floats, draft: Draft, position: int, history: Ints) -> list[int]:
        best = argmax_rows(logits)
        for i, token in enumerate(draft.tokens):
            if best[i] in self.banned:
                best[i] = self._best_allowed(logits[i])
            if best[i] != token:
                return best[: i + 1]
        if best[-1] in self.banned:
            best[-1] = self._best_allowed(logits[-1])
        return best

    def _best_allowed(self, row: Floats) -> int:
        """A copy of the one row, which is llama's own; no other row is ever touched."""
        row = row.copy()
        row[list(self.banned)] = -np.inf
        best = int(row.argmax())
        if best in self.banned:
            raise LlamaError("no token is left to sample from")
        return best


@dataclass(frozen=True, slots=True)
class MatchSampler:
    """The target picks each token by noise of its own; a drafted one stands where it is the pick.

    `is_coupled`: drafts are drawn by the same noise. Otherwise they are greedy, as llama-server's are.
    """

    chain: SamplerChain
    n_vocab: int
    seed: int
    n_history: int
    is_coupled: bool

    def drafting(self, position: int, history: Ints) -> DraftSampling:
        return _CoupledDrafting(self, position, history) if self.is_coupled else GREEDY_DRAFTING

    def pick(self, logits: Floats, draft: Draft, position: int, history: Ints) -> list[int]:
        target = _rows(self, logits, draft.tokens, history)
        return verify.match(target, draft.tokens, lambda i, p: verify.race(p, self.seed, position + i))


@dataclass(frozen=True, slots=True)
class _CoupledDrafting:
    sampler: MatchSampler
    position: int
    history: Ints
    is_greedy: bool = False

    def draw(self, logits: Floats, drafted: Sequence[int]) -> tuple[int, Distribution | None]:
        q = _proposal(self.sampler, logits, self.history, drafted)
        return verify.race(q, self.sampler.seed, self.position + len(drafted)), None


@dataclass(frozen=True, slots=True)
class AcceptSampler:
    """Speculative sampling: drafted tokens stand with a probability, and what is missing is drawn."""

    chain: SamplerChain
    n_vocab: int
    seed: int
    n_history: int
    accept: Accept

    def drafting(self, position: int, history: Ints) -> DraftSampling:
        return _KeyedDrafting(self, position, history)

    def pick(self, logits: Floats, draft: Draft, position: int, history: Ints) -> list[int]:
        target = _rows(self, logits, draft.tokens, history)
        # A drafter without a distribution could not have proposed anything else.
        proposals = draft.probs or [verify.point(token) for token in draft.tokens]
        return self.accept(
            target, draft.tokens, proposals, lambda i: verify.accept_number(self.seed, position, i)
        )


@dataclass(frozen=True, slots=True)
class _KeyedDrafting:
    sampler: AcceptSampler
    position: int
    history: Ints
    is_greedy: bool = False

    def draw(self, logits: Floats, drafted: Sequence[int]) -> tuple[int, Distribution | None]:
        q = _proposal(self.sampler, logits, self.history, drafted)
        number = verify.draft_number(self.sampler.seed, self.position, len(drafted))
        return verify.draw(q, number), q


def _rows(
    sampler: MatchSampler | AcceptSampler, logits: Floats, drafted: Sequence[int], history: Ints
) -> verify.Target:
    """The target's distributions, each computed once and not before it is asked for."""
    known: dict[int, Distribution] = {}

    def row(i: int) -> Distribution:
        if i not in known:
            known[i] = sampler.chain.apply(logits[i], _past(sampler, history, drafted[:i]))
        return known[i]

    return row


def _fitting(logits: Floats, n_vocab: int) -> Floats:
    """A draft model's row as one of the target's vocabulary: some models' files differ in tokens that never come."""
    if len(logits) == n_vocab:
        return logits
    missing = np.full(max(0, n_vocab - len(logits)), -np.inf, dtype=np.float32)
    return np.concatenate([logits[:n_vocab], missing])


def _proposal(
    sampler: MatchSampler | AcceptSampler, logits: Floats, history: Ints, drafted: Sequence[int]
) -> Distribution:
    """The draft model's distribution; where it leaves no token, one that nobody minds to see rejected."""
    try:
        return sampler.chain.apply(_fitting(logits, sampler.n_vocab), _past(sampler, history, drafted))
    except LlamaError:
        return verify.point(0)


def _past(sampler: MatchSampler | AcceptSampler, history: Ints, drafted: Sequence[int]) -> Ints:
    """Only penalties look back; without them there is nothing to copy."""
    if not drafted or not sampler.n_history:
        return history
    return np.concatenate([history, np.asarray(drafted, dtype=np.int32)])


def bans_everything(params: SamplingParams, n_vocab: int, suppressed: Sequence[int]) -> bool:
    """Whether biases and `suppressed` leave no token at all."""
    n_banned = sum(bias == -math.inf for _, bias in params.logit_bias)
    if n_banned + len(suppressed) < n_vocab:
        return False
    banned = {token for token, bias in params.logit_bias if bias == -math.inf}
    return len(banned.union(suppressed)) >= n_vocab


def make_sampler(
    params: SamplingParams, n_vocab: int, rule: Rule = DEFAULT_RULE, suppressed: Sequence[int] = ()
) -> TokenSampler:
    """Greedy where nothing but the best token can come out, else the whole chain. `suppressed` never come out."""
    logit_bias = (*params.logit_bias, *((token, -math.inf) for token in suppressed))
    has_penalties = (
        params.repeat_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )
    is_greedy = params.temperature <= 0.0 or params.top_k == 1
    if is_greedy and not has_penalties and all(bias == -math.inf for _, bias in logit_bias):
        return GreedySampler(frozenset(token for token, _ in logit_bias if 0 <= token < n_vocab))
    chain = SamplerChain(
        n_vocab,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        typ_p=params.typ_p,
        repeat_penalty=params.repeat_penalty,
        repeat_last_n=params.repeat_last_n,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=logit_bias,
    )
    n_history = 0
    if has_penalties:
        n_history = params.repeat_last_n if params.repeat_last_n >= 0 else MAX_HISTORY
    seed = secrets.randbits(32) if params.seed is None else params.seed
    if rule == "exact-match" or params.seed is not None:
        return MatchSampler(chain, n_vocab, seed, n_history, is_coupled=rule != "exact-match")
    return AcceptSampler(chain, n_vocab, seed, n_history, _ACCEPT[rule])
