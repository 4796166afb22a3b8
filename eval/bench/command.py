"""`python -m eval bench`: our server, any llama-server and the bare library, in paired rounds of one run."""

from __future__ import annotations

import argparse
import importlib
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from eval import models, workloads
from eval.bench import comparisons, machine, report
from eval.bench.arguments import add_arguments, blocks, chosen_configs
from eval.bench.configs import OURS, PEER, Config
from eval.bench.contestants import BareLoop, Contestant, ServerContestant
from eval.bench.samples import Sample
from eval.bench.schedule import Block, Prompts, Rounds, clients
from eval.client import Client
from eval.server import ServerDied, ServerProcess

__all__ = ["add_arguments", "run"]

BARE_LOOP = models.REPOSITORY / "scripts" / "bare_loop.py"
FLAGS = {
    # A prompt cache in RAM would copy states about between rounds.
    "--cache-ram": "0",
}


def run(args: argparse.Namespace, server_args: Sequence[str], console: Console) -> int:
    if args.charts:
        importlib.import_module("eval.bench.charts")  # a missing library is told before anything is measured
    configs = chosen_configs(args)
    bench = Bench(args, list(server_args), configs)
    with ExitStack() as stack:
        folder = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        neighbour = machine.Neighbour(args.neighbour, args.neighbour_core) if args.neighbour else None
        if neighbour is not None:
            stack.enter_context(neighbour)
        try:
            for block in blocks(args):
                bench.measure(block, folder, neighbour)
        except (KeyboardInterrupt, SystemExit):
            if bench.samples:
                bench.notes.append("interrupted: fewer rounds than were asked for")
                _report(bench, console)
            raise
    return _report(bench, console)


def _report(bench: Bench, console: Console) -> int:
    args, found = bench.args, bench.found()
    text = report.markdown(found)
    print(text, file=console.file)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")
    if args.json:
        args.json.write_text(report.to_json(found), encoding="utf-8")
    if args.charts:
        from eval.bench import charts

        for path in charts.draw(found, bench.configs, args.charts):
            _log(f"wrote {path}")
    return 0 if found.results else 1


@dataclass(slots=True)
class Bench:
    """The blocks of a run one after the other, and what they found."""

    args: argparse.Namespace
    server_args: list[str]
    configs: list[Config]
    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def measure(self, block: Block, folder: Path, neighbour: machine.Neighbour | None) -> None:
        """All rounds of a block, with --fresh by several sets of processes, while the time lasts."""
        n_fresh = self.args.fresh or block.n_rounds
        began, budget_s = time.monotonic(), block.budget_s
        for first in range(0, block.n_rounds, n_fresh):
            n_rounds = min(n_fresh, block.n_rounds - first)
            spent = time.monotonic() - began
            if budget_s is not None and first and spent * (first + n_rounds) / first > budget_s:
                _log(
                    f"{clients(block.n_clients)}: stopped by --minutes after {first} of {block.n_rounds} rounds"
                )
                return
            left_s = None if budget_s is None else budget_s - spent
            self._measure(replace(block, n_rounds=n_rounds, budget_s=left_s), first, folder, neighbour)

    def _measure(self, block: Block, first: int, folder: Path, neighbour: machine.Neighbour | None) -> None:
        """Starts everybody, measures rounds from number `first` on, stops everybody, whatever happens."""
        with ExitStack() as stack:
            contestants = self._started(block, first, folder, stack)
            ours = next((one for one in contestants if one.name.startswith(f"{OURS}:")), None)
            if ours is None:
                raise ServerDied("none of our servers started:\n" + "\n".join(self.notes))
            available, warm = self._prompts(block, first, ours)
            rounds = Rounds(
                block,
                list(contestants),
                available,
                neighbour,
                random.Random(self.args.seed + first),
                _log,
                first,
                notes=self.notes,
            )
            rounds.warm_up(warm, self.args.warmup)
            self._look_around(contestants)
            seconds = block.n_rounds * block.round_s(available, len(contestants), 2 if neighbour else 1)
            limit = "" if block.budget_s is None else f", stopped after {block.budget_s / 60:.1f}"
            rounds_are = f"very roughly {seconds / 60:.0f} min for {block.n_rounds} rounds{limit}"
            _log(f"{clients(block.n_clients)}: {rounds_are}")
            try:
                rounds.run()
            finally:
                self.samples += rounds.samples

    def found(self) -> report.Run:
        args = self.args
        setup = machine.describe() | {
            "models": f"{(args.model or models.target()).name}, {args.draft.name}",
            "threads": args.threads,
            "tokens": f"{blocks(args)[0].n_tokens} an answer, temperature 0, prompts read before",
            **{one.contestant: shlex.join(one.flags) for one in self.configs},
            "all servers": shlex.join(self.server_args) or "none",
            "neighbour": f"{args.neighbour} busy loops" if args.neighbour else "none",
            "command": shlex.join(sys.argv[1:]),
        }
        results = comparisons.results(self.samples, self.configs, args.compare)
        lengths = comparisons.best_lengths(self.samples, self.configs)
        return report.Run(setup, self.samples, results, lengths, [*self.notes, *_reading_again(self.samples)])

    def _started(self, block: Block, first: int, folder: Path, stack: ExitStack) -> list[Contestant]:
        """In random order. One that does not start is left out with its reason: not all know all flags."""
        contestants: list[Contestant] = []
        _log(f"{clients(block.n_clients)}: starting {len(self.configs)} servers")
        order = random.Random(self.args.seed + first)
        suffix = f"-{block.n_clients}" + (f"-from-{first}" if first else "")
        for config in order.sample(self.configs, len(self.configs)):
            log = folder / f"{config.contestant.replace(':', '-')}{suffix}.log"
            env = dict(self.args.ours_env if config.side == OURS else self.args.peer_env)
            process = ServerProcess(self.argv(config, block.n_clients), log_path=log, env=env)
            try:
                stack.enter_context(process)
            except (ServerDied, OSError) as error:
                self.notes.append(
                    f"{config.contestant}, {clients(block.n_clients)}: left out, {_last_line(error)}"
                )
                _log(self.notes[-1])
                continue
            contestants.append(self._server(config.contestant, process.base_url, process.pid))
        if self.args.peer_url:
            contestants.append(self._server(comparisons.REMOTE, self.args.peer_url, None))
        if self.args.bare and block.n_clients == 1:
            argv = [sys.executable, str(BARE_LOOP), "-c", str(self.args.slot_ctx), *self._same_for_all()]
            bare = BareLoop(
                argv,
                log_path=folder / f"bare{suffix}.log",
                timeout_s=self.args.timeout,
                env=dict(self.args.bare_env),
            )
            contestants.append(stack.enter_context(bare))
        return contestants

    def argv(self, config: Config, n_slots: int) -> list[str]:
        command = self.args.peer if config.side == PEER else self.args.ours
        start = shlex.split(command) if command else [sys.executable, "-m", "spec_server"]
        draft = ["-md", str(self.args.draft)] if config.needs_draft_model else []
        sizes = {"-np": str(n_slots), "-c": str(n_slots * self.args.slot_ctx), "-tb": str(self.args.threads)}
        flags = [word for flag in (FLAGS | sizes).items() if flag[0] not in self.server_args for word in flag]
        return [*start, *self._same_for_all(), *draft, *flags, *config.flags, *self.server_args]

    def _same_for_all(self) -> list[str]:
        layers = [] if self.args.gpu_layers is None else ["-ngl", str(self.args.gpu_layers)]
        return ["-m", str(self.args.model or models.target()), "-t", str(self.args.threads), *layers]

    def _server(self, name: str, url: str, pid: int | None) -> ServerContestant:
        return ServerContestant(name, url, pid=pid, timeout_s=self.args.timeout)

    def _prompts(self, block: Block, first: int, ours: Contestant) -> tuple[Prompts, list[list[int]]]:
        """Tokens by workload, and those to warm up with: the last of chat; rounds take the first."""
        assert isinstance(ours, ServerContestant)
        with Client(ours.base_url, timeout_s=self.args.timeout) as client:
            available = {}
            n_used = (first + block.n_rounds) * block.n_clients
            for name in block.workloads:
                those = [workloads.tokens(one, client) for one in workloads.prompts(name)[:n_used]]
                available[name] = those
                again = f"{name}, {clients(block.n_clients)}: its {len(those)} prompts are used again"
                if n_used > len(those) and again not in self.notes:
                    self.notes.append(again)
            warm = [workloads.tokens(one, client) for one in workloads.prompts("chat")[-block.n_clients :]]
        return available, warm

    def _look_around(self, contestants: Sequence[Contestant]) -> None:
        for found in machine.unrest([one.pid for one in contestants if one.pid is not None]):
            self.notes.append(found)
            _log(found)


def _reading_again(samples: Sequence[Sample]) -> list[str]:
    """Then a rate holds more than generating."""
    names = sorted({one.contestant for one in samples if one.n_read_again})
    return [f"{name}: read parts of prompts again inside the measured time" for name in names]


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:300]


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
