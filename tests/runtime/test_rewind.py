"""How far back each kind of memory can be cut, against contexts that never went further."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spec_server.runtime.errors import RewindError
from tests.runtime.drive import Driver, Floats, Ints, gap, some_tokens

Drive = Callable[..., Driver]

pytestmark = pytest.mark.model

ROUNDING = 0.7  # other batch borders move these models' logits by up to about this; a wrong state by 1 to 12


TAIL = some_tokens(1, 99)


def expected(drive: Drive, kind: str, *history: Ints) -> Floats:
    """Logits behind TAIL in a context that saw this history and never more."""
    driver = drive(kind)
    for tokens in history:
        driver.feed((0, tokens))
    return driver.step(0, TAIL)


@pytest.mark.parametrize(
    ("n_rs_seq", "last_batch", "floor"),
    [(0, 5, 105), (4, 1, 101), (4, 2, 101), (4, 5, 101), (4, 9, 105), (2, 5, 103)],
)
def test_recurrent_floor(drive: Drive, n_rs_seq: int, last_batch: int, floor: int) -> None:
    """As many tokens as there are snapshots, and never the whole of the last batch."""
    driver = drive("hybrid", n_rs_seq=n_rs_seq)
    driver.feed((0, some_tokens(100)))
    drafted = some_tokens(last_batch, 1)
    driver.feed((0, drafted), drafted=True)
    assert driver.context.needs_checkpoints
    assert driver.context.can_rewind_draft == (n_rs_seq > 0)
    assert driver.context.rewind_floor(0) == floor
    with pytest.raises(RewindError):
        driver.context.truncate(0, floor - 1)
    assert driver.context.n_tokens(0) == 100 + last_batch
    driver.context.truncate(0, floor)
    found = driver.step(0, TAIL)
    assert gap(found, expected(drive, "hybrid", some_tokens(100), drafted[: floor - 100])) < ROUNDING


def test_recurrent_memory_goes_back_once(drive: Drive) -> None:
    driver = drive("hybrid", n_rs_seq=4)
    driver.feed((0, some_tokens(20)))
    driver.feed((0, some_tokens(5, 1)), drafted=True)
    driver.context.truncate(0, 24)
    assert driver.context.rewind_floor(0) == 24
    with pytest.raises(RewindError):
        driver.context.truncate(0, 23)
    driver.context.truncate(0, 24)
    driver.context.truncate(0, 0)
    assert driver.context.n_tokens(0) == 0


@pytest.mark.parametrize("what", ["another decode", "a written state"])
def test_snapshots_do_not_last(drive: Drive, what: str) -> None:
    driver = drive("hybrid", 2, n_rs_seq=4)
    driver.feed((0, some_tokens(5)), drafted=True)
    assert driver.context.rewind_floor(0) == 1
    if what == "another decode":
        driver.feed((1, some_tokens(5)))
    else:
        driver.write(0, driver.read(0), 5)
    assert driver.context.rewind_floor(0) == 5


def test_a_pending_rewind_survives_its_neighbours(drive: Drive) -> None:
    driver = drive("hybrid", 3, n_rs_seq=4, kv_unified=True)
    for seq_id in range(3):
        driver.feed((seq_id, some_tokens(30, seq_id)))
    driver.feed(*((seq_id, some_tokens(5, 7)) for seq_id in range(3)), drafted=True)
    driver.context.truncate(1, 32)
    driver.feed(
        (0, some_tokens(5)), (2, some_tokens(5)), drafted=True
    )  # makes their rows neighbours: 1 moves
    found = driver.step(1, TAIL)
    assert gap(found, expected(drive, "hybrid", some_tokens(30, 1), some_tokens(5, 7)[:2])) < ROUNDING


@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("lengths", [(5, 4, 5), (5, 3, 2), (5, 5, 5), (2, 5, 5)])
def test_every_drafted_part_can_go_back(drive: Drive, kv_unified: bool, lengths: tuple[int, ...]) -> None:
    """With one call, 5 + 4 + 5 tokens in shared cells leave the middle sequence with another's snapshots."""
    driver = drive("hybrid", 3, n_rs_seq=4, kv_unified=kv_unified)
    for seq_id in range(3):
        driver.feed((seq_id, some_tokens(60, seq_id)))
    order = (1, 0, 2)
    drafts = [(seq_id, some_tokens(lengths[seq_id], 10 + seq_id)) for seq_id in order]
    rows = driver.feed(*drafts, output="all", drafted=True)
    for (seq_id, draft), logits in zip(drafts, rows, strict=True):
        assert driver.context.rewind_floor(seq_id) == 61
        reference = drive("hybrid")
        reference.feed((0, some_tokens(60, seq_id)))
        assert gap(logits, reference.feed((0, draft), output="all")[0]) < ROUNDING
        driver.context.truncate(seq_id, 61)
    for seq_id, draft in drafts:
        behind_one = expected(drive, "hybrid", some_tokens(60, seq_id), draft[:1])
        assert gap(driver.step(seq_id, TAIL), behind_one) < ROUNDING


@pytest.mark.parametrize("kv_unified", [True, False])
def test_a_window_floor_is_sound(drive: Drive, kv_unified: bool) -> None:
    driver = drive("windowed", 2, n_ubatch=32, kv_unified=kv_unified)
    tokens = some_tokens(700)
    assert driver.context.needs_checkpoints
    driver.feed((1, some_tokens(300, 5)))
    driver.feed((0, tokens))
    floor = driver.context.rewind_floor(0)
    first, last = driver.context.pos_range(0)
    assert last == 699
    assert first > 0
    assert floor == first + 63
    with pytest.raises(RewindError):
        driver.context.truncate(0, floor - 1)
    driver.context.truncate(0, floor)
    assert gap(driver.step(0, TAIL), expected(drive, "windowed", tokens[:floor])) < ROUNDING


def test_inside_the_window_everything_is_in_reach(drive: Drive) -> None:
    driver = drive("windowed")
    driver.feed((0, some_tokens(100)))
    assert driver.context.rewind_floor(0) == 1


def test_a_full_size_window_cache_needs_no_checkpoints(drive: Drive) -> None:
    driver = drive("windowed", n_ubatch=32, swa_full=True)
    driver.feed((0, some_tokens(700)))
    assert not driver.context.needs_checkpoints
    assert driver.context.rewind_floor(0) == 1
    driver.context.truncate(0, 100)
    found = driver.step(0, TAIL)
    assert gap(found, expected(drive, "windowed", some_tokens(700)[:100])) < ROUNDING


def test_drafts_in_a_shared_window_beside_a_prompt(drive: Drive) -> None:
    """In one call, the prompt's second micro-batch takes cells that the draft's rewind needs."""
    driver = drive("windowed", 2, n_ubatch=64, kv_unified=True)
    driver.feed((0, some_tokens(300)))
    for round_ in range(3):
        n = driver.context.n_tokens(0)
        driver.batch.clear()
        driver.batch.add(0, some_tokens(5, round_), n, output="all", n_draft=4)
        driver.batch.add(1, some_tokens(200, round_), driver.context.n_tokens(1), output="last")
        driver.context.decode(driver.batch)
        assert driver.context.rewind_floor(0) <= n + 1
        driver.context.truncate(0, n + 1)
