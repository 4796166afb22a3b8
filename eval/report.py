"""Tables of rows: for a terminal, for a pipe, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table as RichTable

from eval.measure import Row, Summary, summarise

COLUMNS = (
    "turn two",
    "prompt_n",
    "cache_n",
    "draft_n",
    "accepted",
    "rate",
    "draft_prompt_n",
    "first token ms",
    "counts as live",
    "text as live",
)


@dataclass(frozen=True, slots=True)
class Table:
    """One server configuration. The first row is the one that the others are compared with."""

    title: str
    rows: Sequence[Row]
    setup: Mapping[str, object] = field(default_factory=dict)  # what a reader needs to measure it again


def cells(table: Table) -> list[list[str]]:
    """One list of len(COLUMNS) per row; a skipped row has only its name."""
    lines = []
    for number, (row, summary) in enumerate(_summaries(table)):
        if summary is None:
            lines.append([row.name, *[""] * (len(COLUMNS) - 1)])
            continue
        rate = "-" if summary.acceptance_rate is None else f"{summary.acceptance_rate:.3f}"
        of = f"/{summary.n_turns} equal"
        lines.append(
            [
                row.name,
                str(summary.prompt_n),
                str(summary.cache_n),
                str(summary.draft_n),
                str(summary.draft_n_accepted),
                rate,
                str(summary.draft_prompt_n),
                f"{summary.first_token_ms:.1f}",
                "-" if number == 0 else f"{summary.n_equal_counts}{of}",
                "-" if number == 0 else f"{summary.n_equal_texts}{of}",
            ]
        )
    return lines


def notes(table: Table) -> list[str]:
    return [f"{row.name}: {prefix}{text}" for row in table.rows for prefix, text in _remarks(row) if text]


def _remarks(row: Row) -> tuple[tuple[str, str], ...]:
    return ("skipped, ", row.skipped), ("", row.note)


def print_table(table: Table, console: Console) -> None:
    """With lines and colour on a terminal; columns and spaces where the output goes elsewhere."""
    if not console.is_terminal:
        print(plain(table), file=console.file)
        return
    grid = RichTable(title=table.title, title_justify="left")
    for number, name in enumerate(COLUMNS):
        grid.add_column(name, justify="left" if number == 0 else "right")
    for line in cells(table):
        grid.add_row(*line)
    console.print(grid)
    for note in notes(table):
        console.print(note, style="yellow", highlight=False, markup=False)


def plain(table: Table) -> str:
    lines = [list(COLUMNS), *cells(table)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    aligned = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([table.title, *aligned, *notes(table)])


def markdown(table: Table) -> str:
    rule = ["---", *["---:"] * (len(COLUMNS) - 1)]
    lines = ["| " + " | ".join(line) + " |" for line in [list(COLUMNS), rule, *cells(table)]]
    remarks = notes(table)
    return "\n".join([table.title, "", *lines, *([""] if remarks else []), *remarks])


def to_json(tables: Sequence[Table]) -> str:
    """Everything: the setup, each row's sums, and each conversation's turn."""
    return json.dumps({"tables": [_table_as_json(table) for table in tables]}, indent=2) + "\n"


def _table_as_json(table: Table) -> dict[str, object]:
    rows = [
        {
            "name": row.name,
            "skipped": row.skipped,
            "note": row.note,
            "summary": None if summary is None else asdict(summary),
            "turns": [asdict(turn) for turn in row.turns],
        }
        for row, summary in _summaries(table)
    ]
    return {"title": table.title, "setup": dict(table.setup), "rows": rows}


def _summaries(table: Table) -> Iterator[tuple[Row, Summary | None]]:
    live = table.rows[0].turns
    for row in table.rows:
        yield row, None if row.skipped else summarise(row.turns, live)
