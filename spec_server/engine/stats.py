"""Counters of the engine since its start, and the step's own cost; formats nothing."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field

from spec_server.engine.base import Timings

_RECENT_STEPS = 512


@dataclass(slots=True)
class StepClock:
    """Where a step began: the clock, and the time spent inside llama_decode until then, all in nanoseconds."""

    target_ns: int
    drafter_ns: int
    began_ns: int = field(default_factory=time.perf_counter_ns)

    def wall_ns(self) -> int:
        return time.perf_counter_ns() - self.began_ns


@dataclass(slots=True)
class Stats:
    """Written by the engine thread only; reading single values from elsewhere is safe."""

    n_steps: int = 0
    n_decodes: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    prompt_ms: float = 0.0
    n_predicted: int = 0
    predicted_ms: float = 0.0
    n_requests: int = 0
    n_drafts: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_draft_prompt: int = 0
    n_busy: int = 0  # slots in a decode, summed over the steps
    n_tokens_max: int = 0  # longest prompt and answer
    accepted_per_pos: list[int] = field(default_factory=list)
    events: dict[str, float] = field(
        default_factory=lambda: defaultdict(float)
    )  # by metric name, labels included
    overhead_us: deque[tuple[float, int, int]] = field(
        default_factory=lambda: deque(maxlen=_RECENT_STEPS)
    )  # per step: own time, active slots, drafted tokens

    def finish(self, timings: Timings) -> None:
        """Add a finished request."""
        self.n_requests += 1
        self.n_prompt += timings.prompt_n
        self.n_cached += timings.cache_n
        self.prompt_ms += timings.prompt_ms
        self.n_predicted += timings.predicted_n
        self.predicted_ms += timings.predicted_ms
        self.n_drafts += timings.n_drafts
        self.n_drafted += timings.draft_n
        self.n_accepted += timings.draft_n_accepted
        self.n_draft_prompt += timings.draft_prompt_n
        self.n_tokens_max = max(self.n_tokens_max, timings.cache_n + timings.prompt_n + timings.predicted_n)
        grow = len(timings.accepted_per_pos) - len(self.accepted_per_pos)
        self.accepted_per_pos.extend([0] * max(0, grow))
        for i, n in enumerate(timings.accepted_per_pos):
            self.accepted_per_pos[i] += n
        for name, counts in timings.drafters.items():
            for what in ("drafts", "drafted", "accepted"):
                self.events[f'spec_drafter_{what}_total{{drafter="{name}"}}'] += counts[what]

    def overhead_per_slot(self) -> tuple[float, float]:
        """Median microseconds of a step outside llama_decode per active slot: (as is, less 60 per drafted token)."""
        steps = list(self.overhead_us)
        if not steps:
            return 0.0, 0.0
        plain = sorted(us / n for us, n, _ in steps)
        net = sorted((us - 60.0 * drafted) / n for us, n, drafted in steps)
        return plain[len(plain) // 2], net[len(net) // 2]
