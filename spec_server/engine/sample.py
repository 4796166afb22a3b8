"""Which token the target picks, row by row; knows neither slots nor drafts.

Random numbers are keyed by (seed, position), never by call order, so that neither a draft's length nor a restore
nor other slots' traffic moves them.
"""

from __future__ import annotations

import secrets
from typing import Protocol

import numpy as np
import numpy.typing as npt

from spec_server.engine.base import SamplingParams
from spec_server.runtime.sampler import SamplerChain, keyed_uniform

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class TokenSampler(Protocol):
    seed: int
    n_history: int  # how many of the last tokens it wants to see

    def pick(self, logits: Floats, draft: list[int], position: int, history: Ints) -> list[int]:
        """The tokens of one round: the drafted ones that stand, then one recovered or bonus token.

        `logits` is [len(draft) + 1, n_vocab]; row i follows draft[:i] and is for `position` + i. `history` [<=
        n_history] are the tokens right before `position`.
        """


class GreedySampler:
    """Temperature 0: a drafted token stands where it is the argmax."""

    seed = 0
    n_history = 0

    def pick(self, logits: Floats, draft: list[int], position: int, history: Ints) -> list[int]:
        best: list[int] = logits.argmax(axis=1).tolist()
        for i, token in enumerate(draft):
            if best[i] != token:
                return best[: i + 1]
        return best


class ExactMatchSampler:
    """The target samples each position from its own chain; a drafted token stands where it is the sampled one."""

    def __init__(self, chain: SamplerChain, seed: int, n_history: int) -> None:
        self._chain = chain
        self.seed = seed
        self.n_history = n_history

    def pick(self, logits: Floats, draft: list[int], position: int, history: Ints) -> list[int]:
        tokens: list[int] = []
        for i in range(len(draft) + 1):
            past = np.concatenate([history, np.asarray(draft[:i], dtype=np.int32)]) if i else history
            ids, probs = self._chain.apply(logits[i], past)
            at = int(np.searchsorted(np.cumsum(probs), keyed_uniform(self.seed, position + i), side="right"))
            tokens.append(int(ids[min(at, len(ids) - 1)]))
            if i < len(draft) and tokens[-1] != draft[i]:
                break
        return tokens


def make_sampler(params: SamplingParams, n_vocab: int) -> TokenSampler:
    """Greedy where nothing but the argmax can come out, else the whole chain."""
    has_penalties = (
        params.repeat_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )
    if params.temperature <= 0.0 and not params.logit_bias and not has_penalties:
        return GreedySampler()
    seed = secrets.randbits(32) if params.seed is None else params.seed
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
        logit_bias=params.logit_bias,
    )
    return ExactMatchSampler(chain, seed, max(0, params.repeat_last_n) if has_penalties else 0)
