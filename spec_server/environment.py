"""Environment variables that look like settings and that nobody reads here: silence would pass for consent."""

from __future__ import annotations

import re
from collections.abc import Mapping

from spec_server.options import SWITCH_WORDS
from spec_server.settings import ENV_PREFIX, Settings, env_names, option_of
from spec_server.tolerated import ALWAYS_SO_ENV, IGNORED_ENV

_OURS_OR_THEIRS = re.compile(rf"(?i:{ENV_PREFIX})|LLAMA_ARG_|LLAMA_API_?KEY")
# Whoever sets one of these believes the server closed to others; it would be open.
_PROTECTIVE = (
    (re.compile("SSL|TLS"), "this server speaks plain HTTP, a proxy in front of it can speak TLS"),
    (re.compile("API_?KEY"), "keys are read from LLAMA_API_KEY or LLAMA_ARG_API_KEY_FILE"),
    (re.compile("CORS_ORIGIN"), "browsers of any origin may call this server"),
)


def unread(environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Notes on the variables that are ignored, and why those stand in the way that must not be ignored."""
    known = _known()
    notes: list[str] = []
    dangers: list[str] = []
    for name, value in sorted(environ.items()):
        spelled = name.upper() if name.upper().startswith(ENV_PREFIX) else name
        if not _OURS_OR_THEIRS.match(name) or spelled in known:
            continue
        why = next((why for pattern, why in _PROTECTIVE if pattern.search(name.upper())), "")
        if why and value not in ("", "*"):
            dangers.append(f"{name}: not known here, and not to be ignored: {why}")
        else:
            notes += _note(name, value)
    return notes, dangers


def _note(name: str, value: str) -> list[str]:
    asked = name.replace("LLAMA_ARG_NO_", "LLAMA_ARG_")
    wants = SWITCH_WORDS.get(value.lower()) if asked == name else False
    if wants is not None and ALWAYS_SO_ENV.get(asked) is wants:
        return []
    if name in IGNORED_ENV or asked in IGNORED_ENV or asked in ALWAYS_SO_ENV:
        return [f"{name} has no effect here"]
    return [f"{name} is not known here, ignored"]


def _known() -> frozenset[str]:
    names: set[str] = set()
    for name, field in Settings.model_fields.items():
        option = option_of(field)
        given = env_names(name, option)
        names.update(given)
        if option.no:
            names.update(variable.replace("LLAMA_ARG_", "LLAMA_ARG_NO_") for variable in given)
    return frozenset(names)
