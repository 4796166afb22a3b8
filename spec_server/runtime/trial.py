"""A decode that leaves nothing behind, before the first request: it touches what a backend makes on first use."""

from __future__ import annotations

import numpy as np

from spec_server.runtime.batch import Batch, Output
from spec_server.runtime.context import Context


def trial_decode(context: Context, batch: Batch, n_tokens: int, output: Output) -> float:
    """Milliseconds inside llama for one step over n_tokens tokens of an empty sequence 0."""
    before = context.decode_ns
    batch.clear()
    batch.add(0, np.zeros(n_tokens, np.int32), 0, output=output)
    context.decode(batch)
    context.truncate(0, 0)
    return (context.decode_ns - before) / 1e6
