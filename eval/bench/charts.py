"""What was measured as PNG charts; the only module that needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from eval.bench.configs import OURS, PEER, Config
from eval.bench.report import Run, cells
from eval.bench.schedule import clients

_DPI = 150


def draw(run: Run, configs: Sequence[Config], folder: Path) -> list[Path]:
    """The files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for n_clients in sorted({one.n_clients for one in run.samples}):
        written += [_ratios(run, n_clients, folder), _rates(run, n_clients, folder)]
        if any(one.length is not None for one in configs):
            written.append(_lengths(run, configs, n_clients, folder))
    return [path for path in written if path is not None]


def _ratios(run: Run, n_clients: int, folder: Path) -> Path | None:
    results = [one for one in run.results if one.n_clients == n_clients]
    if not results:
        return None
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.35 * len(results)))
    for row, result in enumerate(reversed(results)):
        found = result.overall
        low, high = found.low or found.ratio, found.high or found.ratio
        axes.errorbar(
            found.ratio,
            row,
            xerr=[[found.ratio - low], [high - found.ratio]],
            fmt="o",
            color="black",
            capsize=3,
        )
        for workload in result.by_workload.values():
            axes.plot(workload.ratio, row, "|", color="tab:blue")
    axes.set_yticks(range(len(results)), [one.name for one in reversed(results)], fontsize=8)
    axes.axvline(1.0, color="grey", linewidth=1)
    axes.set_xscale("log")
    for axis_formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        axis_formatter(ScalarFormatter())
    axes.tick_params(axis="x", which="both", labelsize=7, rotation=45)
    axes.set_xlabel("ratio of tokens per second: geometric mean with 95 % interval, and each workload")
    return _save(figure, folder / f"ratios-{n_clients}.png")


def _rates(run: Run, n_clients: int, folder: Path) -> Path:
    rows = [(who, cell) for who, cell in cells(run).items() if who[0] == n_clients]
    figure, axes = pyplot.subplots(figsize=(10, 5))
    width = 0.8 / len(rows)
    for number, ((_, beside, contestant), by_workload) in enumerate(rows):
        heights = [by_workload[one].tokens_per_s if one in by_workload else 0.0 for one in run.workloads]
        places = [place - 0.4 + (number + 0.5) * width for place in range(len(run.workloads))]
        label = f"{contestant}, beside a busy loop" if beside else contestant
        colour = pyplot.get_cmap("tab20")(number % 20)
        axes.bar(places, heights, width, label=label, color=colour, hatch="//" if beside else None)
    axes.set_xticks(range(len(run.workloads)), run.workloads)
    axes.set_ylabel("tokens per second")
    axes.set_title(clients(n_clients))
    axes.legend(fontsize=7, ncols=2)
    return _save(figure, folder / f"rates-{n_clients}.png")


def _lengths(run: Run, configs: Sequence[Config], n_clients: int, folder: Path) -> Path:
    """Rate by fixed length, a line for each side, and what adaptive made of it."""
    found = {who[2]: cell for who, cell in cells(run).items() if who[0] == n_clients and not who[1]}
    n_columns = max(1, len(run.workloads))
    figure, row = pyplot.subplots(1, n_columns, figsize=(3 * n_columns, 3), sharey=True, squeeze=False)
    for axes, workload in zip(row[0], run.workloads, strict=False):
        for side, colour in ((OURS, "tab:blue"), (PEER, "tab:orange")):
            fixed = [one for one in configs if one.side == side and one.length is not None]
            measured = [one for one in fixed if workload in found.get(one.contestant, {})]
            rates = [found[one.contestant][workload].tokens_per_s for one in measured]
            axes.plot([one.length or 0 for one in measured], rates, "o-", color=colour, label=side)
        for config in configs:
            if config.name.startswith("adaptive") and workload in found.get(config.contestant, {}):
                rate = found[config.contestant][workload].tokens_per_s
                axes.axhline(rate, linestyle="--", color="tab:blue", label=config.name)
        axes.set_title(workload)
        axes.set_xlabel("draft length")
    row[0][0].set_ylabel(f"tokens per second, {clients(n_clients)}")
    row[0][0].legend(fontsize=7)
    return _save(figure, folder / f"lengths-{n_clients}.png")


def draw_predicted(
    measured: Mapping[str, Sequence[float]],
    predicted: Mapping[str, Sequence[float]],
    adaptive: Mapping[str, float],
    path: Path,
) -> None:
    """Tokens per second of draft lengths 0, 1, ... by workload, and what the length rule made of it."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for i, (workload, rate) in enumerate(adaptive.items()):
        colour = f"C{i}"
        axes.plot(measured[workload], "o-", color=colour, label=f"{workload}, measured")
        axes.plot(predicted[workload], "x--", color=colour, label=f"{workload}, predicted")
        axes.axhline(rate, color=colour, linewidth=1, linestyle=":", label=f"{workload}, adaptive")
    axes.set(xlabel="drafted tokens per round", ylabel="tokens per second", ylim=(0, None))
    axes.legend(fontsize=8)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)
    return path
