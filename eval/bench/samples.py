"""One contestant in one round, and what the rounds of one kind come to."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eval.bench.ratios import quantile
from eval.bench.stream import Stream


@dataclass(frozen=True, slots=True)
class Sample:
    """`beside`: a busy neighbour was on the machine. Rates are of all clients together."""

    contestant: str
    workload: str
    n_clients: int
    beside: bool
    round: int
    n_tokens: int
    seconds: float
    draft_n: int
    draft_n_accepted: int
    n_read_again: int  # prompt tokens beyond the one that has to be decoded for its logits
    first_token_ms: tuple[float, ...]  # of prompts that were not cached
    gaps_ms: tuple[float, ...]
    overhead_us: tuple[float, float] | None

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Cell:
    """Samples of one contestant added up."""

    n_rounds: int
    tokens_per_s: float  # all tokens by all seconds
    acceptance_rate: float | None
    first_token_ms: float | None  # median; None where no prompt was read
    gap_p50_ms: float
    gap_p99_ms: float
    overhead_us: float | None  # medians
    overhead_less_drafting_us: float | None


def sample(
    contestant: str,
    workload: str,
    beside: bool,
    number: int,
    primed: Sequence[Stream],
    streams: Sequence[Stream],
    overhead_us: tuple[float, float] | None,
) -> Sample:
    began, ended = min(one.sent_s for one in streams), max(one.ended_s for one in streams)
    return Sample(
        contestant=contestant,
        workload=workload,
        n_clients=len(streams),
        beside=beside,
        round=number,
        n_tokens=sum(one.n_tokens for one in streams),
        seconds=ended - began,
        draft_n=sum(one.draft_n for one in streams),
        draft_n_accepted=sum(one.draft_n_accepted for one in streams),
        n_read_again=sum(max(one.prompt_n - 1, 0) for one in streams),
        first_token_ms=tuple(one.first_token_ms for one in primed),
        gaps_ms=tuple(gap for one in streams for gap in one.gaps_ms()),
        overhead_us=overhead_us,
    )


def summarise(samples: Iterable[Sample]) -> Cell:
    """ValueError of nothing."""
    found = list(samples)
    if not found:
        raise ValueError("no samples")
    drafted = sum(one.draft_n for one in found)
    overheads = [one.overhead_us for one in found if one.overhead_us is not None]
    firsts = [first for one in found for first in one.first_token_ms]
    gaps = [gap for one in found for gap in one.gaps_ms]
    return Cell(
        n_rounds=len(found),
        tokens_per_s=sum(one.n_tokens for one in found) / sum(one.seconds for one in found),
        acceptance_rate=sum(one.draft_n_accepted for one in found) / drafted if drafted else None,
        first_token_ms=statistics.median(firsts) if firsts else None,
        gap_p50_ms=quantile(gaps, 0.5),
        gap_p99_ms=quantile(gaps, 0.99),
        overhead_us=statistics.median(one[0] for one in overheads) if overheads else None,
        overhead_less_drafting_us=statistics.median(one[1] for one in overheads) if overheads else None,
    )
