"""Bytes from outside: whatever this context could not have written is told before llama or a sequence is touched."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from spec_server.runtime.errors import StateError
from tests.runtime.drive import Driver, gap, some_tokens

Drive = Callable[..., Driver]

pytestmark = pytest.mark.model

KINDS = ["full", "hybrid", "windowed"]
N = 150
PAST, FUTURE = some_tokens(N), some_tokens(3, 7)
# as 16-bit and as 32-bit floats: NaN, both infinities
NO_NUMBERS = [
    b"\x00\x7e",
    b"\x00\x7c",
    b"\x00\xfc",
    b"\x00\x00\xc0\x7f",
    b"\x00\x00\x80\x7f",
    b"\x00\x00\x80\xff",
]


def check(driver: Driver, state: bytes, n_tokens: int = N, partial: bool = False) -> None:
    driver.context.check_state(memoryview(state), n_tokens, partial=partial)


def rows_at(state: bytes, cell_bytes: int) -> int:
    """Where the first row of the first layer begins."""
    return 16 + N * cell_bytes + 8 + 12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("streams", [1, 3])
def test_our_own_states_pass(drive: Drive, kind: str, partial: bool, streams: int) -> None:
    driver = drive(kind, streams)
    driver.feed((streams - 1, PAST))
    state = driver.read(streams - 1, partial=partial)
    check(driver, state, partial=partial)
    for n_tokens in (N - 1, N + 1, 0, 5000):
        with pytest.raises(StateError):
            check(driver, state, n_tokens, partial=partial)


@pytest.mark.parametrize(
    "cache",
    ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"],
)
def test_every_cache_type_passes_and_is_told_from_others(drive: Drive, cache: str) -> None:
    driver = drive("full", type_k=cache, type_v=cache, flash_attn="on")
    driver.feed((0, PAST))
    state = driver.read(0)
    check(driver, state)
    at = rows_at(state, 12) - 12
    (kind,) = struct.unpack_from("<i", state, at)
    other = state[:at] + struct.pack("<i", kind + 1) + state[at + 4 :]
    with pytest.raises(StateError, match=f"type {kind + 1}"):
        check(driver, other)


@pytest.mark.parametrize(
    ("cache", "block", "at"),
    [
        ("f32", 4, 0),
        ("f16", 2, 0),
        ("bf16", 2, 0),
        ("q8_0", 34, 0),
        ("q4_0", 18, 0),
        ("q4_1", 20, 0),
        ("q4_1", 20, 2),
        ("q5_0", 22, 0),
        ("q5_1", 24, 2),
        ("iq4_nl", 18, 0),
    ],
)
def test_one_value_that_is_no_number_is_found(drive: Drive, cache: str, block: int, at: int) -> None:
    driver = drive("full", type_k=cache, type_v=cache, flash_attn="on")
    driver.feed((0, PAST))
    state = driver.read(0)
    bad = {"f32": NO_NUMBERS[3:], "bf16": [b"\xc0\x7f", b"\x80\xff"]}.get(cache, NO_NUMBERS[:3])
    for value in bad:
        for i in (0, 500, 7):
            begin = rows_at(state, 12) + i * block + at
            with pytest.raises(StateError, match="finite"):
                check(driver, state[:begin] + value + state[begin + len(value) :])
        # integers may be anything
    if cache == "q8_0":
        begin = rows_at(state, 12) + 2
        check(driver, state[:begin] + b"\xff" * 32 + state[begin + 32 :])


@pytest.mark.parametrize("value", NO_NUMBERS[3:])
@pytest.mark.parametrize("partial", [False, True])
def test_recurrent_rows_are_looked_at_too(drive: Drive, value: bytes, partial: bool) -> None:
    driver = drive("hybrid")
    driver.feed((0, PAST))
    state = driver.read(0, partial=partial)
    for at in (len(state) - 4, len(state) - 200_000):
        with pytest.raises(StateError, match="finite"):
            check(driver, state[:at] + value + state[at + 4 :], partial=partial)


def test_values_by_column_are_looked_at_too(drive: Drive) -> None:
    driver = drive("windowed", flash_attn="off")
    driver.feed((0, PAST))
    state = driver.read(0)
    check(driver, state)
    with pytest.raises(StateError, match="finite"):
        check(driver, state[:-2] + b"\x00\x7e")


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_no_number_would_outlive_its_sequence(drive: Drive, kind: str) -> None:
    """Why values are looked at: llama takes them, and another sequence answers with NaN after it is emptied."""
    if kind == "full":
        pytest.skip("this model has a few heads whose masked cells do not show it")
    driver = drive(kind, 2, kv_unified=True, flash_attn="off")
    driver.feed((0, PAST))
    state = bytearray(driver.read(0))
    # the last layer's values by column; the end of the recurrent memory
    number = np.float16 if kind == "windowed" else np.float32
    np.frombuffer(state, number, offset=len(state) - 8192)[:] = np.nan
    driver.write(0, bytes(state), N)
    driver.context.truncate(0, 0)
    assert np.isnan(driver.feed((1, FUTURE))[0]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_truncation_at_any_byte_and_any_growth_is_told(drive: Drive, kind: str) -> None:
    driver = drive(kind)
    driver.feed((0, PAST))
    for partial in (False, True):
        state = driver.read(0, partial=partial)
        ends = [*range(0, 200), *range(200, len(state), 997), len(state) - 1]
        for end in ends:
            with pytest.raises(StateError):
                check(driver, state[:end], partial=partial)
        with pytest.raises(StateError):
            check(driver, state + b"\0", partial=partial)


def test_checking_touches_nothing(drive: Drive) -> None:
    driver = drive("hybrid", 2)
    driver.feed((0, PAST), (1, PAST[:20]))
    state = driver.read(0)
    other = driver.read(1)
    check(driver, state)
    with pytest.raises(StateError):
        check(driver, state[:-1])
    assert (driver.read(0), driver.read(1)) == (state, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("spare", [0, 4, 8 * 4, 100])
def test_with_spare_bytes_a_state_is_rewritten_in_place(
    drive: Drive, kind: str, streams: int, spare: int
) -> None:
    driver = drive(kind, streams)
    driver.feed((0, PAST))
    state = driver.read(0)
    live = driver.step(0, FUTURE)
    buffer = bytearray(state + b"\xaa" * spare)
    last = streams - 1
    driver.context.write_state(last, memoryview(buffer), N, partial=False, spare=spare)
    assert gap(driver.step(last, FUTURE), live) == 0.0
    # with room for the counts of the other streams, in each part that has such, it was not copied
    needed = 4 * last * (2 if kind == "windowed" else 1)
    assert (buffer[8:12] == struct.pack("<I", streams)) == (spare >= needed)


def test_a_full_window_cache_knows_that_a_state_holds_the_window_only(drive: Drive) -> None:
    """It can go back to any token it has read itself, and must not after a state was loaded."""
    driver = drive("windowed", swa_full=True)
    driver.feed((0, PAST))
    state = driver.read(0)
    assert driver.context.rewind_floor(0) == 1
    driver.write(0, state, N)
    assert driver.context.rewind_floor(0) > N - 64
    assert driver.context.prefix_floor(0) > N - 64
