"""The command line: flags to Settings, and nothing else. argparse is driven by the settings' own table."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import NoReturn

from pydantic import ValidationError

from spec_server import __version__, machine
from spec_server.environment import unread
from spec_server.settings import Settings, env_names, option_of, variable_of
from spec_server.tolerated import (
    ALWAYS_SO,
    DEVICES,
    IGNORED,
    OLDER,
    ONLY,
    REFUSED_FLAGS,
    is_neutral,
    load_mode_of,
)
from spec_server.wording import fault

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
    notes, dangers = unread(os.environ)
    if dangers:
        parser.error("; ".join(dangers))
    notes = [f"{flag} has no effect here" for flag in given.pop("ignored", ())] + notes
    given.pop("always_so", None)
    load_mode = load_mode_of(given.pop("older", ()))
    if load_mode:
        given.setdefault("load_mode", load_mode)
    given |= {DEVICES[flag]: "0" for flag in given.pop("no_device", ())}  # wins over -ngl, as in llama-server
    try:
        settings = Settings(**given)
    except ValidationError as error:
        parser.error(_message(error, given))
    if settings.cache_ram:
        notes.append(f"{_source('cache_ram', given) or '--cache-ram'} has no effect here yet")
    for note in notes:
        print(f"spec-server: {note}", file=sys.stderr)
    return settings


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
        text = f"{option.help}{_default(field.default, option.metavar)} [{', '.join(env_names(name, option))}]".replace(
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
    values = {flag: " X" * n for flag, n in {**ALWAYS_SO, **IGNORED}.items()}
    values |= {flag: f" {'|'.join(wanted)}" for flag, wanted in ONLY.items()}
    tolerated = " ".join(flag + value for flag, value in values.items())
    group = parser.add_argument_group("Accepted for llama-server's sake, without effect", tolerated)
    _tolerate(group, ALWAYS_SO, "always_so")
    _tolerate(group, IGNORED, "ignored")
    _tolerate(group, dict.fromkeys(OLDER, 0), "older")
    for flag in ONLY:
        dest = "no_device" if flag in DEVICES else "always_so"
        group.add_argument(flag, dest=dest, action=_OnlyNeutral, help=argparse.SUPPRESS)
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


class _OnlyNeutral(_Note):
    """A value that asks for nothing is taken; what would change the answers never passes in silence."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if not is_neutral(str(option_string), str(values)):
            wanted = " or ".join(ONLY[str(option_string)])
            parser.error(f"{option_string}: only {wanted} is supported here (given: {values!r})")
        super().__call__(parser, namespace, values, option_string)


def _tolerate(group: argparse._ArgumentGroup, flags: dict[str, int], dest: str) -> None:
    for flag, n_values in flags.items():
        nargs = n_values or 0
        group.add_argument(flag, dest=dest, action=_Note, nargs=nargs, help=argparse.SUPPRESS)


def known_flags(parser: argparse.ArgumentParser) -> frozenset[str]:
    return frozenset(parser._option_string_actions)


def _refuse_unknown(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """All of them at once. argparse would read `-mx y` as `-m x` and complain about y."""
    known = known_flags(parser)
    flags = dict.fromkeys(argument.partition("=")[0] for argument in arguments)
    unknown = [flag for flag in flags if _FLAG.match(flag) and flag not in known]
    if unknown:
        parser.error("; ".join(f"unknown flag {flag}{_remark(flag, known)}" for flag in unknown))


def _remark(flag: str, known: frozenset[str]) -> str:
    if flag in REFUSED_FLAGS:
        return " (llama-server's, not supported here)"
    alike = [k for k in known if k.startswith("--") and _is_negation(k) == _is_negation(flag)]
    near = difflib.get_close_matches(flag, alike, n=1, cutoff=0.8)
    return f" (did you mean {near[0]}?)" if near else ""


def _is_negation(flag: str) -> bool:
    return flag.startswith("--no-")


def _with_dashes(argument: str) -> str:
    """llama-server takes --ctx_size for --ctx-size."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


def _default(value: object, metavar: str) -> str:
    if value in ("", (), None) or value == {}:
        return ""
    if isinstance(value, bool):
        return f" (default: {'on' if value else 'off'})"
    is_auto = value == -1 and "auto" in metavar.split("|")
    return f" (default: {'auto' if is_auto else value})"


def _message(error: ValidationError, given: Mapping[str, object]) -> str:
    """The flag, what is wrong, and where the value was found when it was no flag."""
    first = error.errors(include_url=False)[0]
    text = fault(first)
    if first["loc"]:
        name = str(first["loc"][0])
        text = f"{option_of(Settings.model_fields[name]).name}: {text} (given: {first['input']!r})"
    else:
        flag = text.partition(":")[0]
        fields = Settings.model_fields.items()
        name = next((name for name, field in fields if option_of(field).name == flag), "")
    variable = _source(name, given)
    return f"{text}, from {variable}" if variable else text


def _source(name: str, given: Mapping[str, object]) -> str:
    """The variable that a field's value comes from; empty where a flag or nothing gave it."""
    return variable_of(name) if name and name not in given else ""
