"""Before the first request: touch the weights, and give the draft length rule its first step costs."""

from __future__ import annotations

import time
from statistics import median

from draft.step_costs import StepCosts
from spec_server.runtime.batch import Batch
from spec_server.runtime.context import Context
from spec_server.runtime.model import Model
from spec_server.runtime.trial import trial_decode

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
_ROUNDS = 2
_IN_A_ROW = 4
_SURE = 3  # observations that they count for


def warm_up(target: Context, model: Model) -> None:
    """One decode of one token, which leaves nothing behind; and every token's text and whether it is an
    end, so that no step finds that out."""
    trial_decode(target, Batch(1), 1, "all")
    for token in range(model.n_vocab):
        model.piece(token)
    model.is_eog(0)  # asks about all of them once


def measure_step_costs(target: Context, costs: StepCosts, budget_s: float = 1.0) -> None:
    """Decode a few small batches on an empty sequence; every size some times in a row, again while the budget lasts.

    The quickest of a size counts: whatever else a starting process does only ever makes a decode slower. Where even
    the first two of a size are always slower than that, changing the size is what takes the time.
    """
    sizes = [n for n in _SIZES if n <= target.n_batch and n < target.n_ctx_seq]
    batch = Batch(max(sizes))
    started = time.perf_counter()
    trial_decode(target, batch, max(sizes), "all")  # its buffers are new
    times: dict[int, list[list[float]]] = {n: [] for n in sizes}
    for _ in range(_ROUNDS):
        for n in sizes:
            times[n].append([trial_decode(target, batch, n, "all") for _ in range(_IN_A_ROW)])
        if time.perf_counter() - started > 0.5 * budget_s:
            break
    best = {n: min(map(min, rows)) for n, rows in times.items()}
    for n, ms in best.items():
        for _ in range(_SURE):
            costs.observe(n, ms)
    costs.change_takes([median(min(row[i] for row in times[n]) - best[n] for n in sizes) for i in (0, 1)])
