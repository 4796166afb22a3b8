"""Ratios of paired rounds with their intervals; pure arithmetic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# 97.5 % points of Student's t for 1 to 30 degrees of freedom; the normal one beyond is 4 % too small at most.
# fmt: off
_T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on
_NORMAL975 = 1.960


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio and its 95 % interval; without one where a single round says nothing about the spread."""

    ratio: float
    low: float | None
    high: float | None
    n_rounds: int


def log_ratios(ours: Mapping[int, float], others: Mapping[int, float]) -> list[float]:
    """One for each round that both have: what the machine did to one it did to the other."""
    return [math.log(ours[number] / others[number]) for number in sorted(ours.keys() & others.keys())]


def estimate(logs: Sequence[float]) -> Estimate | None:
    """The geometric mean over rounds of one kind; None without a round."""
    return geometric_mean([logs])


def geometric_mean(groups: Sequence[Sequence[float]]) -> Estimate | None:
    """The geometric mean of the groups' geometric means: every workload weighs the same, whatever its rounds.

    The interval takes each group's own spread (Welch and Satterthwaite): it says how well the ratio is known
    on this machine, not how unlike the workloads are. None where a group is empty.
    """
    if not groups or not all(groups):
        return None
    n_rounds = sum(len(group) for group in groups)
    centre = statistics.fmean(statistics.fmean(group) for group in groups)
    if any(len(group) < 2 for group in groups):
        return Estimate(math.exp(centre), None, None, n_rounds)
    parts = [statistics.variance(group) / len(group) / len(groups) ** 2 for group in groups]
    variance = sum(parts)
    half = 0.0
    if variance > 0:
        satterthwaite = sum(part**2 / (len(group) - 1) for part, group in zip(parts, groups, strict=True))
        half = t975(variance**2 / satterthwaite) * math.sqrt(variance)
    return Estimate(math.exp(centre), math.exp(centre - half), math.exp(centre + half), n_rounds)


def t975(degrees: float) -> float:
    """Rounded towards fewer degrees, so towards the wider interval."""
    whole = max(1, math.floor(degrees + 1e-9))
    return _T975[whole - 1] if whole <= len(_T975) else _NORMAL975


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least that share of the values does not exceed; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
