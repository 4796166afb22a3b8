"""`python -m eval transfer`: what a save and a restore cost, against the same bytes written and read plainly."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console

from eval import models, raw
from eval.client import Client
from eval.server import ServerProcess

BIG, NEIGHBOUR = 0, 1  # slots
MIB = 1 << 20
FLAGS = {"-np": "2", "--cache-ram": "0", "--spec-adaptive": "off"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="target (default: SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--draft", type=Path, default=models.DRAFTER, help="draft model (default: the packaged)"
    )
    parser.add_argument(
        "--tokens", type=int, default=8000, help="tokens in the slot (default: 8000, 184 MB with SmolLM2)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="saves and restores (default: 9)")
    parser.add_argument("--dir", type=Path, help="directory for the slot files (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round there")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep the server's log there")
    parser.epilog = "What follows -- goes to the server."


@dataclass(frozen=True, slots=True)
class Round:
    """One save and one restore with nobody else in the server, and the plain work just beside them. Milliseconds."""

    save: float  # without the sync
    sync: float
    save_hold: float
    write: float
    restore: float
    restore_hold: float
    read: float
    copy: float


@dataclass(frozen=True, slots=True)
class Waits:
    """Gaps between a neighbour's tokens, in milliseconds: without transfers, and the longest during each transfer."""

    plain: list[float]
    save: list[float]
    restore: list[float]


@dataclass(frozen=True, slots=True)
class Row:
    """One number against its bound."""

    name: str
    value: str
    against: str
    ratio: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.ratio <= self.bound


@dataclass(slots=True)
class Measured:
    """All of it, as it goes to --json."""

    setup: dict[str, object]
    rounds: list[Round] = field(default_factory=list)
    waits: Waits = field(default_factory=lambda: Waits([], [], []))
    memory: dict[str, int] = field(default_factory=dict)
    sections: dict[str, int] = field(default_factory=dict)


def run(args: argparse.Namespace, server_args: Sequence[str], console: Console) -> int:
    with ExitStack() as stack:
        folder = args.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="transfer-")))
        folder.mkdir(parents=True, exist_ok=True)
        argv = server_argv(args, server_args, folder)
        log_path = args.log or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
        process = stack.enter_context(ServerProcess(argv, log_path=log_path, env={"GOMP_SPINCOUNT": "300"}))
        client = stack.enter_context(Client(process.base_url, timeout_s=1800.0))
        machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        measured = Measured({"server": argv, "machine": machine, "tokens": args.tokens})
        measure(client, process, folder, args, measured)
    for line in lines(measured):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if args.json:
        args.json.write_text(json.dumps(asdict(measured), indent=2) + "\n", encoding="utf-8")
    return 0


def server_argv(args: argparse.Namespace, server_args: Sequence[str], folder: Path) -> list[str]:
    flags = FLAGS | {"-c": str(2 * (args.tokens + 512)), "-t": str(max(1, (os.cpu_count() or 2) // 2))}
    own = [word for flag in flags.items() if flag[0] not in server_args for word in flag]
    files = [
        "-m",
        str(args.model or models.target()),
        "-md",
        str(args.draft),
        "--slot-save-path",
        str(folder),
    ]
    return [sys.executable, "-m", "spec_server", *files, *own, *server_args]


# -- measuring


def measure(
    client: Client, process: ServerProcess, folder: Path, args: argparse.Namespace, measured: Measured
) -> None:
    pid, base_url = process.pid, process.base_url
    prompt = [1 + (7 * i + i * i // 13) % 4000 for i in range(args.tokens)]
    client.complete(prompt, max_tokens=1, id_slot=BIG)
    before = raw.anonymous_bytes(pid)
    with raw.MemoryWatch(pid) as saving:
        saved = client.save(BIG, "first.bin")
    data = np.fromfile(folder / "first.bin", np.uint8)
    with raw.MemoryWatch(pid) as restoring:
        client.restore(BIG, "first.bin")
    largest = max(saved["target"]["bytes"], saved["draft"]["bytes"])
    measured.memory = {
        "largest": largest,
        "save": saving.peak - before,
        "restore": restoring.peak - before,
    }
    measured.sections = {
        "file": saved["n_written"],
        "target": saved["target"]["bytes"],
        "draft": saved["draft"]["bytes"],
        "checkpoints": saved["n_ckpt_saved"],
    }
    buffers = data, np.zeros_like(data)
    for i in range(args.rounds):
        measured.rounds.append(one_round(client, folder, i, saved["target"]["bytes"], *buffers))
    measured.waits = waits(base_url, args.rounds)


def one_round(
    client: Client, folder: Path, number: int, state_bytes: int, data: raw.Bytes, buffer: raw.Bytes
) -> Round:
    """Plain work before and after in turn, so that a machine that slows down does so for both."""
    write = raw.write_ms(data, folder / "plain.bin")
    name = f"round-{number}.bin"
    saved = client.save(BIG, name)["timings"]
    copy = min(raw.copy_ms(data[:state_bytes], buffer[:state_bytes]) for _ in range(3))
    read = raw.read_ms(folder / name, buffer)
    restored = client.restore(BIG, name)["timings"]
    (folder / name).unlink()
    return Round(
        save=saved["save_ms"] - saved["sync_ms"],
        sync=saved["sync_ms"],
        save_hold=saved["hold_ms"],
        write=write,
        restore=restored["restore_ms"],
        restore_hold=restored["hold_ms"],
        read=read,
        copy=copy,
    )


def waits(base_url: str, n_rounds: int) -> Waits:
    """A neighbour generates all the while; half of the time nothing else happens."""
    arrivals: list[float] = []
    ended = threading.Event()

    def generate() -> None:
        while not ended.is_set():
            body = {"prompt": [5, 6, 7], "n_predict": 200, "id_slot": NEIGHBOUR, "stream": True}
            body |= {"ignore_eos": True, "temperature": 0.0, "speculative.type": "none"}
            with httpx.stream("POST", f"{base_url}/completion", json=body, timeout=60.0) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        arrivals.append(time.perf_counter())
                    if ended.is_set():
                        return
            arrivals.append(math.nan)  # the next gap is no wait for a token

    thread = threading.Thread(target=generate)
    thread.start()
    spans: dict[str, list[tuple[float, float]]] = {"save": [], "restore": []}
    with Client(base_url, timeout_s=600.0) as other:
        for _ in range(n_rounds):
            time.sleep(0.7)
            for action in spans:
                began = time.perf_counter()
                getattr(other, action)(BIG, "first.bin")
                spans[action].append((began, time.perf_counter()))
                time.sleep(0.2)
    ended.set()
    thread.join()
    gaps = [(a, b) for a, b in pairwise(arrivals) if b > a]
    longest = {
        action: [
            max((b - a for a, b in gaps if a < end and b > begin), default=0.0) * 1e3 for begin, end in times
        ]
        for action, times in spans.items()
    }
    busy = [span for times in spans.values() for span in times]
    plain = [(b - a) * 1e3 for a, b in gaps if not any(a < end and b > begin for begin, end in busy)]
    return Waits(plain, longest["save"], longest["restore"])


# -- telling


def rows(measured: Measured) -> list[Row]:
    return [*_time_rows(measured.rounds), *_wait_rows(measured), *_memory_rows(measured.memory)]


def _time_rows(rounds: Sequence[Round]) -> list[Row]:
    save = [r.save for r in rounds]
    write, read, copy = ([getattr(r, name) for r in rounds] for name in ("write", "read", "copy"))
    set_data = [r.restore_hold for r in rounds]
    return [
        _timed("save, sync excluded", save, {"plain write": write}, 1.25),
        _timed("save, sync excluded", save, {"memcpy": copy, "plain write": write}, 1.25),
        _timed("restore", [r.restore for r in rounds], {"plain read": read, "set_data": set_data}, 1.5),
        _timed("engine thread held, save", [r.save_hold for r in rounds], {"memcpy": copy}, 1.5),
        _timed("engine thread held, restore", set_data, {"memcpy": copy}, 1.5),
    ]


def _timed(name: str, ours: Sequence[float], plain: Mapping[str, Sequence[float]], bound: float) -> Row:
    """Medians for people; the ratio is the median of the rounds' own ratios."""
    against = [sum(parts) for parts in zip(*plain.values(), strict=True)]
    ratio = statistics.median(a / b for a, b in zip(ours, against, strict=True))
    text = f"{' + '.join(plain)} {statistics.median(against):.1f} ms"
    return Row(name, f"{statistics.median(ours):.1f} ms", text, ratio, bound)


def _wait_rows(measured: Measured) -> list[Row]:
    """What a neighbour may wait: as long as the engine thread may be held, and one step of its own."""
    waits, rounds = measured.waits, measured.rounds
    step = statistics.quantiles(waits.plain, n=100)[98]
    held = 1.5 * statistics.median(r.copy for r in rounds)
    found = []
    for action, longest in (("save", waits.save), ("restore", waits.restore)):
        wait = statistics.median(longest)
        against = f"1.5 memcpy {held:.1f} ms + one step (99%) {step:.1f} ms"
        found.append(
            Row(f"neighbour's longest wait, {action}", f"{wait:.1f} ms", against, wait / (held + step), 1.0)
        )
    return found


def _memory_rows(memory: Mapping[str, int]) -> list[Row]:
    largest = memory["largest"]
    return [
        Row(
            f"memory above the server's, {action}",
            f"{memory[action] / MIB:.0f} MiB",
            f"largest section {largest / MIB:.0f} MiB",
            memory[action] / largest,
            1.1,
        )
        for action in ("save", "restore")
    ]


def lines(measured: Measured) -> list[str]:
    sizes = measured.sections
    sync = statistics.median([x.sync for x in measured.rounds])
    found = [
        f"{measured.setup['tokens']} tokens, {sizes['file'] / 1e6:.1f} MB: target {sizes['target'] / 1e6:.1f},"
        f" draft {sizes['draft'] / 1e6:.1f}; {measured.setup['machine']}; sync {sync:.0f} ms",
        "",
        "| what | measured | against | ratio | bound |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows(measured):
        mark = "" if row.holds else " (missed)"
        found.append(
            f"| {row.name} | {row.value} | {row.against} | {row.ratio:.2f}{mark} | {row.bound:.2f} |"
        )
    return found
