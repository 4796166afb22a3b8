"""`python -m eval COMMAND`: one module per command, with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Protocol

import httpx
from rich.console import Console

from eval import acceptance, rates, transfer
from eval.bench import command as bench
from eval.client import ServerError
from eval.fidelity import command as fidelity
from eval.server import ServerDied


class Command(Protocol):
    """What each command's module offers; `run` returns the exit status."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace, server_args: Sequence[str], console: Console) -> int: ...


COMMANDS: dict[str, Command] = {
    "acceptance": acceptance,
    "bench": bench,
    "fidelity": fidelity,
    "rates": rates,
    "transfer": transfer,
}


def main(argv: Sequence[str] | None = None) -> int:
    own, server_args = split_arguments(sys.argv[1:] if argv is None else list(argv))
    parser = argparse.ArgumentParser(prog="python -m eval", description=sys.modules["eval"].__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, description=module.__doc__, help=module.__doc__))
    args = parser.parse_args(own)
    try:
        return COMMANDS[args.command].run(args, server_args, Console())
    except (
        ServerError,
        ServerDied,
        OSError,
        ValueError,
        httpx.HTTPError,
        subprocess.SubprocessError,
    ) as error:
        print(f"eval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def split_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """What stands before the first "--" is ours, what stands behind it is the server's."""
    if "--" not in argv:
        return argv, []
    border = argv.index("--")
    return argv[:border], argv[border + 1 :]


def _exit_in_order(_signal: int, _frame: FrameType | None) -> None:
    # As an exception, so that the servers that were started are stopped on the way out.
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit_in_order)
    sys.exit(main())
