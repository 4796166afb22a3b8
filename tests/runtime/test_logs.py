"""llama's log lines as Python log records."""

from __future__ import annotations

import logging

import pytest

from spec_server.runtime.logs import LineJoiner

INFO, WARN, ERROR, DEBUG, CONT = 2, 3, 4, 1, 5


@pytest.mark.parametrize(
    ("fragments", "records"),
    [
        ([(INFO, b"one\n")], [("INFO", "one")]),
        (
            [(DEBUG, b"d\n"), (WARN, b"w\n"), (ERROR, b"e\n")],
            [("DEBUG", "d"), ("WARNING", "w"), ("ERROR", "e")],
        ),
        ([(WARN, b"a "), (CONT, b"b"), (CONT, b" c\n")], [("WARNING", "a b c")]),
        ([(INFO, b"two\nlines\n")], [("INFO", "two"), ("INFO", "lines")]),
        ([(INFO, b"no end"), (ERROR, b"next\n")], [("INFO", "no end"), ("ERROR", "next")]),
        ([(INFO, b"."), (CONT, b"."), (CONT, b".\n"), (INFO, b"\n")], []),
        ([(INFO, "µ".encode()[:1] + b"\n")], [("INFO", "\N{REPLACEMENT CHARACTER}")]),
        ([(CONT, b"alone\n")], [("INFO", "alone")]),
        ([(9, b"unknown level\n")], [("INFO", "unknown level")]),
    ],
)
def test_fragments_become_lines(
    caplog: pytest.LogCaptureFixture, fragments: list[tuple[int, bytes]], records: list[tuple[str, str]]
) -> None:
    caplog.set_level(logging.DEBUG, "llama")
    joiner = LineJoiner()
    for level, text in fragments:
        joiner.feed(level, text)
    joiner.flush()
    assert [(r.levelname, r.message) for r in caplog.records] == records


def test_errors_are_kept_for_the_exception() -> None:
    joiner = LineJoiner()
    joiner.feed(ERROR, b"first\n")
    joiner.feed(INFO, b"not this\n")
    joiner.feed(ERROR, b"second")
    assert joiner.take_errors() == "first; second"
    assert joiner.take_errors() == ""
