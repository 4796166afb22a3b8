"""One table in its four forms."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from eval import report
from eval.client import Turn
from eval.measure import Row

LIVE = Turn("text", 10, 90, 64, 40, 30, 10, 5.0, 500.0, 12.04)
COLD = dataclasses.replace(LIVE, draft_n=60, draft_n_accepted=15)


@pytest.fixture
def table() -> report.Table:
    rows = [
        Row("live", (LIVE, LIVE)),
        Row("restored", (LIVE, LIVE)),
        Row("dropped", (COLD, LIVE), note="a remark"),
        Row("restarted", skipped="not ours"),
    ]
    return report.Table("two conversations", rows, {"server": ["x"]})


def test_cells_say_what_equals_the_live_row(table):
    assert report.cells(table) == [
        ["live", "20", "180", "80", "60", "0.750", "20", "12.0", "-", "-"],
        ["restored", "20", "180", "80", "60", "0.750", "20", "12.0", "2/2 equal", "2/2 equal"],
        ["dropped", "20", "180", "100", "45", "0.450", "20", "12.0", "1/2 equal", "2/2 equal"],
        ["restarted", "", "", "", "", "", "", "", "", ""],
    ]


def test_plain_lines_are_aligned_and_give_the_reasons(table):
    title, head, live, *rest = report.plain(table).splitlines()
    assert title == "two conversations"
    assert head.index("prompt_n") + len("prompt_n") == live.index("20") + 2
    assert rest[-2:] == ["dropped: a remark", "restarted: skipped, not ours"]


def test_a_pipe_gets_plain_text_and_a_terminal_gets_a_grid(table):
    pipe, terminal = io.StringIO(), io.StringIO()
    report.print_table(table, Console(file=pipe, force_terminal=False))
    report.print_table(table, Console(file=terminal, force_terminal=True, width=160))
    assert pipe.getvalue() == report.plain(table) + "\n"
    assert "\N{BOX DRAWINGS LIGHT VERTICAL}" in terminal.getvalue()
    assert "not ours" in terminal.getvalue()


def test_markdown_is_a_table(table):
    lines = report.markdown(table).splitlines()
    assert lines[3].startswith("| --- | ---: |")
    assert lines[5] == "| restored | 20 | 180 | 80 | 60 | 0.750 | 20 | 12.0 | 2/2 equal | 2/2 equal |"
    assert {line.count("|") for line in lines[2:7]} == {len(report.COLUMNS) + 1}


def test_json_holds_every_turn(table):
    written = json.loads(report.to_json([table]))["tables"][0]
    assert written["setup"] == {"server": ["x"]}
    live, _restored, dropped, restarted = written["rows"]
    assert live["turns"][0] == dataclasses.asdict(LIVE)
    assert dropped["summary"]["draft_n"] == 100
    assert dropped["note"] == "a remark"
    assert restarted == {"name": "restarted", "skipped": "not ours", "note": "", "summary": None, "turns": []}
