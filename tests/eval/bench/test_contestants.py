"""The bare loop behind its pipes; a few lines of Python stand in for it."""

from __future__ import annotations

import sys

import psutil
import pytest

from eval.bench.contestants import BareLoop, ServerContestant
from eval.client import ServerError

LOOP = """
import json, os, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    question = json.loads(line)
    n = question["n"]
    print(json.dumps({"seconds": n / 10, "arrivals_s": [(i + 1) / 10 for i in range(n)]}), flush=True)
"""


def bare(tmp_path, program: str, timeout_s: float = 10.0, **env: str) -> BareLoop:
    return BareLoop([sys.executable, "-c", program], log_path=tmp_path / "log", timeout_s=timeout_s, env=env)


def test_the_loop_answers_with_the_times_of_its_own_clock(tmp_path):
    with bare(tmp_path, LOOP) as loop:
        assert loop.prime([[1, 2]]) == []
        for _ in range(2):
            (stream,) = loop.generate([[1, 2]], 5)
        pid = loop.pid
        assert psutil.pid_exists(pid)
    assert (stream.sent_s, stream.ended_s, stream.n_tokens) == (0.0, 0.5, 5)
    assert stream.gaps_ms() == pytest.approx([100.0] * 4)
    assert loop.overhead_us() is None
    assert not psutil.pid_exists(pid)


def test_a_loop_that_ends_is_reported_with_its_log(tmp_path):
    with pytest.raises(ServerError, match="ended; see"), bare(tmp_path, "import sys; sys.exit('no model')"):
        pass
    assert "no model" in (tmp_path / "log").read_text()


def test_a_loop_that_hangs_is_given_up_and_killed(tmp_path):
    hanging = "import time; print('{}', flush=True); time.sleep(60)"
    with bare(tmp_path, hanging, timeout_s=0.5) as loop:
        pid = loop.pid
        with pytest.raises(ServerError, match="did not answer in 0 s"):
            loop.generate([[1]], 4)
    assert not psutil.pid_exists(pid)


def test_the_loop_has_its_own_environment(tmp_path):
    program = (
        "import os, sys, json; print(json.dumps({'spin': os.environ['SPIN']}), file=sys.stderr); print(1)"
    )
    with bare(tmp_path, program, SPIN="7"):
        pass
    assert '"7"' in (tmp_path / "log").read_text()


def test_every_client_has_a_slot_of_its_own(start_fake):
    fake = start_fake()
    contestant = ServerContestant("peer:off", fake.url, pid=None, timeout_s=10)
    streams = contestant.generate([[1, 2], [3, 4]], 8)
    assert [one.n_tokens for one in streams] == [8, 8]
    asked = {request["body"]["id_slot"]: request["body"]["prompt"] for request in fake.requests}
    assert asked == {0: [1, 2], 1: [3, 4]}


def test_only_our_server_is_asked_for_its_overhead(start_fake):
    fake = start_fake()
    assert ServerContestant("ours:off", fake.url, pid=None, timeout_s=10).overhead_us() == (90.5, 90.5)
    assert ServerContestant("peer:off", fake.url, pid=None, timeout_s=10).overhead_us() is None
