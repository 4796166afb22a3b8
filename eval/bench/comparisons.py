"""Which contestants are laid side by side, and what their paired rounds say."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from eval.bench.configs import OURS, PEER, Config
from eval.bench.contestants import BARE
from eval.bench.ratios import Estimate, estimate, geometric_mean, log_ratios
from eval.bench.samples import Sample
from eval.bench.schedule import clients

Key = tuple[str, bool]  # contestant, beside a neighbour
Rates = Mapping[Key, Mapping[str, Mapping[int, float]]]  # tokens per second by workload and round
REMOTE = "peer:url"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`first` / `second`, which may be another contestant in each workload."""

    name: str
    first: Mapping[str, Key]
    second: Mapping[str, Key]


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    n_clients: int
    by_workload: Mapping[str, Estimate]
    overall: Estimate  # the geometric mean over these workloads


def results(
    samples: Sequence[Sample], configs: Sequence[Config], asked: Sequence[tuple[str, str]]
) -> list[Result]:
    """All comparisons that there are samples for, one number of clients after the other."""
    found = []
    for n_clients in sorted({one.n_clients for one in samples}):
        rates = rates_of([one for one in samples if one.n_clients == n_clients])
        for comparison in _comparisons(rates, configs, asked):
            result = compare(comparison, rates, n_clients)
            if result is not None:
                found.append(result)
    return found


def rates_of(samples: Sequence[Sample]) -> Rates:
    rates: dict[Key, dict[str, dict[int, float]]] = {}
    for one in samples:
        key = one.contestant, one.beside
        rates.setdefault(key, {}).setdefault(one.workload, {})[one.round] = one.tokens_per_s
    return rates


def compare(comparison: Comparison, rates: Rates, n_clients: int) -> Result | None:
    """None where no round has both."""
    groups: dict[str, list[float]] = {}
    for workload in comparison.first:
        first = rates[comparison.first[workload]].get(workload, {})
        second = rates[comparison.second[workload]].get(workload, {}) if workload in comparison.second else {}
        if logs := log_ratios(first, second):
            groups[workload] = logs
    overall = geometric_mean(list(groups.values()))
    if overall is None:
        return None
    by_workload = {workload: one for workload, logs in groups.items() if (one := estimate(logs))}
    return Result(f"{comparison.name}, {clients(n_clients)}", n_clients, by_workload, overall)


def _comparisons(
    rates: Rates, configs: Sequence[Config], asked: Sequence[tuple[str, str]]
) -> Iterator[Comparison]:
    workloads = sorted({workload for by_workload in rates.values() for workload in by_workload})
    for first, second in _pairs(configs, asked):
        for beside in (False, True):
            if (first, beside) in rates and (second, beside) in rates:
                name = f"{first} / {second}{', beside a busy loop' if beside else ''}"
                yield Comparison(
                    name,
                    dict.fromkeys(workloads, (first, beside)),
                    dict.fromkeys(workloads, (second, beside)),
                )
    for name, beside in rates:
        if beside and (name, False) in rates:
            yield Comparison(
                f"{name}, beside a busy loop / alone",
                dict.fromkeys(workloads, (name, True)),
                dict.fromkeys(workloads, (name, False)),
            )
    yield from _against_the_best_length(rates, configs, workloads)


def _pairs(configs: Sequence[Config], asked: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    names = [one.contestant for one in configs]
    ours = [one.name for one in configs if one.side == OURS]
    adaptive = [one.contestant for one in configs if _is_adaptive(one)]
    pairs = list(asked)
    pairs += [(f"{OURS}:{name}", f"{PEER}:{name}") for name in ours if f"{PEER}:{name}" in names]
    pairs += [(f"{OURS}:{name}", REMOTE) for name in ours]
    pairs += [(name, f"{PEER}:default") for name in adaptive]
    pairs += [(f"{OURS}:off", BARE), (f"{PEER}:off", BARE)]
    pairs += [(name, f"{name.partition(':')[0]}:off") for name in names if not name.endswith(":off")]
    return list(dict.fromkeys(pairs))


def _against_the_best_length(
    rates: Rates, configs: Sequence[Config], workloads: Sequence[str]
) -> Iterator[Comparison]:
    """The best of each workload by these very rounds: luck is on the side of the fixed lengths."""
    for side in (OURS, PEER):
        fixed = [one.contestant for one in configs if one.side == side and one.length is not None]
        best = {workload: (name, False) for workload in workloads if (name := _best(rates, fixed, workload))}
        if len(fixed) < 2 or not best:
            continue
        for one in configs:
            if _is_adaptive(one) and (one.contestant, False) in rates:
                yield Comparison(
                    f"{one.contestant} / best fixed length of {side}",
                    dict.fromkeys(workloads, (one.contestant, False)),
                    best,
                )


def _best(rates: Rates, names: Sequence[str], workload: str) -> str:
    """The name with the highest geometric mean, "" where none was measured."""
    measured = {
        name: rates[name, False][workload] for name in names if workload in rates.get((name, False), {})
    }
    means = {name: statistics.geometric_mean(by_round.values()) for name, by_round in measured.items()}
    return max(means, key=lambda name: means[name], default="")


def best_lengths(samples: Sequence[Sample], configs: Sequence[Config]) -> dict[str, dict[str, int]]:
    """By "side, clients" and workload, as the sweep found them."""
    found: dict[str, dict[str, int]] = {}
    lengths = {one.contestant: one.length for one in configs if one.length is not None}
    for n_clients in sorted({one.n_clients for one in samples}):
        rates = rates_of([one for one in samples if one.n_clients == n_clients])
        workloads = sorted({one.workload for one in samples if one.n_clients == n_clients})
        for side in (OURS, PEER):
            names = [name for name in lengths if name.startswith(f"{side}:")]
            best = {
                workload: lengths[name] for workload in workloads if (name := _best(rates, names, workload))
            }
            if len(names) > 1 and best:
                found[f"{side}, {clients(n_clients)}"] = best
    return found


def _is_adaptive(config: Config) -> bool:
    return any(
        pair == ("--spec-adaptive", "on") for pair in zip(config.flags, config.flags[1:], strict=False)
    )
