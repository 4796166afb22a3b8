"""The fit header of a stored state: JSON that names what the state depends on; reads no state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

VERSION = 1

Scalar = str | int | bool


def dump(kind: str, facts: Mapping[str, Scalar], **more: object) -> bytes:
    """The header of a state of `kind`; `facts` must be equal in the drafter that loads it."""
    return orjson.dumps({"kind": kind, "version": VERSION, **facts, **more})


def load(fit: bytes, kind: str) -> dict[str, Any] | str:
    """The header as a mapping, or why it is none of `kind`."""
    try:
        header = orjson.loads(fit)
    except orjson.JSONDecodeError:
        return "fit header is not JSON"
    if not isinstance(header, dict) or header.get("version") != VERSION:
        return "fit header of another version"
    if header.get("kind") != kind:
        return f"kind of drafter: stored {header.get('kind')}, running {kind}"
    return header


def difference(
    header: Mapping[str, Any], facts: Mapping[str, Scalar], words: Mapping[str, str] | None = None
) -> str | None:
    """The first fact that is another one in the header; `words` names facts in the answer."""
    for name, running in facts.items():
        if header.get(name) != running:
            word = (words or {}).get(name, name)
            return f"{word}: stored {header.get(name)}, running {running}"
    return None


def positions(header: Mapping[str, Any], n_tokens: int, room: int) -> str | None:
    """What is wrong with where the stored context lies: tokens[base : base + n_tokens] of the target's."""
    held, base = header.get("n_tokens"), header.get("base")
    if not isinstance(held, int) or not isinstance(base, int) or held < 0 or base < 0:
        return "fit header without positions"
    if base + held > n_tokens:
        return f"position: the draft holds {base + held} tokens, the target {n_tokens}"
    if held > room:
        return f"draft context too small: stored {held} tokens, running {room}"
    return None


def size(what: str, stored: int, running: int) -> str | None:
    """A difference of sizes; a negative stored size is not known yet."""
    return None if stored < 0 or stored == running else f"{what} size: stored {stored}, running {running}"
