"""The whole command against fake servers, as processes."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

import psutil
import pytest

from eval.__main__ import main
from eval.bench.arguments import add_arguments
from eval.bench.command import Bench
from eval.bench.configs import parse
from eval.bench.schedule import Rounds
from eval.models import REPOSITORY
from eval.workloads import WORKLOADS, prompts

FAKE = shlex.join([sys.executable, str(Path(__file__).parents[1] / "fake_server.py")])
SMALL = ["--model", "none.gguf", "--rounds", "2", "--max-tokens", "8", "--warmup", "4", "--workload", "chat"]


@pytest.fixture
def bench(tmp_path):
    def bench(*arguments: str) -> dict:
        file = tmp_path / "run.json"
        options = ["--ours", FAKE, "--json", str(file), "--logs", str(tmp_path / "logs")]
        assert main(["bench", *SMALL, *options, *arguments]) == 0
        return json.loads(file.read_text())

    return bench


def fakes_alive() -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if "fake_server" in str(one.cmdline())]


def test_both_servers_are_measured_and_stopped(bench, tmp_path, capsys):
    markdown = tmp_path / "run.md"
    found = bench("--peer", FAKE, "--config", "off", "--clients", "1,2", "--markdown", str(markdown))
    names = [one["name"] for one in found["results"]]
    assert names == ["ours:off / peer:off, 1 client", "ours:off / peer:off, 2 clients"]
    assert len(found["samples"]) == 8
    assert {one["n_tokens"] for one in found["samples"]} == {8, 16}
    assert found["setup"]["ours:off"] == "--spec-type none --spec-adaptive off"
    out, progress = capsys.readouterr()
    assert out == markdown.read_text() + "\n"
    assert "1 client: round 2 of 2" in progress
    assert fakes_alive() == []


def test_fresh_processes_go_on_with_the_next_prompts(bench, tmp_path, monkeypatch):
    pids = []
    sampled = Rounds.run

    def run(self):
        pids.append([one.pid for one in self.contestants])
        sampled(self)

    monkeypatch.setattr("eval.bench.schedule.Rounds.run", run)
    found = bench("--peer", FAKE, "--config", "off", "--clients", "1", "--rounds", "3", "--fresh", "2")
    assert sorted(one["round"] for one in found["samples"]) == [0, 0, 1, 1, 2, 2]
    assert len({pid for started in pids for pid in started}) == 4
    assert (tmp_path / "logs" / "ours-off-1-from-2.log").exists()
    assert fakes_alive() == []


def test_fresh_processes_keep_to_the_minutes(bench, capsys):
    found = bench("--peer", FAKE, "--config", "off", "--clients", "1", "--fresh", "1", "--minutes", "0.001")
    assert {one["round"] for one in found["samples"]} == {0}
    assert "1 client: stopped by --minutes after 1 of 2 rounds" in capsys.readouterr().err


def test_a_server_that_refuses_its_flags_is_left_out_with_its_reason(bench):
    found = bench("--config", "off", "--config", "fixed2", "--config", "adaptive=--dies", "--clients", "1")
    assert [one["name"] for one in found["results"]] == ["ours:fixed2 / ours:off, 1 client"]
    assert "ours:adaptive, 1 client: left out, no such model" in found["notes"]


def test_a_peer_that_runs_already_is_measured_and_left_running(bench, start_fake):
    fake = start_fake()
    found = bench("--peer-url", fake.url, "--config", "off", "--clients", "1")
    assert [one["name"] for one in found["results"]] == ["ours:off / peer:url, 1 client"]
    assert any(request["path"] == "/completion" for request in fake.requests)


def test_without_any_server_of_ours_there_is_no_run(tmp_path, capsys):
    options = ["--ours", FAKE, "--config", "off=--dies", "--clients", "1", "--peer", FAKE]
    assert main(["bench", *SMALL, *options]) == 1
    assert "none of our servers started" in capsys.readouterr().err
    assert fakes_alive() == []


def test_servers_are_stopped_after_an_error_in_the_middle(tmp_path, monkeypatch):
    monkeypatch.setattr("eval.bench.schedule.Rounds.run", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["bench", *SMALL, "--ours", FAKE, "--config", "off", "--clients", "1"])
    assert fakes_alive() == []


def test_an_interrupted_run_reports_what_it_has(tmp_path, monkeypatch, capsys):
    rounds = Rounds._round
    calls = []

    def interrupted(self: Rounds, workload: str, number: int) -> None:
        calls.append(number)
        if number == 1:
            raise KeyboardInterrupt
        rounds(self, workload, number)

    monkeypatch.setattr(Rounds, "_round", interrupted)
    file = tmp_path / "run.json"
    options = ["--ours", FAKE, "--peer", FAKE, "--config", "off", "--clients", "1", "--json", str(file)]
    assert main(["bench", *SMALL, *options]) == 130
    found = json.loads(file.read_text())
    assert len(found["samples"]) == 2
    assert "interrupted: fewer rounds than were asked for" in found["notes"]
    assert fakes_alive() == []


def test_what_follows_the_dashes_goes_to_every_server():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--peer", "/opt/llama-server", "--model", "m", "--draft", "d", "-t", "2"])
    ours, peer = parse("fixed2")
    bench = Bench(args, ["-c", "512", "-fa", "on"], [ours, peer])
    argv = bench.argv(peer, 4)
    assert argv[:5] == ["/opt/llama-server", "-m", "m", "-t", "2"]
    assert argv[argv.index("-md") + 1] == "d"
    assert argv[argv.index("-np") + 1] == "4"
    assert argv.count("-c") == 1
    assert argv[-4:] == ["-c", "512", "-fa", "on"]
    assert "--spec-adaptive" not in argv
    assert bench.argv(ours, 4)[1:3] == ["-m", "spec_server"]


def test_workloads_have_prompts_for_every_kind():
    for name in WORKLOADS:
        assert len(prompts(name)) >= 8
        assert all(one.messages[-1]["role"] == "user" for one in prompts(name))
    with pytest.raises(ValueError, match="no workload"):
        prompts("poetry")


def test_the_answer_to_a_rewrite_begins_as_the_file_does():
    for one in prompts("rewrite"):
        content, start = one.messages[-1]["content"], one.answer_start
        assert start in content
        assert len(content.splitlines()) > 50


def test_the_bare_loop_stands_outside_the_package():
    assert (REPOSITORY / "scripts" / "bare_loop.py").exists()
    sources = [path.read_text() for path in (REPOSITORY / "eval").rglob("*.py")]
    assert not any("import llama_cpp" in source or "from llama_cpp" in source for source in sources)
