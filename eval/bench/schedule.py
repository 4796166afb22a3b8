"""Blocks of rounds: every contestant in every round, in another order each time, while the time lasts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from eval.bench.contestants import Contestant
from eval.bench.machine import Neighbour
from eval.bench.samples import Sample, sample
from eval.client import ServerError

Prompts = Mapping[str, Sequence[Sequence[int]]]  # by workload, tokens
Log = Callable[[str], None]

# Guesses for the estimate that is given before anything was measured: a small model on two cores.
_PROMPT_TOKENS_PER_S = 300.0
_TOKENS_PER_S = {1: 70.0}
_TOKENS_PER_S_OF_SEVERAL = 120.0
_REQUEST_S = 0.1


@dataclass(frozen=True, slots=True)
class Block:
    """Rounds of one number of clients; in each, all contestants do all workloads."""

    n_clients: int
    workloads: tuple[str, ...]
    n_rounds: int
    n_tokens: int
    budget_s: float | None = None  # rounds stop before it is exceeded, but one is always done

    def prompts(self, available: Prompts, workload: str, number: int) -> list[Sequence[int]]:
        """The next ones in each round, from the start again when all were used."""
        those = available[workload]
        return [those[(number * self.n_clients + one) % len(those)] for one in range(self.n_clients)]

    def round_s(self, available: Prompts, n_contestants: int, n_conditions: int) -> float:
        """What a round may take, by guess."""
        rate = _TOKENS_PER_S.get(self.n_clients, _TOKENS_PER_S_OF_SEVERAL)
        generating = self.n_clients * self.n_tokens / rate + _REQUEST_S
        reading = sum(
            sum(len(one) for one in self.prompts(available, workload, 0)) / _PROMPT_TOKENS_PER_S
            for workload in self.workloads
        )
        return n_contestants * (reading + len(self.workloads) * n_conditions * generating)


@dataclass(slots=True)
class Rounds:
    """Runs a block. A contestant that fails is left out from there on, and `notes` says so."""

    block: Block
    contestants: list[Contestant]
    available: Prompts
    neighbour: Neighbour | None
    order: random.Random
    log: Log
    first: int = 0  # number of the first round: each has its own prompts
    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def warm_up(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> None:
        """With prompts that are in no round: for pages, caches, and what an adaptive server has to learn."""
        for contestant in list(self.contestants):
            self._guarded(contestant, partial(contestant.generate, prompts, n_tokens))

    def run(self) -> None:
        block, began = self.block, time.monotonic()
        for number in range(block.n_rounds):
            for workload in self.order.sample(block.workloads, len(block.workloads)):
                self._round(workload, self.first + number)
            spent = time.monotonic() - began
            left = (block.n_rounds - number - 1) * spent / (number + 1)
            is_last = number + 1 == block.n_rounds
            if (
                block.budget_s is not None
                and not is_last
                and spent * (number + 2) / (number + 1) > block.budget_s
            ):
                self.log(
                    f"{self._clients()}: stopped by --minutes after {number + 1} of {block.n_rounds} rounds"
                )
                return
            self.log(
                f"{self._clients()}: round {self.first + number + 1} of {self.first + block.n_rounds}, "
                f"at most {left / 60:.1f} min left"
            )

    def _round(self, workload: str, number: int) -> None:
        prompts = self.block.prompts(self.available, workload, number)
        order = self.order.sample(self.contestants, len(self.contestants))
        for contestant in order:
            self._measure(contestant, workload, number, prompts, beside=False)
        if self.neighbour is None:
            return
        self.neighbour.resume()
        try:
            for contestant in order:
                if contestant in self.contestants:
                    self._measure(contestant, workload, number, prompts, beside=True)
        finally:
            self.neighbour.pause()

    def _measure(
        self,
        contestant: Contestant,
        workload: str,
        number: int,
        prompts: Sequence[Sequence[int]],
        *,
        beside: bool,
    ) -> None:
        def measure() -> None:
            # Read before the clock starts, so that tokens per second are those of generating.
            primed = [] if beside else contestant.prime(prompts)
            streams = contestant.generate(prompts, self.block.n_tokens)
            overhead = self._overhead(contestant)
            self.samples.append(sample(contestant.name, workload, beside, number, primed, streams, overhead))

        self._guarded(contestant, measure)

    def _overhead(self, contestant: Contestant) -> tuple[float, float] | None:
        try:
            return contestant.overhead_us()
        except ServerError as error:
            # Its rates are sound all the same.
            note = f"{contestant.name}, {self._clients()}: step overhead not known, {error}"
            if note not in self.notes:
                self.notes.append(note)
            return None

    def _guarded(self, contestant: Contestant, measure: Callable[[], object]) -> None:
        try:
            measure()
        except (ServerError, OSError) as error:
            self.contestants.remove(contestant)
            self.notes.append(f"{contestant.name}, {self._clients()}: left out from here on, {error}")
            self.log(self.notes[-1])

    def _clients(self) -> str:
        return clients(self.block.n_clients)


def clients(n_clients: int) -> str:
    return "1 client" if n_clients == 1 else f"{n_clients} clients"
