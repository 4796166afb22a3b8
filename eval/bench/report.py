"""A run as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from eval.bench.comparisons import Result
from eval.bench.ratios import Estimate
from eval.bench.samples import Cell, Sample, summarise
from eval.workloads import WORKLOADS

READING = (
    "Ratios are geometric means over paired rounds with their 95 % intervals, tokens per second those of "
    "generating, all clients together. Compare ratios of one run only."
)


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a run found; `setup` is what a reader needs to do it again."""

    setup: Mapping[str, object]
    samples: Sequence[Sample]
    results: Sequence[Result]
    best_lengths: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def workloads(self) -> list[str]:
        """In the order of their list."""
        return [one for one in WORKLOADS if any(sample.workload == one for sample in self.samples)]


Who = tuple[int, bool, str]  # clients, beside a neighbour, contestant


def cells(run: Run) -> dict[Who, dict[str, Cell]]:
    """By workload, and "all" for what all of them come to."""
    groups: dict[Who, list[Sample]] = {}
    for one in run.samples:
        groups.setdefault((one.n_clients, one.beside, one.contestant), []).append(one)
    return {who: _by_workload(group) for who, group in sorted(groups.items())}


def _by_workload(samples: Sequence[Sample]) -> dict[str, Cell]:
    names = sorted({one.workload for one in samples})
    parts = {name: summarise(one for one in samples if one.workload == name) for name in names}
    return {**parts, "all": summarise(samples)}


def markdown(run: Run) -> str:
    parts = [
        _table(list(_ratio_lines(run))),
        _table(list(_rate_lines(run))),
        _table(list(_detail_lines(run))),
    ]
    if run.best_lengths:
        parts.append(_table(list(_length_lines(run))))
    setup = [f"- {name}: {value}" for name, value in run.setup.items()]
    notes = [f"- {note}" for note in run.notes]
    parts += ["\n".join([*notes, *setup]), READING]
    return "\n\n".join(parts) + "\n"


def _ratio_lines(run: Run) -> Iterator[list[str]]:
    yield ["tokens/s, ratio", *run.workloads, "geometric mean"]
    for result in run.results:
        by_workload = [_ratio(result.by_workload.get(workload)) for workload in run.workloads]
        yield [result.name, *by_workload, _ratio(result.overall)]


def _ratio(found: Estimate | None) -> str:
    if found is None:
        return ""
    interval = "" if found.low is None or found.high is None else f" [{found.low:.3f}, {found.high:.3f}]"
    return f"{found.ratio:.3f}{interval}"


def _rate_lines(run: Run) -> Iterator[list[str]]:
    yield ["tokens/s", "clients", *run.workloads]
    for who, by_workload in cells(run).items():
        rates = [by_workload.get(workload) for workload in run.workloads]
        yield [*_who(who), *("" if cell is None else f"{cell.tokens_per_s:.1f}" for cell in rates)]


def _detail_lines(run: Run) -> Iterator[list[str]]:
    yield [
        "all workloads",
        "clients",
        "accepted",
        "first token ms",
        "wait p50 ms",
        "wait p99 ms",
        "step us",
        "step us, less drafts",
        "rounds",
    ]
    for who, by_workload in cells(run).items():
        cell = by_workload["all"]
        rate = "" if cell.acceptance_rate is None else f"{cell.acceptance_rate:.3f}"
        waits = [_whole(cell.first_token_ms), f"{cell.gap_p50_ms:.2f}", f"{cell.gap_p99_ms:.1f}"]
        steps = [_whole(cell.overhead_us), _whole(cell.overhead_less_drafting_us)]
        yield [*_who(who), rate, *waits, *steps, str(cell.n_rounds)]


def _length_lines(run: Run) -> Iterator[list[str]]:
    yield ["best fixed length", *run.workloads]
    for name, by_workload in run.best_lengths.items():
        yield [name, *(str(by_workload.get(workload, "")) for workload in run.workloads)]


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _who(who: Who) -> list[str]:
    n_clients, beside, contestant = who
    return [f"{contestant}, beside a busy loop" if beside else contestant, str(n_clients)]


def _table(lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def to_json(run: Run) -> str:
    """Every sample but its single waits, of which the cells have the quantiles."""
    content = {
        "setup": dict(run.setup),
        "notes": list(run.notes),
        "results": [asdict(result) for result in run.results],
        "best_lengths": run.best_lengths,
        "cells": [
            {"clients": who[0], "beside": who[1], "contestant": who[2], "workload": workload, **asdict(cell)}
            for who, by_workload in cells(run).items()
            for workload, cell in by_workload.items()
        ],
        "samples": [_sample_as_json(one) for one in run.samples],
    }
    return json.dumps(content, indent=1) + "\n"


def _sample_as_json(one: Sample) -> dict[str, object]:
    record = asdict(one)
    del record["gaps_ms"]
    return {**record, "tokens_per_s": one.tokens_per_s}
