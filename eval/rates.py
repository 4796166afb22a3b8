"""Tokens per second by draft length: what the length rule expects of each, and what each makes."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from eval import models
from eval.client import Client
from eval.server import ServerProcess
from eval.workloads import WORKLOADS, prompts, tokens

LONGEST = 8


@dataclass(frozen=True, slots=True)
class Length:
    """One draft length over all prompts of a workload."""

    workload: str
    n_max: int
    measured: float  # tokens per second, median over the prompts
    predicted: float


@dataclass(frozen=True, slots=True)
class _Answer:
    per_second: float
    draft_ms: float
    draft_n: int
    n_drafts: int
    accepted_per_pos: tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-n", "--n-prompts", type=int, default=4, help="of each workload (default: 4)")
    add("--max-tokens", type=int, default=96, help="tokens of each answer (default: 96)")
    add("--workload", action="append", choices=WORKLOADS, help="repeatable (default: chat and code)")
    add("--json", type=Path, metavar="FILE", help="write every number there")
    add("--png", type=Path, metavar="FILE", help="draw them")
    parser.epilog = "What follows -- goes to both servers: one with fixed lengths, one with the rule."


def run(args: argparse.Namespace, server_args: Sequence[str], console: Console) -> int:
    command = [sys.executable, "-m", "spec_server", "-m", str(models.target()), "-md", str(models.DRAFTER)]
    command += ["-np", "1", "-c", "2048", "--metrics", "--threads-adaptive", "off", *server_args]
    if args.png:
        importlib.import_module("eval.bench.charts")  # a missing library is told before anything is measured
    lengths: list[Length] = []
    adaptive: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="eval-") as folder:
        fixed_argv = [*command, "--spec-adaptive", "off", "--spec-draft-n-max", str(LONGEST)]
        with (
            ServerProcess(fixed_argv, log_path=Path(folder) / "fixed.log") as fixed,
            ServerProcess([*command, "--spec-adaptive", "on"], log_path=Path(folder) / "rule.log") as rule,
            Client(fixed.base_url) as of_fixed,
            Client(rule.base_url) as of_rule,
        ):
            for workload in args.workload or ("chat", "code"):
                found, adaptive[workload] = _workload(of_fixed, of_rule, workload, args)
                lengths += found
                for line in _lines(workload, found, adaptive[workload]):
                    console.print(line, highlight=False, markup=False, soft_wrap=True)
    if args.json:
        facts = {"lengths": [asdict(one) for one in lengths], "adaptive": adaptive}
        args.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    if args.png:
        from eval.bench import charts

        measured = {w: [one.measured for one in lengths if one.workload == w] for w in adaptive}
        expected = {w: [one.predicted for one in lengths if one.workload == w] for w in adaptive}
        charts.draw_predicted(measured, expected, adaptive, args.png)
    return 0


def _workload(
    fixed: Client, rule: Client, workload: str, args: argparse.Namespace
) -> tuple[list[Length], float]:
    """Each prompt with every length and with the rule, one after the other, so that all meet the same machine."""
    by_length: list[list[_Answer]] = [[] for _ in range(LONGEST + 1)]
    by_rule = []
    for prompt in prompts(workload)[: args.n_prompts]:
        ids = tokens(prompt, fixed)
        for client in (fixed, rule):
            client.sample(ids, max_tokens=1, options={"temperature": 0})  # the prompt is read
        by_rule.append(_ask(rule, ids, args.max_tokens, LONGEST).per_second)
        for n_max, answers in enumerate(by_length):
            answers.append(_ask(fixed, ids, args.max_tokens, n_max))
    expected = predicted(rule.metrics(), by_length[-1])
    found = [
        Length(workload, k, statistics.median(a.per_second for a in answers), expected[k])
        for k, answers in enumerate(by_length)
    ]
    return found, statistics.median(by_rule)


def _ask(client: Client, ids: list[int], max_tokens: int, n_max: int) -> _Answer:
    options = {"temperature": 0, "ignore_eos": True, "speculative": {"n_max": n_max}}
    _, timings = client.sample(ids, max_tokens=max_tokens, options=options)
    return _Answer(
        timings["predicted_per_second"],
        timings["draft_ms"],
        timings["draft_n"],
        timings["n_drafts"],
        tuple(timings["accepted_per_pos"]),
    )


def predicted(metrics: Mapping[str, float], longest: Sequence[_Answer]) -> list[float]:
    """Tokens per second for each length from 0 on: E(k) / T(k), with the rule's own step costs.

    `longest` are answers with the longest drafts; they say how often each position stands, and what drafting takes.
    """
    n_drafts = sum(a.n_drafts for a in longest)
    draft_ms = sum(a.draft_ms for a in longest) / max(1, sum(a.draft_n for a in longest))
    yields, rates = 1.0, []
    for k in range(LONGEST + 1):
        if k:
            stood = sum(a.accepted_per_pos[k - 1] for a in longest if len(a.accepted_per_pos) >= k)
            yields += stood / max(1, n_drafts)
        step_ms = metrics[f'llamacpp:spec_step_cost_ms{{tokens="{k + 1}"}}'] + k * draft_ms
        rates.append(1e3 * yields / step_ms)
    return rates


def _lines(workload: str, lengths: Sequence[Length], adaptive: float) -> list[str]:
    best = max(one.measured for one in lengths)
    return [
        *(
            f"{workload:8} {one.n_max}  measured {one.measured:6.1f}  predicted {one.predicted:6.1f}"
            for one in lengths
        ),
        f"{workload:8} rule measured {adaptive:6.1f}, {adaptive / best:.3f} of the best fixed length,"
        f" {adaptive / lengths[0].measured:.3f} of none",
    ]
