"""States: read, converted and written, the future is the same to the last bit."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from typing import Any

import pytest

from spec_server.runtime.errors import StateError
from tests.runtime.drive import Driver, gap, some_tokens

Drive = Callable[..., Driver]

pytestmark = pytest.mark.model

KINDS = ["full", "hybrid", "windowed"]
PAST, FUTURE = some_tokens(300), some_tokens(3, 7)
LAYOUTS = [(1, True), (2, False), (4, True), (4, False)]  # sequences, unified


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("source", "seq_id"), [((1, True), 0), ((4, False), 1), ((4, False), 3)])
def test_a_state_fits_every_layout(drive: Drive, kind: str, source: tuple[int, bool], seq_id: int) -> None:
    origin = drive(kind, source[0], kv_unified=source[1])
    origin.feed((seq_id, PAST))
    state = origin.read(seq_id)
    assert state[:8] == origin.context.state_head()
    live = origin.step(seq_id, FUTURE)
    for n_seq_max, kv_unified in LAYOUTS:
        target = drive(kind, n_seq_max, kv_unified=kv_unified)
        target.write(n_seq_max - 1, state, len(PAST))
        assert target.context.n_tokens(n_seq_max - 1) == len(PAST)
        again = target.read(n_seq_max - 1)
        assert len(again) == len(state)
        assert gap(target.step(n_seq_max - 1, FUTURE), live) == 0.0
        target.close()


def test_a_state_is_what_llama_would_write_for_one_stream(drive: Drive) -> None:
    """Between slots only the sequence id in each cell differs."""
    streams, single = drive("full", 4, kv_unified=False), drive("full")
    streams.feed((0, PAST))
    single.feed((0, PAST))
    assert streams.read(0) == single.read(0)
    streams.feed((2, PAST))
    cells = slice(16, 16 + 12 * len(PAST))
    ours, theirs = bytearray(streams.read(2)), bytearray(single.read(0))
    assert set(struct.unpack_from("<3I", ours, 16 + 12 * 5)) == {5, 1, 2}
    ours[cells] = theirs[cells] = bytes(12 * len(PAST))
    assert ours == theirs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_unified", [True, False])
def test_a_partial_state_brings_back_its_point(drive: Drive, kind: str, kv_unified: bool) -> None:
    driver = drive(kind, 2, kv_unified=kv_unified)
    driver.feed((1, PAST))
    partial = driver.read(1, partial=True)
    live = driver.step(1, FUTURE)
    driver.feed((1, some_tokens(40, 3)), (0, some_tokens(30)))
    driver.write(1, partial, len(PAST), partial=True)
    assert driver.context.n_tokens(1) == len(PAST)
    assert driver.context.n_tokens(0) == 30
    # cells of a shared window come back in another order, which rounds otherwise
    assert gap(driver.step(1, FUTURE), live) <= (0.4 if kind == "windowed" and kv_unified else 0.0)
    assert len(partial) < len(driver.read(1)) or kind == "full"


@pytest.mark.parametrize("kind", ["hybrid", "windowed"])
def test_a_partial_state_needs_the_rest(drive: Drive, kind: str) -> None:
    driver = drive(kind)
    driver.feed((0, PAST))
    partial = driver.read(0, partial=True)
    driver.context.truncate(0, 0)
    driver.feed((0, PAST[:100]))
    with pytest.raises(StateError, match="only 100"):
        driver.write(0, partial, len(PAST), partial=True)
    assert driver.context.n_tokens(0) == 0


@pytest.mark.parametrize("rewind", [0, 1, 4])
@pytest.mark.parametrize("n_rs_seq", [0, 4])
def test_a_state_knows_nothing_of_snapshots(drive: Drive, rewind: int, n_rs_seq: int) -> None:
    """A rewind that llama has only noted so far is in the state, and the reader may keep other snapshots."""
    origin = drive("hybrid", n_rs_seq=4)
    origin.feed((0, PAST))
    origin.feed((0, some_tokens(5, 1)), drafted=True)
    n_tokens = len(PAST) + 5 - rewind
    origin.context.truncate(0, n_tokens)
    state, partial = origin.read(0), origin.read(0, partial=True)
    live = origin.step(0, FUTURE)
    target = drive("hybrid", n_rs_seq=n_rs_seq)
    target.write(0, state, n_tokens)
    assert target.read(0) == state
    assert gap(target.step(0, FUTURE), live) == 0.0
    target.write(0, partial, n_tokens, partial=True)
    assert gap(target.step(0, FUTURE), live) == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_replaces_what_was_there(drive: Drive, kind: str) -> None:
    driver = drive(kind, 2)
    driver.feed((0, PAST), (1, some_tokens(50)))
    state = driver.read(0)
    live = driver.step(0, FUTURE)
    driver.context.truncate(0, 0)
    driver.feed((0, some_tokens(500, 5)))
    driver.write(0, state, len(PAST))
    driver.write(1, state, len(PAST))
    for seq_id in (0, 1):
        # a window cache puts the cells where it stands, which rounds otherwise
        assert gap(driver.step(seq_id, FUTURE), live) <= (0.4 if kind == "windowed" else 0.0)


def test_states_go_straight_into_a_mapping(drive: Drive) -> None:
    driver = drive("hybrid", 3, kv_unified=False)
    driver.feed((2, PAST))
    expected = driver.read(2)
    size = driver.context.state_size(2, partial=False)
    with mmap.mmap(-1, size + 100) as mapping:
        view = memoryview(mapping)[40 : 40 + size]
        state = driver.context.read_state(2, view, partial=False)
        assert bytes(state) == expected
        assert mapping[:40] == bytes(40)
        assert mapping[40 + size :] == bytes(60)
        state.release()
        view.release()


def test_a_buffer_that_is_too_small(drive: Drive) -> None:
    driver = drive("full")
    driver.feed((0, PAST))
    size = driver.context.state_size(0, partial=False)
    with pytest.raises(StateError, match=f"{size - 1} bytes"):
        driver.context.read_state(0, memoryview(bytearray(size - 1)), partial=False)
    assert driver.context.n_tokens(0) == len(PAST)


def damaged(state: bytes, what: str) -> bytes:
    match what:
        case "empty":
            return b""
        case "head only":
            return state[:8]
        case "cut":
            return state[:-1]
        case "longer":
            return state + b"\0"
        case "magic":
            return b"\0\0\0\0" + state[4:]
        case "streams":
            return state[:8] + struct.pack("<I", 4) + state[12:]
        case "more cells":
            return state[:12] + struct.pack("<I", 301) + state[16:]
        case "fewer cells":
            return state[:12] + struct.pack("<I", 299) + state[16:]
        case "no cells":
            return state[:12] + struct.pack("<I", 0) + state[16:]
        case "many cells":
            return state[:12] + b"\xff\xff\xff\xff" + state[16:]
        case "wide rows":
            at = 16 + 12 * 300 + 8 + 4
            return state[:at] + struct.pack("<Q", 1 << 40) + state[at + 8 :]
        case "position":
            return state[:16] + struct.pack("<i", 4000) + state[20:]
    raise AssertionError(what)


@pytest.mark.parametrize("kind", ["full", "windowed"])
@pytest.mark.parametrize(("n_seq_max", "kv_unified"), [(1, True), (3, False)])
@pytest.mark.parametrize(
    "what",
    [
        *("empty", "head only", "cut", "longer", "magic", "streams"),
        *("more cells", "fewer cells", "no cells", "many cells", "wide rows", "position"),
    ],
)
def test_a_damaged_state_leaves_its_sequence_empty(
    drive: Drive, kind: str, n_seq_max: int, kv_unified: bool, what: str
) -> None:
    driver = drive(kind, n_seq_max, kv_unified=kv_unified)
    driver.feed((n_seq_max - 1, PAST))
    state = driver.read(n_seq_max - 1)
    driver.feed((0, some_tokens(2))) if n_seq_max > 1 else None
    with pytest.raises(StateError):
        driver.write(n_seq_max - 1, damaged(state, what), len(PAST))
    assert driver.context.n_tokens(n_seq_max - 1) == 0
    assert driver.context.pos_range(n_seq_max - 1) == (-1, -1)
    assert n_seq_max == 1 or driver.context.n_tokens(0) == 2
    driver.write(n_seq_max - 1, state, len(PAST))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_tokens", [0, 299, 301, 100_000])
def test_a_state_of_another_length(drive: Drive, kind: str, n_tokens: int) -> None:
    driver = drive(kind)
    driver.feed((0, PAST))
    state = driver.read(0)
    with pytest.raises(StateError):
        driver.write(0, state, n_tokens)
    assert driver.context.n_tokens(0) == 0


@pytest.mark.parametrize("settings", [{"type_k": "q8_0"}, {"flash_attn": "off"}])
def test_a_state_of_other_cache_types(drive: Drive, settings: Any) -> None:
    origin, target = drive("full"), drive("full", **settings)
    origin.feed((0, PAST))
    with pytest.raises(StateError, match="llama refuses the state"):
        target.write(0, origin.read(0), len(PAST))
    assert target.context.n_tokens(0) == 0


@pytest.mark.parametrize("kind", ["full", "windowed"])
def test_transposed_values_in_streams(drive: Drive, kind: str) -> None:
    """Without flash attention the cache holds values by column."""
    driver = drive(kind, 3, kv_unified=False, flash_attn="off")
    assert driver.context.v_transposed
    driver.feed((1, PAST))
    state = driver.read(1)
    live = driver.step(1, FUTURE)
    driver.write(2, state, len(PAST))
    assert gap(driver.step(2, FUTURE), live) == 0.0


def test_a_state_of_another_model(drive: Drive) -> None:
    origin, target = drive("windowed"), drive("hybrid")
    origin.feed((0, PAST))
    with pytest.raises(StateError):
        target.write(0, origin.read(0), len(PAST))
