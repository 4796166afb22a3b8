"""Which parts of a batch may share a llama_decode, so that recurrent memory can still take drafted tokens back; pure.

llama keeps a recurrent sequence's snapshots in the row of its state. It splits a ragged batch into micro-batches,
and a micro-batch of several sequences first makes their rows neighbours: whatever stands between is moved, without
its snapshots. A sequence that was finished in an earlier micro-batch then rewinds to a wrong state, and llama says
True. (llama_memory_recurrent::find_slot moves rows; llama_batch_allocr::split_equal splits.)
"""

from __future__ import annotations

from collections.abc import Sequence

from spec_server.runtime.batch import Part


def is_safe(parts: Sequence[Part], n_ubatch: int, unified: bool) -> bool:
    """Whether one call keeps the snapshots of every part: no micro-batch of several comes after a finished one."""
    if len(parts) <= 2:
        return True
    n = parts[0].n_tokens
    return (
        n * len(parts) <= n_ubatch
        and all(part.n_tokens == n for part in parts)
        and (unified or _is_run([part.seq_id for part in parts]))
    )


def split(parts: Sequence[Part], n_ubatch: int, unified: bool) -> list[list[Part]]:
    """The calls to make, in order, for a batch that is not safe: only parts with drafted tokens keep snapshots.

    First what needs none, then at most one micro-batch of several sequences, then the rest one by one.
    """
    plain = [part for part in parts if not part.n_draft]
    drafted = [part for part in parts if part.n_draft]
    if not drafted:
        return [plain]
    group = _largest_group(drafted, n_ubatch, unified)
    alone = [[part] for part in drafted if part not in group]
    return [call for call in (plain, group, *alone) if call]


def _largest_group(parts: Sequence[Part], n_ubatch: int, unified: bool) -> list[Part]:
    """The most parts that surely make one micro-batch."""
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


def _is_run(ids: Sequence[int]) -> bool:
    return all(b == a + 1 for a, b in zip(ids, ids[1:], strict=False))
