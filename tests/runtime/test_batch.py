"""Batch: rows, parts and the C struct that llama reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spec_server.runtime.batch import Batch, Output, Part
from spec_server.runtime.errors import BatchError


def test_rows_hold_what_was_added() -> None:
    batch = Batch(16)
    assert batch.add(2, [7, 8, 9], 5, output="last") == Part(2, 0, 3, 5, 0, 0, 1)
    assert batch.add(0, np.array([4], np.int32), 0, output="all") == Part(0, 3, 1, 0, 0, 1, 1)
    assert batch.add(1, [1, 2, 3], 10, output="all", n_draft=2) == Part(1, 4, 3, 10, 2, 2, 3)
    assert batch.add(3, [6], 1, output="none") == Part(3, 7, 1, 1, 0, 5, 0)
    assert (batch.n_tokens, batch.n_outputs, batch.room) == (8, 5, 8)
    assert batch.tokens[:8].tolist() == [7, 8, 9, 4, 1, 2, 3, 6]
    assert batch.pos[:8].tolist() == [5, 6, 7, 0, 10, 11, 12, 1]
    assert batch.seq_id[:8].tolist() == [2, 2, 2, 0, 1, 1, 1, 3]
    assert batch.logits[:8].tolist() == [0, 0, 1, 1, 1, 1, 1, 0]


def test_llama_sees_the_rows() -> None:
    batch = Batch(4)
    batch.add(3, [7, 8], 5)
    c = batch._c
    rows = [(c.token[i], c.pos[i], c.n_seq_id[i], c.seq_id[i][0], c.logits[i]) for i in range(2)]
    assert rows == [(7, 5, 1, 3, 0), (8, 6, 1, 3, 1)]
    assert not c.embd


def test_a_batch_with_hidden_rows_carries_both() -> None:
    batch = Batch(4, n_embd=3)
    batch.add(0, [7], 0)
    batch.embd[0] = [1, 2, 3]
    assert [batch._c.embd[i] for i in range(3)] == [1, 2, 3]
    assert batch._c.token[0] == 7


@pytest.mark.parametrize(("n", "output"), [(1, "none"), (1, "last"), (1, "all"), (5, "none"), (5, "all")])
def test_a_used_row_keeps_nothing_of_its_past(n: int, output: Output) -> None:
    """`clear` touches no array, so `add` has to write every field of its rows."""
    used, fresh = Batch(8), Batch(8)
    used.add(6, [99] * 8, 50, output="all")
    used.clear()
    for batch in (used, fresh):
        batch.add(1, list(range(1, n + 1)), 3, output=output)
    for name in ("tokens", "pos", "seq_id", "logits"):
        assert getattr(used, name)[:n].tolist() == getattr(fresh, name)[:n].tolist()


def test_clear_leaves_handed_out_parts_alone() -> None:
    batch = Batch(4)
    batch.add(0, [1], 0)
    parts = batch.parts
    batch.clear()
    assert len(parts) == 1
    assert (batch.parts, batch.n_tokens, batch.n_outputs, batch.room) == ([], 0, 0, 4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": []}, "0 tokens"),
        ({"tokens": [1] * 5}, "5 tokens"),
        ({"tokens": [2**31]}, "not token ids"),
        ({"tokens": [1, 2**40]}, "not token ids"),
        ({"tokens": ["a"]}, "not token ids"),
        ({"pos0": -1}, "out of range"),
        ({"seq_id": -1}, "out of range"),
        ({"n_draft": 2}, "out of range"),
        ({"n_draft": -1}, "out of range"),
    ],
)
def test_a_refused_part_leaves_the_batch_alone(change: dict[str, Any], why: str) -> None:
    batch = Batch(8)
    batch.add(0, [1, 2, 3, 4], 0)
    call: dict[str, Any] = {"seq_id": 1, "tokens": [5], "pos0": 0, "n_draft": 0, **change}
    with pytest.raises(BatchError, match=why):
        batch.add(call["seq_id"], call["tokens"], call["pos0"], n_draft=call["n_draft"])
    assert (batch.n_tokens, batch.n_outputs, len(batch.parts)) == (4, 1, 1)


def test_it_fills_to_the_last_row() -> None:
    batch = Batch(3)
    batch.add(0, [1, 2, 3], 0)
    assert batch.room == 0
    with pytest.raises(BatchError, match="room for 0"):
        batch.add(1, [1], 0)


def test_a_batch_without_room_is_refused() -> None:
    with pytest.raises(BatchError):
        Batch(0)


def test_close_can_be_repeated() -> None:
    batch = Batch(3)
    batch.close()
    batch.close()
    with pytest.raises(BatchError):
        batch.add(0, [1], 0)
