"""The command line: flags to Settings, and nothing else. argparse is driven by the settings' own table."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from pydantic import ValidationError

from spec_server import __version__, machine
from spec_server.options import ALWAYS_SO, IGNORED
from spec_server.settings import Settings, env_names, option_of

DESCRIPTION = "Serves a model over HTTP, with speculative decoding whose state can be saved and restored."
_FLAG = re.compile(r"--?[A-Za-z]")


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(sys.argv[1:] if argv is None else argv)
    machine.limit_spinning(settings.omp_spin)
    # Late, so that --help and a mistyped flag do not wait for the native library.
    from spec_server.launch import serve

    return serve(settings)


def parse(argv: Sequence[str]) -> Settings:
    """Exits with status 2 and one line where a flag or a value is wrong."""
    parser = build_parser()
    arguments = [_with_dashes(argument) for argument in argv]
    _refuse_unknown(parser, arguments)
    given = vars(parser.parse_args(arguments))
    for flag in given.pop("ignored", ()):
        print(f"spec-server: {flag} has no effect here", file=sys.stderr)
    given.pop("always_so", None)
    try:
        return Settings(**given)
    except ValidationError as error:
        parser.error(_message(error))


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="spec-server",
        description=DESCRIPTION,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_Formatter,
    )
    parser.add_argument("--version", action="version", version=f"spec-server {__version__}")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in Settings.model_fields.items():
        option = option_of(field)
        group = groups.get(option.group)
        if group is None:
            group = groups[option.group] = parser.add_argument_group(option.group)
        text = f"{option.help}{_default(field.default)} [{', '.join(env_names(name, option))}]".replace(
            "%", "%%"
        )
        flags = option.flags.split()
        if option.metavar:
            action = "append" if option.is_repeatable else "store"
            group.add_argument(*flags, dest=name, action=action, metavar=option.metavar, help=text)
        else:
            group.add_argument(*flags, dest=name, action="store_const", const="on", help=text)
        if option.no:
            off = f"switch {option.name} off"
            group.add_argument(*option.no.split(), dest=name, action="store_const", const="off", help=off)
    tolerated = " ".join(flag if not n else f"{flag} X" for flag, n in {**ALWAYS_SO, **IGNORED}.items())
    group = parser.add_argument_group("Accepted for llama-server's sake, without effect", tolerated)
    _tolerate(group, ALWAYS_SO, "always_so")
    _tolerate(group, IGNORED, "ignored")
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line; the usage, which argparse puts before it, fills two screens here."""
        self.exit(2, f"spec-server: {message}\n")


class _Formatter(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Never breaks a flag at one of its dashes."""
        return textwrap.fill(
            text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )


class _Note(argparse.Action):
    """Remembers that a flag was given; its value is dropped."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), option_string])


def _tolerate(group: argparse._ArgumentGroup, flags: dict[str, int], dest: str) -> None:
    for flag, n_values in flags.items():
        nargs = n_values or 0
        group.add_argument(flag, dest=dest, action=_Note, nargs=nargs, help=argparse.SUPPRESS)


def known_flags(parser: argparse.ArgumentParser) -> frozenset[str]:
    return frozenset(parser._option_string_actions)


def _refuse_unknown(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """argparse would read `-mx y` as `-m x` and complain about y."""
    known = known_flags(parser)
    for argument in arguments:
        flag = argument.partition("=")[0]
        if _FLAG.match(flag) and flag not in known:
            near = difflib.get_close_matches(flag, [k for k in known if k.startswith("--")], n=1, cutoff=0.8)
            parser.error(f"unknown flag {flag}" + (f"; did you mean {near[0]}?" if near else ""))


def _with_dashes(argument: str) -> str:
    """llama-server takes --ctx_size for --ctx-size."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


def _default(value: object) -> str:
    if value in ("", (), None) or value == {}:
        return ""
    if isinstance(value, bool):
        return f" (default: {'on' if value else 'off'})"
    return f" (default: {value})"


def _message(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    text = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return text
    option = option_of(Settings.model_fields[str(first["loc"][0])])
    return f"{option.name}: {text} (given: {first['input']!r})"
