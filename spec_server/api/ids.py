"""Ids that come as text, in paths and as keys: ASCII digits, and nothing else that int() would take."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?[0-9]{1,4000}")  # int() itself refuses some digits more than that


def number_of(text: str) -> int | None:
    """None: no number. With a minus sign the number is below 0, "-0" too, and so no id."""
    if not _NUMBER.fullmatch(text):
        return None
    return min(int(text), -1) if text.startswith("-") else int(text)
