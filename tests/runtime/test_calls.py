"""Which parts may share a llama_decode."""

from __future__ import annotations

import pytest

from spec_server.runtime import _calls
from spec_server.runtime.batch import Part

Shape = tuple[int, int, bool]  # sequence, tokens, drafted


def parts_of(*shapes: Shape) -> list[Part]:
    return [Part(seq_id, 0, n, 0, n - 1 if drafted else 0, 0, 1) for seq_id, n, drafted in shapes]


def ids_of(planned: _calls.Calls | None) -> list[list[int]] | None:
    return None if planned is None else [[part.seq_id for part in call] for call in planned]


@pytest.mark.parametrize(
    ("shapes", "unified", "calls"),
    [
        # one call is enough
        ([(0, 5, True)], True, None),
        ([(0, 5, True), (2, 3, True)], True, None),
        ([(0, 512, False), (2, 3, True)], False, None),
        ([(0, 5, True), (1, 5, True), (2, 5, True)], False, None),
        ([(0, 5, True), (1, 5, True), (3, 5, True)], True, None),
        # in streams a micro-batch holds neighbours only, and in order
        ([(0, 5, True), (1, 5, True), (3, 5, True)], False, [[0, 1], [3]]),
        ([(1, 5, True), (0, 5, True), (2, 5, True)], False, [[0, 1, 2]]),
        # ragged: the largest group of one length first
        ([(1, 4, True), (0, 5, True), (2, 5, True)], True, [[0, 2], [1]]),
        ([(0, 2, True), (1, 3, True), (2, 4, True)], True, [[0], [1], [2]]),
        # what has no draft needs no snapshots and comes before
        ([(0, 5, True), (1, 9, False), (2, 5, True), (3, 1, False)], True, [[1, 3], [0, 2]]),
        ([(0, 3, False), (1, 4, False), (2, 5, False)], True, [[0, 1, 2]]),
        # a group is no larger than a micro-batch
        ([(s, 20, True) for s in range(4)], True, [[0, 1, 2], [3]]),
    ],
)
def test_recurrent_memory(shapes: list[Shape], unified: bool, calls: list[list[int]] | None) -> None:
    planned = _calls.for_snapshots(parts_of(*shapes), 64, unified)
    assert ids_of(planned) == calls


@pytest.mark.parametrize(
    ("shapes", "calls"),
    [
        ([(0, 60, False), (1, 4, True)], None),
        ([(0, 61, False), (1, 4, True)], [[0], [1]]),
        ([(1, 4, True), (0, 61, False), (2, 3, True)], [[0], [1, 2]]),
        ([(0, 100, False)], None),
        ([(0, 61, False), (1, 4, False)], None),
        ([(0, 61, True), (1, 4, True)], None),
    ],
)
def test_a_shared_window(shapes: list[Shape], calls: list[list[int]] | None) -> None:
    planned = _calls.for_window(parts_of(*shapes), 64)
    assert ids_of(planned) == calls
