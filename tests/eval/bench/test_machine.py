"""Neighbours that are there when they are wanted, and gone afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from eval.bench import machine


def children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "getppid" in " ".join(one.cmdline())]


def wait_until(holds) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_neighbour_is_stopped_until_it_is_wanted_and_gone_at_the_end():
    with machine.Neighbour(2, None) as neighbour:
        loops = children()
        assert len(loops) == 2
        wait_until(lambda: all(one.status() == psutil.STATUS_STOPPED for one in loops))
        neighbour.resume()
        wait_until(lambda: all(one.status() == psutil.STATUS_RUNNING for one in loops))
        neighbour.pause()
        wait_until(lambda: all(one.status() == psutil.STATUS_STOPPED for one in loops))
    assert not any(one.is_running() for one in loops)


def test_a_neighbour_can_be_pinned():
    core = min(os.sched_getaffinity(0))
    with machine.Neighbour(1, core):
        assert children()[0].cpu_affinity() == [core]


def test_a_core_that_is_not_there_leaves_no_neighbour_behind():
    with pytest.raises(OSError, match="Invalid argument"), machine.Neighbour(1, 100_000):
        pass
    assert children() == []


def test_a_server_that_is_not_idle_is_seen():
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        found = machine.unrest([loop.pid], 0.5)
    finally:
        loop.kill()
        loop.wait()
    assert found[0].startswith("idle servers use")


def test_a_sleeping_process_is_quiet():
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        time.sleep(0.5)
        found = machine.unrest([sleeper.pid], 0.3)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert not any("idle servers" in line for line in found)


def test_the_description_says_where_it_was_measured():
    found = machine.describe()
    assert {"machine", "python", "load", "commit", "date"} == set(found)
    assert f"{os.cpu_count()} cores" in str(found["machine"])
    assert machine.default_threads() >= 1
