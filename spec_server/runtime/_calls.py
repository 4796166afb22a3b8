"""Which parts of a batch may share a llama_decode, so that drafted tokens can be taken back afterwards; pure.

llama splits a batch into micro-batches, and a later one can spoil, in silence, what a rewind of an earlier
one needs:

- Recurrent memory keeps a sequence's snapshots in the row of its state. A micro-batch of several sequences
  first makes their rows neighbours; whatever stands between is moved, without its snapshots
  (llama_memory_recurrent::find_slot). A sequence that was finished before then rewinds to a wrong state.
- A sliding-window cache that sequences share gives the cells that a sequence has just left behind to the next
  micro-batch (llama_kv_cache::find_slot), though a rewind would need them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from spec_server.runtime.batch import Part

Calls = list[list[Part]]


def for_window(parts: Sequence[Part], n_ubatch: int) -> Calls | None:
    """The calls to make for a shared sliding-window cache, in order; None: one call for all does."""
    if len(parts) == 1 or sum([part.n_tokens for part in parts]) <= n_ubatch:
        return None
    plain = [part for part in parts if not part.n_draft]
    drafted = [part for part in parts if part.n_draft]
    return [plain, drafted] if plain and drafted else None


def for_snapshots(parts: Sequence[Part], n_ubatch: int, unified: bool) -> Calls | None:
    """The calls to make for recurrent memory, in order; None: one call for all keeps every part's snapshots.

    First what needs none, then at most one micro-batch of several sequences, then the rest one by one:
    only parts with drafted tokens keep snapshots then.
    """
    if _one_is_enough(parts, n_ubatch, unified):
        return None
    plain = [part for part in parts if not part.n_draft]
    drafted = [part for part in parts if part.n_draft]
    group = _largest_group(drafted, n_ubatch, unified)
    alone = [[part] for part in drafted if part not in group]
    return [call for call in (plain, group, *alone) if call]


def _one_is_enough(parts: Sequence[Part], n_ubatch: int, unified: bool) -> bool:
    """Whether no micro-batch of several sequences can come after one that finishes a sequence."""
    if len(parts) <= 2:
        return True
    n = parts[0].n_tokens
    return (
        n * len(parts) <= n_ubatch
        and all([part.n_tokens == n for part in parts])
        and (unified or all(b.seq_id == a.seq_id + 1 for a, b in pairwise(parts)))
    )


def _largest_group(parts: Sequence[Part], n_ubatch: int, unified: bool) -> list[Part]:
    """The most parts that surely make one micro-batch: of one length and, in streams, with ids in a row."""
    best: list[Part] = []
    for n in {part.n_tokens for part in parts}:
        run: list[Part] = []
        for part in sorted((p for p in parts if p.n_tokens == n), key=lambda p: p.seq_id):
            if not unified and run and part.seq_id != run[-1].seq_id + 1:
                run = []
            run = [*run, part][-max(1, n_ubatch // n) :]
            if len(run) > len(best):
                best = run
    return best
