"""`python -m eval fidelity`: does drafting change what is said? By distribution, and at temperature 0 word for word."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from eval.fidelity.arms import ARMS, Servers, named
from eval.fidelity.rates import Rates, measure
from eval.fidelity.texts import Greedy, Sampled, compare_greedy, sample

# Among all comparisons of a run one in a thousand runs may fail by chance.
_FALSE_ALARMS = 1e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--server-bin", metavar="COMMAND", help="start this instead of our server")
    add("-n", "--n-texts", type=int, default=500, help="sampled texts of each lot; 0: none (default: 500)")
    add("--n-prompts", type=int, default=20, help="prompts for greedy texts; 0: none (default: 20)")
    add("--n-rates", type=int, default=0, help="prompts for the acceptance of each rule (default: 0, none)")
    add(
        "--max-tokens",
        type=int,
        default=64,
        help="tokens of a greedy text or a prompt's answer (default: 64)",
    )
    add("--arm", action="append", metavar="NAME", help=f"repeatable: {'; '.join(a.name for a in ARMS)}")
    add("--json", type=Path, metavar="FILE", help="write every number there")
    parser.epilog = (
        "What follows -- goes to the servers that are started. Exit status 1: drafting changes the text."
    )


def run(args: argparse.Namespace, server_args: Sequence[str], console: Console) -> int:
    arms = named(args.arm)
    start = shlex.split(args.server_bin) if args.server_bin else [sys.executable, "-m", "spec_server"]
    sampled: list[Sampled] = []
    greedy: list[Greedy] = []
    rates: list[Rates] = []
    with tempfile.TemporaryDirectory(prefix="eval-") as folder:
        servers = Servers(start, tuple(server_args), Path(folder))
        if args.n_texts > 0:
            sampled = sample(servers, arms, args.n_texts, console)
        if args.n_prompts > 0:
            greedy = compare_greedy(servers, arms, args.n_prompts, args.max_tokens, console)
        if args.n_rates > 0:
            rates = measure(servers, args.n_rates, args.max_tokens, console)
    worst = _FALSE_ALARMS / max(1, len(sampled))
    failed = [f"{s.arm} at {s.sampling}" for s in sampled if s.comparison.p_value < worst]
    failed += [f"{g.arm} on {g.model}" for g in greedy if not g.is_good]
    if args.json:
        facts = {
            "sampled": [asdict(s) for s in sampled],
            "greedy": [asdict(g) for g in greedy],
            "rates": [asdict(r) for r in rates],
            "failed": failed,
        }
        args.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    for name in failed:
        console.print(f"drafting changes the text: {name}", highlight=False, markup=False, soft_wrap=True)
    return 1 if failed else 0
