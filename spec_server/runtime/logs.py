"""llama's log lines as records of the Python logger "llama"; the only callback that llama is ever given, and so also
the place where a new buffer is noticed."""

from __future__ import annotations

import logging
import re
from collections import deque
from typing import Any

from spec_server.runtime import huge_pages

logger = logging.getLogger("llama")

_CONTINUATION = 5  # GGML_LOG_LEVEL_CONT: goes on with the line before
# llama names a buffer after it has allocated it and before it writes to it.
_NEW_HOST_BUFFER = re.compile(rb"CPU\w* .*buffer size = ")
_LEVELS = {0: logging.INFO, 1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}


class LineJoiner:
    """Joins llama's fragments to lines and logs each with the level that its first fragment had."""

    def __init__(self) -> None:
        self._pending = ""
        self._level = logging.INFO
        self._errors: deque[str] = deque(maxlen=16)

    def feed(self, level: int, text: bytes) -> None:
        if level != _CONTINUATION:
            self.flush()
            self._level = _LEVELS.get(level, logging.INFO)
        self._pending += text.decode("utf-8", "replace")
        *lines, self._pending = self._pending.split("\n")
        for line in lines:
            self._emit(line)

    def flush(self) -> None:
        """Log what stands without its newline."""
        rest, self._pending = self._pending, ""
        self._emit(rest)

    def take_errors(self) -> str:
        """The error lines since the last call, joined; "" where there were none."""
        self.flush()
        errors = "; ".join(self._errors)
        self._errors.clear()
        return errors

    def _emit(self, line: str) -> None:
        line = line.rstrip()
        if not line.strip(". "):  # blank lines and progress dots
            return
        if self._level >= logging.ERROR:
            self._errors.append(line)
        if logger.isEnabledFor(self._level):
            logger.log(self._level, line)


joiner = LineJoiner()
_callback: Any = None  # llama holds a bare pointer to it


def install(native: Any) -> None:
    """Send llama's log to Python from now on; later calls change nothing."""
    global _callback
    if _callback is not None:
        return

    def on_line(level: int, text: bytes, _user: Any) -> None:
        joiner.feed(level, text)
        if _NEW_HOST_BUFFER.search(text):
            huge_pages.ask()

    _callback = native.llama_log_callback(on_line)
    native.llama_log_set(_callback, None)
