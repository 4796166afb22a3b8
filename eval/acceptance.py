"""`python -m eval acceptance`: what a restored slot is worth, against one that was never interrupted."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from eval import models, report
from eval.client import Client
from eval.drafters import DRAFTERS, named
from eval.scenarios import Acceptance, Conversation, Progress, Session, load
from eval.server import ServerProcess
from eval.sessions import ProcessSession, RemoteSession, strip_command

FLAGS = {
    # One slot, so that a measurement has the machine for itself.
    "-np": "1",
    "-c": "2048",
    # A prompt cache in RAM would bring erased slots back.
    "--cache-ram": "0",
    "--spec-draft-n-max": "3",
    "--spec-draft-p-min": "0",
}
# A stock server does not know it. Counts can be compared only between runs of fixed draft lengths.
OUR_FLAGS = {"--spec-adaptive": "off", "--threads-adaptive": "off"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="measure the server that answers there, instead of starting one")
    where.add_argument(
        "--server-bin", metavar="COMMAND", help="start this instead of our server, llama-server for example"
    )
    parser.add_argument("--model", type=Path, help="target (default: SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--draft", type=Path, default=models.DRAFTER, help="draft model (default: the packaged)"
    )
    parser.add_argument(
        "--drafter",
        action="append",
        metavar="NAME",
        help=f"one table each, repeatable: all, {', '.join(DRAFTERS)} (default: draft-simple)",
    )
    parser.add_argument("-n", "--n-prompts", type=_positive, default=20, help="conversations (default: 20)")
    parser.add_argument("--max-tokens", type=_positive, default=64, help="tokens a turn (default: 64)")
    parser.add_argument("--prompts", type=Path, default=models.CHAT_PROMPTS, help="JSON Lines with messages")
    parser.add_argument("--id-slot", type=int, default=0, help="the slot to use (default: 0)")
    parser.add_argument("--api-key", default=os.environ.get("LLAMA_API_KEY"), help="for --url")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every turn and the sums there")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep the server's log there")
    parser.epilog = "What follows -- goes to the server that is started."


def run(args: argparse.Namespace, server_args: Sequence[str], console: Console) -> int:
    conversations = load(args.prompts, args.n_prompts)
    # A server that runs already drafts with whatever it drafts with.
    names = [""] if args.url else [one for name in args.drafter or ["draft-simple"] for one in named(name)]
    tables = []
    for name in dict.fromkeys(names):
        table = _measure(args, name, server_args, conversations)
        tables.append(table)
        if args.markdown:
            print(report.markdown(table), file=console.file)
        else:
            report.print_table(table, console)
    if args.json:
        args.json.write_text(report.to_json(tables), encoding="utf-8")
    return 0


def _measure(
    args: argparse.Namespace, drafter: str, server_args: Sequence[str], conversations: Sequence[Conversation]
) -> report.Table:
    with ExitStack() as stack:
        session, setup = _session(args, drafter, server_args, stack)
        acceptance = Acceptance(
            session,
            conversations,
            max_tokens=args.max_tokens,
            prefix=f"eval-{os.getpid()}",
            id_slot=args.id_slot,
            progress=_progress(len(conversations)),
        )
        rows = list(acceptance.rows())
    heading = f"{drafter}: " if drafter else ""
    title = f"{heading}{args.n_prompts} conversations, {args.max_tokens} tokens a turn, temperature 0"
    setup["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, {platform.python_version()}"
    setup |= {"prompts": args.prompts.name, "n_prompts": args.n_prompts, "max_tokens": args.max_tokens}
    return report.Table(title, rows, setup)


def _session(
    args: argparse.Namespace, drafter: str, server_args: Sequence[str], stack: ExitStack
) -> tuple[Session, dict[str, object]]:
    if args.url:
        remote = stack.enter_context(RemoteSession(Client(args.url, api_key=args.api_key)))
        return remote, {"url": args.url}
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eval-")))
    argv = server_argv(args, drafter, server_args, slot_dir=folder)
    process = stack.enter_context(ServerProcess(argv, log_path=args.log or folder / "server.log"))
    session = stack.enter_context(ProcessSession(process, folder, strip_command()))
    return session, {"drafter": drafter, "server": argv}


def server_argv(
    args: argparse.Namespace, drafter: str, server_args: Sequence[str], slot_dir: Path
) -> list[str]:
    """The same flags for either server, so that one table can be laid beside the other."""
    setup = DRAFTERS[drafter]
    flags = FLAGS | {"--spec-type": drafter} | dict(setup.flags)
    if not args.server_bin:
        flags |= OUR_FLAGS
    start = shlex.split(args.server_bin) if args.server_bin else [sys.executable, "-m", "spec_server"]
    files = ["-m", str(args.model or setup.target or models.target())]
    if setup.needs_draft_model:
        files += ["-md", str(args.draft)]
    files += ["--slot-save-path", str(slot_dir)]
    # Left out where the caller names them: a flag that may be repeated would add to ours.
    own = [word for flag in flags.items() if flag[0] not in server_args for word in flag]
    return [*start, *files, *own, *server_args]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _progress(n_conversations: int) -> Progress:
    """A line that overwrites itself, on a terminal only."""

    def show(row: str, done: int) -> None:
        if sys.stderr.isatty():
            end = "\r\033[K" if done == n_conversations else ""
            print(f"\r\033[K{row}: {done}/{n_conversations}", end=end, file=sys.stderr, flush=True)

    return show
