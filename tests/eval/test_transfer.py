"""The cost of transfers: the plain work is what it says, and the table says what was measured against what."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from eval import raw
from eval.transfer import Measured, Round, Waits, lines, rows

ROUNDS = [
    Round(save=13, sync=5, save_hold=2, write=10, restore=9, restore_hold=3, read=4, copy=2),
    Round(save=12, sync=6, save_hold=3, write=10, restore=12, restore_hold=4, read=4, copy=2),
    Round(save=20, sync=50, save_hold=9, write=10, restore=30, restore_hold=9, read=6, copy=3),
]


def measured() -> Measured:
    return Measured(
        setup={"tokens": 10, "machine": "x"},
        rounds=ROUNDS,
        waits=Waits(plain=[8.0] * 200, save=[9.0, 10.0, 11.0], restore=[40.0, 22.0, 5.0]),
        memory={"largest": 100 << 20, "save": 105 << 20, "restore": 120 << 20},
        sections={"file": 2_000_000, "target": 1_500_000, "draft": 500_000, "checkpoints": 0},
    )


def test_ratios_are_medians_of_the_rounds_own() -> None:
    found = [(row.name, round(row.ratio, 3), row.holds) for row in rows(measured())]
    assert found == [
        ("save, sync excluded", 1.3, False),
        ("save, sync excluded", 1.083, True),
        ("restore", 1.5, True),
        ("engine thread held, save", 1.5, True),
        ("engine thread held, restore", 2.0, False),
        ("neighbour's longest wait, save", round(10 / 11, 3), True),
        ("neighbour's longest wait, restore", 2.0, False),
        ("memory above the server's, save", 1.05, True),
        ("memory above the server's, restore", 1.2, False),
    ]


def test_what_is_missed_is_marked() -> None:
    table = lines(measured())
    assert table[0] == "10 tokens, 2.0 MB: target 1.5, draft 0.5; x; sync 6 ms"
    assert sum("(missed)" in line for line in table) == sum(not row.holds for row in rows(measured()))


def test_plain_work_moves_all_bytes_and_leaves_nothing(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8)
    assert raw.write_ms(data, tmp_path / "plain.bin") > 0
    assert os.listdir(tmp_path) == []
    (tmp_path / "there.bin").write_bytes(data.tobytes())
    out = np.zeros_like(data)
    assert raw.read_ms(tmp_path / "there.bin", out) > 0
    assert np.array_equal(out, data)
    other = np.zeros_like(data)
    assert raw.copy_ms(data, other) > 0
    assert np.array_equal(other, data)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_watch_sees_a_peak_that_is_gone_again() -> None:
    with raw.MemoryWatch(os.getpid()) as watch:
        block = np.ones(200_000_000, np.uint8)
        # The kernel's count is of pages that each core has reported, and the watching thread may wait for one.
        until = time.monotonic() + 60
        while watch.peak - watch.before < 150_000_000 and time.monotonic() < until:
            time.sleep(0.005)
        del block
    assert watch.peak - watch.before >= 150_000_000
