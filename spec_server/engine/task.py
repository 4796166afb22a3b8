"""Task: one generation under way, with its sampler, its text and its counts; decides nothing about slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from spec_server.engine.base import Event, Finished, GenerateRequest, Timings
from spec_server.engine.sample import TokenSampler
from spec_server.engine.stream import TextStream

Ints = npt.NDArray[np.int32]
Emit = Callable[["Task", Event | Exception], None]


def _now() -> float:
    return time.perf_counter()


@dataclass(slots=True)
class DrafterCount:
    """What one drafter did for one request."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    ns: int = 0  # of the proposals that it answered
    accepted_per_pos: list[int] = field(default_factory=list)

    def add(self, n_drafted: int, n_accepted: int) -> None:
        self.drafts += 1
        self.drafted += n_drafted
        self.accepted += n_accepted
        count_positions(self.accepted_per_pos, n_accepted)

    def report(self) -> dict[str, float | tuple[int, ...]]:
        return {
            "drafts": self.drafts,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "mean_length": 1 + self.accepted / max(1, self.drafts),
            "draft_ms": self.ns / 1e6,
            "accepted_per_pos": tuple(self.accepted_per_pos),
        }


@dataclass(slots=True)
class Task:
    """One GenerateRequest between admission and Finished."""

    request: GenerateRequest
    prompt: Ints
    sampler: TokenSampler
    text: TextStream
    emit: Emit
    n_draft_max: int = 0
    cancelled: bool = False
    last_token: int = -1
    n_cache: int = 0
    n_checkpoint: int = 0
    cache_kind: Literal["prefix", "checkpoint", "none"] = "none"
    n_predicted: int = 0
    unsaid: list[int] = field(default_factory=list)  # of these, those that were not streamed yet
    n_decodes: int = 0
    draft_ns: int = 0
    drafters: dict[str, DrafterCount] = field(default_factory=dict)
    accepted_per_pos: list[int] = field(default_factory=list)
    trace: list[Mapping[str, object]] = field(default_factory=list)
    started: float = field(default_factory=_now)
    first_token: float = 0.0

    @property
    def n_drafted(self) -> int:
        return sum(d.drafted for d in self.drafters.values())

    @property
    def n_accepted(self) -> int:
        return sum(d.accepted for d in self.drafters.values())

    def remaining(self, n_ctx_seq: int, n_tokens: int) -> int:
        """Tokens it may still produce: max_tokens, and one for each free cell plus the one that needs none."""
        room = n_ctx_seq - n_tokens
        if self.request.max_tokens < 0:
            return room
        return min(room, self.request.max_tokens - self.n_predicted)

    def count_draft(self, drafter: str, n_drafted: int, n_accepted: int) -> None:
        self.drafters.setdefault(drafter, DrafterCount()).add(n_drafted, n_accepted)
        count_positions(self.accepted_per_pos, n_accepted)

    def count_drafting(self, drafter: str, ns: int) -> None:
        """Time spent on a proposal; `drafter` is whose draft it became, "" where it stayed empty."""
        self.draft_ns += ns
        if drafter:
            self.drafters.setdefault(drafter, DrafterCount()).ns += ns

    def finished(
        self, id_slot: int, stop_type: Literal["eos", "word", "limit"], truncated: bool, draft_prompt_n: int
    ) -> Finished:
        now = _now()
        first = self.first_token or now
        timings = Timings(
            cache_n=self.n_cache,
            prompt_n=len(self.prompt) - self.n_cache,
            prompt_ms=(first - self.started) * 1e3,
            predicted_n=self.n_predicted,
            predicted_ms=(now - first) * 1e3,
            draft_n=self.n_drafted,
            draft_n_accepted=self.n_accepted,
            draft_ms=self.draft_ns / 1e6,
            n_drafts=sum(d.drafts for d in self.drafters.values()),
            n_decodes=self.n_decodes,
            accepted_per_pos=tuple(self.accepted_per_pos),
            draft_prompt_n=draft_prompt_n,
            drafters={name: d.report() for name, d in self.drafters.items()},
            cache_kind=self.cache_kind,
            n_checkpoint=self.n_checkpoint,
        )
        return Finished(
            reason="length" if stop_type == "limit" else "stop",
            stop_type=stop_type,
            stopping_word=self.text.stopping_word,
            truncated=truncated,
            n_prompt=len(self.prompt),
            id_slot=id_slot,
            seed=self.sampler.seed,
            timings=timings,
            trace=tuple(self.trace),
        )


def count_positions(per_pos: list[int], n_accepted: int) -> None:
    per_pos.extend([0] * (n_accepted - len(per_pos)))
    for i in range(n_accepted):
        per_pos[i] += 1
