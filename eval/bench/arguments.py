"""The flags of `python -m eval bench`, and what --quick makes of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eval import models
from eval.bench import configs
from eval.bench.configs import Config
from eval.bench.machine import default_threads
from eval.bench.schedule import Block
from eval.workloads import WORKLOADS

# --quick: five minutes on two cores with the standard models; the shares of the time are by clients.
_QUICK_TOKENS, _QUICK_MINUTES = 64, 5.0
_QUICK_BLOCKS: Sequence[tuple[int, tuple[str, ...], float]] = ((1, WORKLOADS, 0.65), (8, ("chat",), 0.35))
_START_SHARE = 0.15  # of --minutes, for starting servers and warming up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_contestants(parser)
    _add_amounts(parser)
    _add_surroundings(parser)
    _add_outputs(parser)
    parser.epilog = "What follows -- goes to every server that is started."


def _add_contestants(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    peer = parser.add_mutually_exclusive_group()
    peer.add_argument("--peer", metavar="PATH", help="a llama-server binary, or a command, to compare with")
    peer.add_argument("--peer-url", metavar="URL", help="a server that runs already, with as many slots")
    add("--ours", metavar="COMMAND", help="our server, of another checkout for example (default: this one)")
    add("--model", type=Path, help="target (default: SmolLM2-135M-Instruct)")
    add("--draft", type=Path, default=models.DRAFTER, help="draft model (default: the packaged)")
    add("--config", type=configs.parse, action="append", metavar="[SIDE:]NAME[=FLAGS]", help=_config_help())
    add(
        "--sweep",
        nargs="?",
        const=configs.SWEEP,
        metavar="FLAGS",
        help=f"fixed lengths 0 to 8 for both, and adaptive; {{n}} is the length (default: {configs.SWEEP!r})",
    )
    add("--bare", action="store_true", help="with one client, a loop of llama_decode and argmax takes part")


def _add_amounts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workload", choices=WORKLOADS, action="append", help="repeatable (default: all five)")
    add("--clients", type=_numbers, default=(1, 8), metavar="N,...", help="at once (default: 1,8)")
    add("--rounds", type=_positive, default=8, help="paired rounds, each with other prompts (default: 8)")
    add(
        "--fresh",
        type=_positive,
        metavar="N",
        help="start everybody again every N rounds: a process may be some per cent faster than another for its whole "
        "life (default: never)",
    )
    add("--minutes", type=float, metavar="M", help="stop before M minutes, after a whole round")
    add("--max-tokens", type=_positive, help="tokens of each answer (default: 128)")
    add("--warmup", type=_positive, default=64, help="tokens before the first round (default: 64)")
    add("--quick", action="store_true", help="five minutes: off, default, adaptive; 8 clients on chat only")
    add("--timeout", type=float, default=180.0, metavar="S", help="for one request (default: 180)")
    add("--seed", type=int, default=0, help="of the order of contestants (default: 0)")


def _add_surroundings(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--neighbour",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="N",
        help="measure beside N busy loops too (default of N: 1)",
    )
    add("--neighbour-core", type=int, metavar="CORE", help="pin them there")
    add("-t", "--threads", type=_positive, default=default_threads(), help="of every contestant")
    add("--slot-ctx", type=_positive, default=2048, help="context of a slot (default: 2048)")
    add("-ngl", "--gpu-layers", type=int, help="of every contestant")
    add("--ours-env", type=_setting, action="append", default=[], metavar="K=V", help="for our servers")
    add("--peer-env", type=_setting, action="append", default=[], metavar="K=V", help="for the peer's")
    add("--bare-env", type=_setting, action="append", default=[], metavar="K=V", help="for the bare loop")


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--compare",
        type=_pair,
        action="append",
        default=[],
        metavar="A/B",
        help="one more ratio of the table",
    )
    add("--json", type=Path, metavar="FILE", help="write every sample there")
    add("--markdown", type=Path, metavar="FILE", help="write the tables there")
    add("--charts", type=Path, metavar="DIR", help="write charts there, as PNG")
    add("--logs", type=Path, metavar="DIR", help="keep the servers' logs there")


def _config_help() -> str:
    names = ", ".join(configs.PRESETS)
    return f"repeatable; SIDE is ours or peer. Presets: {names} (default: {', '.join(configs.DEFAULT)})"


def chosen_configs(args: argparse.Namespace) -> list[Config]:
    groups: list[Sequence[Config]] = list(args.config or [])
    if args.sweep:
        groups += [configs.sweep(args.sweep)]
    if not args.config:
        presets = ("adaptive",) if args.sweep else configs.QUICK if args.quick else configs.DEFAULT
        groups += [configs.parse(name) for name in presets]
    return configs.chosen(groups, with_peer=bool(args.peer))


def blocks(args: argparse.Namespace) -> list[Block]:
    """One for each number of clients; --minutes is shared out between them."""
    n_tokens = args.max_tokens or (_QUICK_TOKENS if args.quick else 128)
    minutes = args.minutes or (_QUICK_MINUTES if args.quick else None)
    budget_s = None if minutes is None else minutes * 60 * (1 - _START_SHARE)
    if args.quick:
        return [
            Block(n, tuple(args.workload or workloads), args.rounds, n_tokens, (budget_s or 0.0) * share)
            for n, workloads, share in _QUICK_BLOCKS
        ]
    workloads = tuple(dict.fromkeys(args.workload or WORKLOADS))
    total = sum(args.clients)
    return [
        Block(n, workloads, args.rounds, n_tokens, None if budget_s is None else budget_s * n / total)
        for n in args.clients
    ]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({_positive(part) for part in text.split(",")}))


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _pair(text: str) -> tuple[str, str]:
    first, slash, second = text.partition("/")
    if not (first and slash and second):
        raise argparse.ArgumentTypeError(f"{text!r} is not CONTESTANT/CONTESTANT, like ours:off/peer:off")
    return first, second
