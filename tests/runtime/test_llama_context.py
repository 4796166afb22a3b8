"""LlamaContext: what decode refuses, whose row is whose, how long sequences are."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spec_server.runtime.batch import Batch
from spec_server.runtime.context import Context
from spec_server.runtime.errors import BatchError, ContextFull, ModelError, RewindError
from spec_server.runtime.llama_context import LlamaContext, RopeSettings
from spec_server.runtime.model import Model
from spec_server.runtime.sampler import argmax_rows
from tests.runtime.drive import HYBRID, Driver, gap, some_tokens

Drive = Callable[..., Driver]

pytestmark = pytest.mark.model


def test_it_is_a_context(drive: Drive) -> None:
    context: Context = drive("full", 2, n_batch=64, n_ubatch=32).context
    assert (context.n_ctx, context.n_ctx_seq, context.n_seq_max) == (2048, 1024, 2)
    assert (context.n_batch, context.n_ubatch) == (64, 32)
    assert (context.n_vocab, context.n_embd) == (49152, 256)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"n_seq_max": 0}, "n_seq_max 0"),
        ({"n_seq_max": 1000}, "n_seq_max 1000"),
        ({"n_ubatch": 0}, "n_ubatch 0 is not positive"),
        ({"n_ubatch": 4, "n_rs_seq": 3}, "must be above n_rs_seq"),
        ({"n_threads": 0}, "n_threads 0 is not positive"),
        ({"n_ctx": -1}, "n_ctx -1 is negative"),
        ({"type_k": "q9"}, "type_k 'q9' is none of"),
        ({"flash_attn": "maybe"}, "flash_attn"),
        ({"rope": RopeSettings(scaling="cubic")}, "rope scaling"),
        ({"type_v": "q8_0", "flash_attn": "off"}, "llama refuses the context: .*quantized V cache"),
        ({"mtp": True}, "no MTP head"),
    ],
)
def test_settings_that_llama_would_abort_on(models: dict[str, Model], settings: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        LlamaContext(models["full"], **{"n_ctx": 512, **settings})


def wrong_token(batch: Batch, context: LlamaContext) -> None:
    batch.add(0, [1, context.n_vocab], 4)


def negative_token(batch: Batch, _: LlamaContext) -> None:
    batch.add(0, [-1], 4)


def wrong_sequence(batch: Batch, context: LlamaContext) -> None:
    batch.add(context.n_seq_max, [1], 0)


def gap_in_positions(batch: Batch, _: LlamaContext) -> None:
    batch.add(0, [1], 5)


def position_again(batch: Batch, _: LlamaContext) -> None:
    batch.add(0, [1], 3)


def too_many_tokens(batch: Batch, context: LlamaContext) -> None:
    batch.add(0, [1] * (context.n_batch + 1), 4)


def too_many_outputs(batch: Batch, context: LlamaContext) -> None:
    batch.add(0, [1] * (context.n_outputs_max + 1), 4, output="all")


def one_sequence_twice(batch: Batch, _: LlamaContext) -> None:
    batch.add(0, [1], 4)
    batch.add(0, [1], 5)


@pytest.mark.parametrize(
    ("fill", "error"),
    [
        (lambda batch, context: None, BatchError),
        (wrong_token, BatchError),
        (negative_token, BatchError),
        (wrong_sequence, BatchError),
        (gap_in_positions, BatchError),
        (position_again, BatchError),
        (too_many_tokens, BatchError),
        (too_many_outputs, BatchError),
        (one_sequence_twice, BatchError),
    ],
)
def test_a_refused_batch_changes_nothing(drive: Drive, fill: Any, error: type[Exception]) -> None:
    driver = drive("full", 2, n_batch=64, n_outputs_max=8)
    driver.feed((0, some_tokens(4)))
    driver.batch.clear()
    fill(driver.batch, driver.context)
    with pytest.raises(error):
        driver.context.decode(driver.batch)
    assert driver.context.n_tokens(0) == 4
    assert driver.context.pos_range(0) == (0, 3)
    assert driver.context.n_decodes == 1
    driver.feed((0, some_tokens(2)), (1, some_tokens(2)))


def test_a_batch_of_the_wrong_width(drive: Drive) -> None:
    driver = drive("full")
    batch = Batch(4, n_embd=256)
    batch.add(0, [1], 0)
    with pytest.raises(BatchError, match="hidden rows"):
        driver.context.decode(batch)


@pytest.mark.parametrize("kv_unified", [True, False])
def test_full_to_the_last_cell(drive: Drive, kv_unified: bool) -> None:
    driver = drive("full", 2, n_ctx=512, kv_unified=kv_unified)
    room = driver.context.n_ctx_seq
    driver.feed((0, some_tokens(room - 1)))
    with pytest.raises(ContextFull):
        driver.feed((0, some_tokens(2)))
    assert driver.context.n_tokens(0) == room - 1
    driver.feed((0, some_tokens(1)))
    with pytest.raises(ContextFull):
        driver.feed((0, some_tokens(1)))


def test_shared_cells_run_out_together(drive: Drive) -> None:
    driver = drive("full", 2, n_ctx=512, kv_unified=True)
    driver.feed((0, some_tokens(500)))
    with pytest.raises(ContextFull):
        driver.feed((1, some_tokens(13)))
    assert driver.context.n_tokens(1) == 0
    driver.feed((1, some_tokens(12)))


@pytest.mark.parametrize("kind", ["full", "hybrid", "windowed"])
@pytest.mark.parametrize("kv_unified", [True, False])
def test_rows_come_in_batch_order(drive: Drive, kind: str, kv_unified: bool) -> None:
    """llama splits a ragged batch and computes its rows in another order."""
    shares = [(3, some_tokens(7, 1)), (0, some_tokens(1, 2)), (2, some_tokens(5, 3)), (1, some_tokens(5, 4))]
    # F32 values, and a gap far below that of two rows: other micro-batches round otherwise
    together = drive(kind, 4, kv_unified=kv_unified).feed(*shares, output="all")
    alone = drive(kind)
    for (_, tokens), rows in zip(shares, together, strict=True):
        alone.context.truncate(0, 0)
        expected = alone.feed((0, tokens), output="all")[0]
        assert rows.shape == expected.shape
        assert gap(rows, expected) < 0.6
        assert (rows.argmax(1) == expected.argmax(1)).mean() > 0.7


@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("n_rs_seq", [0, 4])
def test_hidden_rows_come_in_batch_order(drive: Drive, kv_unified: bool, n_rs_seq: int) -> None:
    together = drive("hybrid", 3, kv_unified=kv_unified, n_rs_seq=n_rs_seq, expose_hidden=True)
    shares = [(1, some_tokens(7, 1)), (0, some_tokens(3, 2)), (2, some_tokens(5, 3))]
    together.feed(*shares, drafted=True)
    rows = together.context.hidden(0, 15).copy()
    alone = drive("hybrid", expose_hidden=True)
    for part, (_, tokens) in zip(together.batch.parts, shares, strict=True):
        alone.context.truncate(0, 0)
        alone.feed((0, tokens))
        assert gap(rows[part.start : part.start + part.n_tokens], alone.context.hidden(0, len(tokens))) < 0.2


def test_rows_out_of_range(drive: Drive) -> None:
    driver = drive("full")
    with pytest.raises(BatchError):
        driver.context.logits(0, 1)
    driver.feed((0, some_tokens(5)), output="last")
    assert driver.context.logits(0, 1).shape == (1, 49152)
    assert driver.context.logits(1, 0).shape == (0, 49152)
    for row, n in ((0, 2), (1, 1), (-1, 1), (0, -1)):
        with pytest.raises(BatchError):
            driver.context.logits(row, n)
    with pytest.raises(BatchError, match="hidden"):
        driver.context.hidden(0, 1)


def test_a_search_in_the_rows_copies_nothing(drive: Drive) -> None:
    driver = drive("full")
    best = [int(row.argmax()) for row in driver.feed((0, some_tokens(4)), output="all")[0]]
    rows = driver.context.logits(0, 4)
    tracemalloc.start()
    try:
        assert argmax_rows(rows) == best
        assert tracemalloc.get_traced_memory()[1] < rows[0].nbytes
    finally:
        tracemalloc.stop()


def test_rows_follow_a_buffer_that_grows(drive: Drive) -> None:
    """llama moves its output buffer when a batch asks for more rows than any before."""
    driver = drive("full")
    first = driver.feed((0, some_tokens(3)))[0]
    many = driver.feed((0, some_tokens(100, 1)), output="all")[0]
    assert many.shape[0] == 100
    driver.context.truncate(0, 0)
    assert gap(driver.feed((0, some_tokens(3)))[0], first) == 0.0
    driver.context.truncate(0, 3)
    assert gap(driver.feed((0, some_tokens(100, 1)), output="all")[0], many) == 0.0


def test_time_inside_llama_is_counted(drive: Drive) -> None:
    driver = drive("full")
    driver.feed((0, some_tokens(200)))
    assert driver.context.n_decodes == 1
    assert driver.context.decode_ns > 100_000


@pytest.mark.parametrize("seq_id", [-1, 2])
def test_a_sequence_that_does_not_exist(drive: Drive, seq_id: int) -> None:
    context = drive("full", 2).context
    out = memoryview(bytearray(100))
    for call in (
        lambda: context.truncate(seq_id, 0),
        lambda: context.pos_range(seq_id),
        lambda: context.state_size(seq_id, partial=False),
        lambda: context.read_state(seq_id, out, partial=False),
        lambda: context.write_state(seq_id, out, 1, partial=False),
    ):
        with pytest.raises(BatchError):
            call()


def test_an_empty_sequence(drive: Drive) -> None:
    context = drive("windowed", 2).context
    assert (context.n_tokens(1), context.pos_range(1), context.rewind_floor(1)) == (0, (-1, -1), 0)
    context.truncate(1, 0)
    with pytest.raises(RewindError):
        context.truncate(1, 1)


def test_cut_and_go_on(drive: Drive) -> None:
    """Full attention reaches every prefix, and what follows is what would have followed."""
    driver, fresh = drive("full"), drive("full")
    tokens, tail = some_tokens(50), some_tokens(4, 1)
    driver.feed((0, tokens))
    for keep in (49, 25, 1):
        assert driver.context.rewind_floor(0) == 1
        driver.context.truncate(0, keep)
        fresh.context.truncate(0, 0)
        fresh.feed((0, tokens))
        fresh.context.truncate(0, keep)
        assert gap(driver.step(0, tail), fresh.step(0, tail)) == 0.0
        driver.context.truncate(0, keep)
    for n in (-1, 2):
        with pytest.raises(RewindError):
            driver.context.truncate(0, n)
    driver.context.truncate(0, 0)
    assert driver.context.pos_range(0) == (-1, -1)


def test_the_model_outlives_its_contexts() -> None:
    model = Model(HYBRID)
    context = LlamaContext(model, n_ctx=256)
    model.close()
    with pytest.raises(RuntimeError, match="closed"):
        LlamaContext(model, n_ctx=256)
    batch = Batch(4)
    batch.add(0, [1, 2], 0)
    context.decode(batch)
    assert np.isfinite(context.logits(0, 1)).all()
    context.close()
    context.close()
    model.close()


def test_what_is_dropped_is_freed() -> None:
    model = Model(HYBRID)
    context = LlamaContext(model, n_ctx=256)
    del model
    del context
    gc.collect()
