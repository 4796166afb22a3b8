"""From a row of logits to the few tokens that may come out and their probabilities; draws nothing itself.

The chain is llama.cpp's, in llama-server's order. Only its first step is ours: where top-k is on, what cannot
be among the k best never enters the candidate array.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from spec_server.runtime._native import function, lib
from spec_server.runtime.errors import LlamaError
from spec_server.runtime.keyed_random import keyed_uniform, keyed_uniforms

__all__ = ["SamplerChain", "argmax_rows", "keyed_uniform", "keyed_uniforms"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Doubles = npt.NDArray[np.float64]

MAX_HISTORY = 65536  # of repeat_last_n below 0, which asks for everything

_MOST_LOOKS = 4
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_pointer = ctypes.c_void_p
_apply = function("llama_sampler_apply", None, _pointer, _pointer)
_accept = function("llama_sampler_accept", None, _pointer, ctypes.c_int32)
_reset = function("llama_sampler_reset", None, _pointer)


def argmax_rows(logits: Floats) -> list[int]:
    """Greedy tokens, one for each row of logits [n, n_vocab]; the lowest id where several are equal."""
    best: list[int] = logits.argmax(axis=1).tolist()
    return best


@lru_cache(maxsize=4)
def _all_ids(n_vocab: int) -> Ints:
    ids: Ints = np.arange(n_vocab, dtype=np.int32)
    ids.flags.writeable = False
    return ids


class SamplerChain:
    """One request's sampling, without a moving state: the history is given with every call.

    Names and off values are llama-server's: top_k <= 0, top_p >= 1, min_p <= 0, typ_p >= 1, repeat_penalty 1.
    With temperature <= 0 only the best token is left. Close it, or let it go.
    """

    def __init__(
        self,
        n_vocab: int,
        *,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typ_p: float = 1.0,
        repeat_penalty: float = 1.0,
        repeat_last_n: int = 64,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Sequence[tuple[int, float]] = (),
    ) -> None:
        self._chain: Any = None
        self._n_vocab = n_vocab
        self._top_k = top_k if 0 < top_k < n_vocab else 0
        self._n_history = repeat_last_n if repeat_last_n >= 0 else MAX_HISTORY
        if (repeat_penalty, presence_penalty, frequency_penalty) == (1.0, 0.0, 0.0):
            self._n_history = 0
        bias = [(int(token), float(value)) for token, value in logit_bias if 0 <= token < n_vocab]
        self._biased: Ints = np.array([token for token, _ in bias], np.int32)
        self._width = np.float32(8.0)  # how far below the best logit the last row's k best were found
        self._all_ids = _all_ids(n_vocab)
        self._array = lib.llama_token_data_array()
        self._array_at = ctypes.addressof(self._array)
        self._candidates = np.zeros(0, _CANDIDATE)

        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        self._chain = chain
        if bias:
            biases = (lib.llama_logit_bias * len(bias))(*bias)
            self._add(lib.llama_sampler_init_logit_bias(n_vocab, len(bias), biases))
        if self._n_history:
            self._add(
                lib.llama_sampler_init_penalties(
                    n_vocab, self._n_history, repeat_penalty, frequency_penalty, presence_penalty
                )
            )
        self._add(lib.llama_sampler_init_top_k(top_k))
        self._add(lib.llama_sampler_init_typical(typ_p, 0))
        self._add(lib.llama_sampler_init_top_p(top_p, 0))
        self._add(lib.llama_sampler_init_min_p(min_p, 0))
        self._add(lib.llama_sampler_init_temp(temperature))

    def _add(self, sampler: Any) -> None:
        lib.llama_sampler_chain_add(self._chain, sampler)  # the chain owns it now

    def _room(self, n: int) -> npt.NDArray[Any]:
        if n > len(self._candidates):
            self._candidates = np.zeros(2 * n, _CANDIDATE)
            self._array.data = ctypes.cast(self._candidates.ctypes.data, lib.llama_token_data_p)
        return self._candidates[:n]

    def apply(self, logits: Floats, history: Ints) -> tuple[Ints, Doubles]:
        """(ids [n] ascending, probabilities [n], adding up to 1) of the tokens that logits [n_vocab] leave.

        `history` [m] are the tokens right before, oldest first; penalties look at the last repeat_last_n. Ids
        ascend, so that a last-bit change of a logit moves a cumulative sum by no more than a last bit.
        LlamaError: a row with NaN.
        """
        history = history[-self._n_history :] if self._n_history else history[:0]
        ids = self._all_ids
        if self._top_k:
            ids = self._survivors(logits, history)
        candidates = self._room(len(ids))
        candidates["id"] = ids
        candidates["logit"] = logits if ids is self._all_ids else logits[ids]
        array = self._array
        array.size = len(ids)
        array.selected = -1
        array.sorted = False
        if self._n_history:
            _reset(self._chain)
            for token in history.tolist():
                _accept(self._chain, token)
        _apply(self._chain, self._array_at)
        return self._normalised(candidates[: array.size])

    def _survivors(self, logits: Floats, history: Ints) -> Ints:
        """Ascending ids, the k best after biases and penalties among them; exact but for ties."""
        touched = np.concatenate((self._biased, history)) if len(history) else self._biased
        # what a bias or a penalty touches may leave the k best, and lets others in
        n = self._top_k + len(touched)
        if n * 4 > self._n_vocab:
            return self._all_ids
        ids = self._best(logits, n)
        if len(touched):
            return np.union1d(ids, touched)
        return ids

    def _best(self, logits: Floats, n: int) -> Ints:
        """At least the `n` best ids of a row, ascending, and not many more."""
        best = logits.max()
        if best != best:
            raise LlamaError("the logits hold NaN")
        # A look over the row costs a tenth of sorting it by parts, so the band is rather too wide than too narrow.
        ids = np.flatnonzero(logits >= best - self._width)
        for _ in range(_MOST_LOOKS):
            if len(ids) >= n:
                break
            self._width = min(self._width * np.float32(1.5), np.float32(1e4))
            ids = np.flatnonzero(logits >= best - self._width)
        if len(ids) < n:
            ids = np.argpartition(logits, len(logits) - n)[len(logits) - n :]
            ids.sort()
        elif len(ids) > 4 * n:
            if len(ids) > 32 * n:
                self._width *= np.float32(0.9)
            row = logits[ids]
            ids = ids[row >= np.partition(row, len(row) - n)[len(row) - n]]
        return ids.astype(np.int32)

    @staticmethod
    def _normalised(left: npt.NDArray[Any]) -> tuple[Ints, Doubles]:
        logits = left["logit"].astype(np.float64)
        best = logits.max()
        if best == -np.inf:
            raise LlamaError("no token is left to sample from")
        # Sums of huge biases and penalties overflow: what is infinite then is all there is, evenly.
        weights = np.exp(logits - best) if np.isfinite(best) else (logits == best).astype(np.float64)
        if not weights.any():
            raise LlamaError("no token is left to sample from")
        order = np.argsort(left["id"])
        ids: Ints = left["id"][order]
        weights = weights[order]
        if not weights.all():  # temperature 0 and biases of -inf leave impossible tokens
            ids, weights = ids[weights > 0], weights[weights > 0]
        return ids, weights / weights.sum()

    def close(self) -> None:
        """Free the chain. May be called twice."""
        if self._chain is not None:
            lib.llama_sampler_free(self._chain)
            self._chain = None

    def __del__(self) -> None:
        if getattr(self, "_chain", None) is not None:
            self.close()
