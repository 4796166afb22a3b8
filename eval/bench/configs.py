"""What is compared: named sets of flags, for our server, for the peer, or for both."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OURS, PEER = "ours", "peer"
DEFAULT, QUICK = ("off", "fixed2", "fixed4", "fixed8", "default", "adaptive"), ("off", "default", "adaptive")
SWEEP = "--spec-type draft-simple --spec-draft-n-max {n} --spec-draft-p-min 0"
SWEEP_LENGTHS = range(9)
# Our server's alone; a stock one does not know it, and what names it in its own flags keeps that.
_FIXED_LENGTHS = ("--spec-adaptive", "off")


@dataclass(frozen=True, slots=True)
class Config:
    """One server to measure: `side` starts it with `flags`. `length` is set by the sweep only."""

    side: str
    name: str
    flags: tuple[str, ...]
    length: int | None = None

    @property
    def contestant(self) -> str:
        return f"{self.side}:{self.name}"

    @property
    def needs_draft_model(self) -> bool:
        """A server that does not draft with a model must not pay for one."""
        return any("draft-simple" in flag for flag in self.flags)


def _drafting(types: str, n_max: int) -> tuple[str, ...]:
    return "--spec-type", types, "--spec-draft-n-max", str(n_max), "--spec-draft-p-min", "0"


_ADAPTIVE = "--spec-adaptive", "on"
PRESETS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "off": dict.fromkeys((OURS, PEER), ("--spec-type", "none")),
    "fixed2": dict.fromkeys((OURS, PEER), _drafting("draft-simple", 2)),
    "fixed4": dict.fromkeys((OURS, PEER), _drafting("draft-simple", 4)),
    "fixed8": dict.fromkeys((OURS, PEER), _drafting("draft-simple", 8)),
    # Whatever the peer does when it is only told to draft.
    "default": {PEER: ("--spec-type", "draft-simple")},
    "adaptive": {OURS: ("--spec-type", "draft-simple", *_ADAPTIVE)},
    "ngram-simple": dict.fromkeys((OURS, PEER), ("--spec-type", "ngram-simple")),
    "ngram-mod": dict.fromkeys((OURS, PEER), ("--spec-type", "ngram-mod")),
    "chain": dict.fromkeys((OURS, PEER), _drafting("ngram-simple,draft-simple", 4)),
    "adaptive-ngram": {OURS: ("--spec-type", "ngram-simple", *_ADAPTIVE)},
    "adaptive-chain": {OURS: ("--spec-type", "ngram-simple,draft-simple", *_ADAPTIVE)},
    "mtp": dict.fromkeys((OURS, PEER), _drafting("draft-mtp", 2)),
    "adaptive-mtp": {OURS: ("--spec-type", "draft-mtp", *_ADAPTIVE)},
}


def parse(text: str) -> list[Config]:
    """`[ours:|peer:]NAME` of a preset, or `[ours:|peer:]NAME=FLAGS`."""
    head, equals, flags = text.partition("=")
    before, colon, after = head.partition(":")
    side, name = (before, after) if colon else ("", head)
    if side not in ("", OURS, PEER) or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not [ours:|peer:]NAME[=FLAGS]")
    if not equals and name not in PRESETS:
        raise argparse.ArgumentTypeError(f"{name!r} is no preset; there are {', '.join(PRESETS)}")
    given = dict.fromkeys((OURS, PEER), tuple(shlex.split(flags))) if equals else PRESETS[name]
    wanted = [one for one in given if side in ("", one)]
    if not wanted:
        raise argparse.ArgumentTypeError(f"the preset {name!r} is not for {side}")
    return [_config(one, name, given[one]) for one in wanted]


def sweep(template: str) -> list[Config]:
    """Fixed lengths 0 to 8 for both; 0 is speculation off."""
    found = []
    for length in SWEEP_LENGTHS:
        flags = tuple(shlex.split(template.format(n=length))) if length else ("--spec-type", "none")
        name = f"length{length}" if length else "off"
        found += [_config(side, name, flags, length) for side in (OURS, PEER)]
    return found


def chosen(names: Sequence[Sequence[Config]], with_peer: bool) -> list[Config]:
    """Each once, the last meaning of a name wins; ValueError where none is left."""
    by_name = {one.contestant: one for group in names for one in group}
    found = [one for one in by_name.values() if with_peer or one.side == OURS]
    if not any(one.side == OURS for one in found):
        raise ValueError("no configuration for our server: prompts are tokenised by one")
    return found


def _config(side: str, name: str, flags: tuple[str, ...], length: int | None = None) -> Config:
    if side == OURS and "--spec-adaptive" not in flags:
        flags = flags + _FIXED_LENGTHS
    return Config(side, name, flags, length)
