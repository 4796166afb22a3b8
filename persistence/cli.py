"""The `spec-slots` command: lists, inspects, verifies and rewrites slot files, without any llama library."""

from __future__ import annotations

import functools
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from persistence import report
from persistence.catalog import Catalog, StoredFile
from persistence.errors import NotASlotFile, SlotFileError, UnsupportedContent, UnsupportedVersion
from persistence.files import SystemFiles
from persistence.reader import SlotFile
from persistence.rewrite import rewrite
from persistence.store import TEMPORARY_PREFIX, TEMPORARY_SUFFIX
from persistence.vocabulary import read_vocabulary
from persistence.writer import Saved, SlotWriter

_UNVERIFIED = (
    "no checksums, as in the files of a stock llama-server; its parts fit together, no more can be said"
)
BIG_BYTES = 64 << 20  # worth a progress bar

P = ParamSpec("P")

app = typer.Typer(
    help="Look at, check and rewrite slot files. No model and no llama library is needed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A slot file.")]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="OUT", help="Write here instead of over FILE.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON value instead of text.")]


def main() -> None:
    app()


def _reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except SlotFileError as error:
            typer.echo(f"spec-slots: {error}", err=True)
            raise typer.Exit(2) from None

    return run


@app.command("ls")
@_reports_errors
def list_files(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory of slot files.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read and check every byte of every file.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the slot files of a directory and what each holds, without reading all of it."""
    stored = Catalog(SystemFiles()).list(directory)
    checked = {file.name: _checked(directory, file) for file in stored} if verify else {}
    if as_json:
        typer.echo(json.dumps([report.listed(file, checked.get(file.name, "")) for file in stored], indent=2))
    else:
        report.print_listing(Console(), stored, checked, now=time.time())


def _checked(directory: Path, stored: StoredFile) -> str:
    if stored.error is not None:
        return ""
    if stored.facts is None:
        return report.NO_CHECKSUMS
    damage = _damage(directory / stored.name)
    return f"damaged: {', '.join(error.section for error in damage)}" if damage else "yes"


@app.command()
@_reports_errors
def inspect(
    path: FileArgument,
    as_json: JsonOption = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show the tokens: ids, or text with --model.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="GGUF", help="The model whose vocabulary turns --tokens into text.")
    ] = None,
) -> None:
    """Show a file's sections, identities, settings and checkpoints."""
    vocabulary = read_vocabulary(model) if model else None
    with _open(path) as file:
        facts = report.inspected(file)
        if tokens or model:
            facts["tokens"] = list(file.tokens) if vocabulary is None else vocabulary.text(file.tokens)
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        report.print_inspection(Console(), path.name, facts)


@app.command()
@_reports_errors
def verify(paths: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Slot files.")]) -> None:
    """Read and check every byte. Exit status 1 where one is damaged, cannot be read, or has no checksums, as the files
    of a stock llama-server have none."""
    failed = False
    for path in paths:
        try:
            damage: list[SlotFileError] = list(_damage(path))
            with _open(path) as file:
                absent = file.checksum == "absent"
        except SlotFileError as error:
            damage, absent = [error], False
        for found in damage:
            typer.echo(f"{path}: {_told(path, found)}")
        if not damage:
            typer.echo(f"{path}: {_UNVERIFIED if absent else 'verified'}")
        failed = failed or bool(damage) or absent
    raise typer.Exit(1 if failed else 0)


@app.command()
@_reports_errors
def strip(
    path: FileArgument,
    draft: Annotated[bool, typer.Option("--draft", help="Leave the draft block out.")] = False,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Leave the checkpoints out.")] = False,
    output: OutputOption = None,
) -> None:
    """Replace FILE, or write -o OUT, without the draft block or the checkpoints."""
    if not draft and not checkpoints:
        raise typer.BadParameter("name what to leave out: --draft, --checkpoints, or both")
    with _open(path) as file:
        before = file.n_read
        saved = _rewritten(file, output or path, checkpoints=not checkpoints, draft=not draft)
    typer.echo(f"{output or path}: {saved.n_written} bytes, {before - saved.n_written} fewer")


@app.command()
@_reports_errors
def migrate(path: FileArgument, output: OutputOption = None) -> None:
    """Give an older or stock file the newest form. It then has checksums, but names no model."""
    with _open(path) as file:
        if file.checksum == "verified" and output is None:
            typer.echo(f"{path}: has the newest form")
            return
        saved = _rewritten(file, output or path, checkpoints=True, draft=True)
        for note in (*file.notes, *(f"left out: {d.section} {d.index} ({d.reason})" for d in file.dropped)):
            typer.echo(f"{path}: {note}", err=True)
    typer.echo(f"{output or path}: {saved.n_written} bytes, {saved.n_checkpoints} checkpoints")


def _told(path: Path, found: SlotFileError) -> str:
    """Damage by its section; a file that is absent, of another kind or newer is not damaged."""
    if not found.section or isinstance(found, NotASlotFile | UnsupportedVersion | UnsupportedContent):
        return str(found).removeprefix(f"{path.name}: ")
    return f"damaged: {found.section}: {str(found).removeprefix(f'{found.section}: ')}"


def _open(path: Path) -> SlotFile:
    # The store refuses links; somebody at a shell may name their files as they like.
    return SlotFile.open(path.resolve())


def _damage(path: Path) -> list[SlotFileError]:
    with _open(path) as file, _progress(path.name, file.n_read) as advance:
        return file.verify(advance)


def _rewritten(file: SlotFile, path: Path, *, checkpoints: bool, draft: bool) -> Saved:
    path = path.resolve()
    temporary = path.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
    with SlotWriter(SystemFiles(), path, temporary) as writer:
        return rewrite(file, writer, _writer_name(), checkpoints=checkpoints, draft=draft)


def _writer_name() -> str:
    try:
        return f"draftkeep {version('draftkeep')} (spec-slots)"
    except PackageNotFoundError:
        return "draftkeep (spec-slots)"


@contextmanager
def _progress(name: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
    if n_bytes < BIG_BYTES or not sys.stderr.isatty():
        yield lambda n: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=n_bytes)
        yield lambda n: progress.advance(task, n)


if __name__ == "__main__":
    main()
