"""Before the first request: touch the weights, and give the draft length rule its first step costs."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from draft.step_costs import StepCosts
from spec_server.runtime.batch import Batch
from spec_server.runtime.context import Context
from spec_server.runtime.model import Model

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
_ROUNDS = 2
_IN_A_ROW = 4
_SURE = 3  # observations that they count for


def warm_up(target: Context, model: Model) -> None:
    """One decode of one token, which leaves nothing behind; and every token's text, so that no step renders one."""
    _timed_decode(target, Batch(1), 1)
    for token in range(model.n_vocab):
        model.piece(token)


def measure_step_costs(target: Context, costs: StepCosts, budget_s: float = 1.0) -> None:
    """Decode a few small batches on an empty sequence; every size some times in a row, again while the budget lasts.

    The quickest of a size counts: whatever else a starting process does only ever makes a decode slower. Where even
    the first two of a size are always slower than that, changing the size is what takes the time.
    """
    sizes = [n for n in _SIZES if n <= target.n_batch and n < target.n_ctx_seq]
    batch = Batch(max(sizes))
    started = time.perf_counter()
    _timed_decode(target, batch, max(sizes))  # its buffers are new
    times: dict[int, list[list[float]]] = {n: [] for n in sizes}
    for _ in range(_ROUNDS):
        for n in sizes:
            times[n].append([_timed_decode(target, batch, n) for _ in range(_IN_A_ROW)])
        if time.perf_counter() - started > 0.5 * budget_s:
            break
    best = {n: min(map(min, rows)) for n, rows in times.items()}
    for n, ms in best.items():
        for _ in range(_SURE):
            costs.observe(n, ms)
    costs.change_takes([median(min(row[i] for row in times[n]) - best[n] for n in sizes) for i in (0, 1)])


def _timed_decode(target: Context, batch: Batch, n_tokens: int) -> float:
    """Milliseconds inside llama for one step over n_tokens tokens."""
    before = target.decode_ns
    batch.clear()
    batch.add(0, np.zeros(n_tokens, np.int32), 0, output="all")
    target.decode(batch)
    target.truncate(0, 0)
    return (target.decode_ns - before) / 1e6
