"""Placeholder until the real one lands; overwrite me."""

from __future__ import annotations

import numpy as np


class SamplerChain:
    def __init__(self, n_vocab, **params):
        self.n_vocab, self.params = n_vocab, params

    def apply(self, logits, history):
        t = max(self.params["temperature"], 1e-6)
        x = logits.astype(np.float64)
        k = self.params["top_k"] or len(x)
        ids = np.argsort(-x)[:k]
        p = np.exp((x[ids] - x[ids[0]]) / t)
        return ids, p / p.sum()


def keyed_uniform(seed, position, stream=0):
    return float(np.random.Generator(np.random.Philox(key=seed, counter=[position, stream, 0, 0])).random())
