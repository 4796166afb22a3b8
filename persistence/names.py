"""Which names a stored file may have: one plain file name, the same rule for every caller."""

from __future__ import annotations

import unicodedata

from persistence.errors import InvalidName

MAX_NAME_BYTES = 255

# Control characters, lone surrogates, line and paragraph separators.
_REFUSED_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})


def check_name(name: object) -> str:
    """`name` itself, where it is one plain file name. Raises InvalidName, which says what is wrong."""
    if not isinstance(name, str):
        raise InvalidName(f"a file name is a string, not {type(name).__name__}")
    reason = _fault(name)
    if reason:
        raise InvalidName(f"{name[:80]!r} is not a file name: {reason}")
    return name


def _fault(name: str) -> str:
    if not name:
        return "it is empty"
    if any(unicodedata.category(char) in _REFUSED_CATEGORIES for char in name):
        return "it has a control character"
    if "/" in name or "\\" in name:
        return "it has a path separator"
    if name[0] in ". ":
        return "it begins with a dot or a space"
    if name[-1] in ". ":
        return "it ends with a dot or a space"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"it has more than {MAX_NAME_BYTES} bytes"
    return ""
