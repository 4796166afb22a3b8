"""How many tokens to draft: the length that makes the most tokens per second, found while running.

A round with k drafted tokens takes the time T(k) of drafting and of one target step, and yields E(k) = 1 + P_1 + ...
+ P_k tokens, P_j being the probability that the first j drafted tokens all stand. Over many rounds the rate is the
sum of E over the sum of T. It is largest where every round takes the k that maximises E(k) - r T(k), r being that
largest rate itself (Dinkelbach 1967, "On nonlinear fractional programming"). r is taken from the rounds just past.
Nothing here draws random numbers, reads a clock or knows llama; docs/adaptive-speculation.md derives it at length.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from draft.guard import DraftGuard

_POSITIONS = 4  # the fourth stands for all later ones
_EDGES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.9375, 0.97)  # of the bins; near 1 little makes much
_BINS = len(_EDGES) + 1
_MEMORY = 32.0  # observations that a cell of the calibration remembers
_LONG_MEMORY = 256.0  # of the last position's cells: one long draft is dozens of observations
_PRIOR = 2.0  # observations that the drafter's own confidence counts for
_LOOK_AHEAD = 16
_LARGEST_STEP = 128
_TABLE_FOR = 16  # steps; what a known size costs moves by 2 % in one at most
_PROBE_LOSS = 0.003  # share of the rate that a slot which does not draft may spend on trying again
_SHORTEST_WAIT, _LONGEST_WAIT = 8, 256  # rounds
_REST = 7  # rounds; nothing that the answer depends on moves far in them
_EXPLORE = 32  # every so many drafts one goes on as long as it may stand, so that later positions are known
_EXPLORE_ABOVE = 0.3
_RATE_FADE = 0.98  # of the sums behind the rate, per step
_TRY_TOKENS = 2  # length of a draft that is only a try


class Calibration:
    """From a drafter's confidence to the probability that the target accepts, given that all before it stood.

    A table by position and confidence, each cell a decayed count of acceptances; the confidence itself is the prior.
    """

    __slots__ = ("_accepted", "_expected", "_seen")
    _FORMAT = struct.Struct(f"<{2 * _POSITIONS * _BINS + _POSITIONS}f")
    n_bytes = _FORMAT.size

    def __init__(self) -> None:
        self._accepted = [0.0] * (_POSITIONS * _BINS)
        self._seen = [0.0] * (_POSITIONS * _BINS)
        self._expected = [-1.0] * _POSITIONS

    def probability(self, position: int, confidence: float) -> float:
        cell = _cell(position, confidence)
        return (self._accepted[cell] + _PRIOR * confidence) / (self._seen[cell] + _PRIOR)

    def drafted(self, position: int, confidence: float) -> float:
        """A token was drafted, whether or not it will be verified: its probability, which `expected` learns from."""
        p = self.probability(position, confidence)
        i = min(position, _POSITIONS - 1)
        self._expected[i] = (
            p if self._expected[i] < 0.0 else self._expected[i] + 0.08 * (p - self._expected[i])
        )
        return p

    def expected(self, position: int) -> float:
        """The same before the token is drafted: the mean of late; of a position not seen yet, the one before it."""
        for i in range(min(position, _POSITIONS - 1), -1, -1):
            if self._expected[i] >= 0.0:
                return self._expected[i]
        return 0.6

    def learn(self, confidences: Sequence[float], n_accepted: int) -> None:
        """The first n_accepted of a verified draft stood; the one behind them, if there was one, did not."""
        for position, confidence in enumerate(confidences[: n_accepted + 1]):
            cell = _cell(position, confidence)
            if self._seen[cell] >= (_MEMORY if position < _POSITIONS - 1 else _LONG_MEMORY):
                self._seen[cell] *= 0.5
                self._accepted[cell] *= 0.5
            self._seen[cell] += 1.0
            self._accepted[cell] += position < n_accepted

    def fade(self, n_left: float) -> Calibration:
        """What another text may take from this one: the same shares, each cell seen at most n_left times."""
        faded = Calibration()
        for i, seen in enumerate(self._seen):
            share = min(1.0, n_left / seen) if seen else 0.0
            faded._seen[i], faded._accepted[i] = seen * share, self._accepted[i] * share
        faded._expected = list(self._expected)
        return faded

    def pack(self) -> bytes:
        return self._FORMAT.pack(*self._accepted, *self._seen, *self._expected)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Calibration:
        """ValueError where the bytes are none of a calibration."""
        if len(data) != cls.n_bytes:
            raise ValueError(f"a calibration has {cls.n_bytes} bytes, not {len(data)}")
        values = cls._FORMAT.unpack(data)
        n = _POSITIONS * _BINS
        accepted, seen, expected = values[:n], values[n : 2 * n], values[2 * n :]
        counts_fit = all(0.0 <= a <= s <= 2 * _LONG_MEMORY for a, s in zip(accepted, seen, strict=True))
        if not counts_fit or not all(-1.0 <= p <= 1.0 for p in expected):
            raise ValueError("the numbers of a calibration contradict each other")
        calibration = cls()
        calibration._accepted, calibration._seen, calibration._expected = (
            list(accepted),
            list(seen),
            list(expected),
        )
        return calibration


def _cell(position: int, confidence: float) -> int:
    return min(position, _POSITIONS - 1) * _BINS + bisect(_EDGES, confidence)


class StepCosts:
    """What a target step takes in milliseconds, by tokens in its batch; learnt from every step.

    In logarithms, a level that follows load and context length fast and a shape over batch sizes that moves slowly,
    so that a busy neighbour is not mistaken for an expensive batch. Outliers are clipped. One thread writes; `ms`
    may be read from another.
    """

    __slots__ = ("_level", "_seen", "_shape", "_stale", "_table")

    def __init__(self) -> None:
        self._level = math.nan
        self._shape: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._stale = 0  # observations since the table was made
        self._table: list[float] = []  # shape by tokens in the batch, not logarithmic; [0] unused

    def observe(self, n_tokens: int, ms: float) -> None:
        if not 0 < n_tokens <= _LARGEST_STEP or ms <= 0.0:
            return
        y = math.log(ms)
        if math.isnan(self._level):
            self._level = y - math.log(_unknown_shape(n_tokens))
        seen = self._seen.get(n_tokens, 0)
        shape = self._shape.get(n_tokens) or math.log(self._shape_at(n_tokens))
        error = y - self._level - shape
        if seen >= 3:
            error = max(-0.7, min(0.7, error))
            self._level += 0.1 * error
        self._seen[n_tokens] = seen + 1
        # Once a size is known the level takes the error: else the sizes that come often would take it alone.
        self._shape[n_tokens] = shape + (1.0 / (seen + 1) if seen < 3 else 0.02) * error
        self._stale += 1
        if seen < 3 or self._stale >= _TABLE_FOR:
            self._table, self._stale = self._interpolate(), 0

    def ms(self, n_tokens: int) -> float:
        """Expected milliseconds; never less than that of a smaller batch. 0 before anything was seen."""
        return 0.0 if math.isnan(self._level) else math.exp(self._level) * self._shape_at(n_tokens)

    def as_one(self, n_tokens: int, ms: float) -> float:
        """What a step of `ms` over n_tokens tokens would have taken over one."""
        return ms * self._shape_at(1) / self._shape_at(n_tokens)

    def _shape_at(self, n_tokens: int) -> float:
        table = self._table
        if not table:
            return _unknown_shape(n_tokens)
        if n_tokens < len(table):
            return table[n_tokens]
        return table[-1] + (table[-1] - table[-2]) * (n_tokens - len(table) + 1)

    def _interpolate(self) -> list[float]:
        """Straight lines between the sizes seen and beyond the largest; below the smallest what is usual."""
        sizes = sorted(self._shape)
        known = [math.exp(self._shape[n]) for n in sizes]
        first = sizes[0]
        below = [known[0] * _unknown_shape(n) / _unknown_shape(first) for n in range(1, first)]
        if len(sizes) == 1:
            slope = known[0] * (_unknown_shape(first + 1) / _unknown_shape(first) - 1.0)
        else:
            slope = max(0.0, known[-1] - known[-2]) / (sizes[-1] - sizes[-2])
        xs = [*range(1, first), *sizes, sizes[-1] + 1]
        table = np.interp(np.arange(sizes[-1] + 2), xs, [*below, *known, known[-1] + slope])
        # A larger batch is never cheaper: between what that makes of the dear sizes and of the cheap ones.
        rising = np.maximum.accumulate(table) + np.minimum.accumulate(table[::-1])[::-1]
        return list((rising / 2).tolist())


def _unknown_shape(n_tokens: int) -> float:
    """Half a token's share for each further one: between a machine bound by memory and one bound by arithmetic."""
    return 1.0 + 0.5 * (n_tokens - 1)


@dataclass(slots=True)
class _Probe:
    """When a slot that does not draft tries again."""

    waited: int = 0
    n_drafts: int = 0
    at_once: bool = False
    rest: int = 0  # rounds for which the last answer, no, holds


@dataclass(slots=True)
class LengthPolicy:
    """The rule for one engine. `begin_step` opens a step; drafters ask it for each slot in it."""

    costs: StepCosts = field(default_factory=StepCosts)
    draft_ms: dict[str, float] = field(
        default_factory=dict
    )  # of one drafted token, all slots together, by drafter
    rate: float = 0.0  # tokens per millisecond and slot, of the rounds just past
    n_slots: int = 1
    guard: DraftGuard = field(default_factory=DraftGuard)
    _tokens: float = 0.0  # by slot, of the steps just past, as is the next
    _ms: float = 0.0
    _is_allowed: bool = True
    _probes: dict[int, _Probe] = field(default_factory=lambda: defaultdict(_Probe))
    _probing: set[int] = field(default_factory=set)

    def begin_step(self, n_slots: int) -> None:
        self.n_slots = max(1, n_slots)
        self._is_allowed = self.guard.allows(self.n_slots)
        self._probing.clear()

    def wants(self, seq_id: int, n_drafted: int, p_all: float, p_next: float, drafter: str = "") -> bool:
        """Draft one more token? p_all: the drafted ones all stand; p_next: a further one does, given that."""
        if not self._is_allowed:
            return False
        draft_ms = self.draft_ms.get(drafter, 0.0)
        if self.rate <= 0.0:
            return n_drafted < _TRY_TOKENS  # nothing is known yet
        if n_drafted == 0:
            return self._opens(seq_id, p_next, draft_ms)
        if seq_id in self._probing:
            return n_drafted < _TRY_TOKENS
        if self._gain(n_drafted, p_all, p_next, draft_ms) > 0.0:
            return True
        return (
            self._probes[seq_id].n_drafts % _EXPLORE == 0
            and p_all > _EXPLORE_ABOVE
            and n_drafted < _LOOK_AHEAD
        )

    def _opens(self, seq_id: int, p_next: float, draft_ms: float) -> bool:
        probe = self._probes[seq_id]
        if probe.rest and not probe.at_once:
            probe.rest -= 1
            probe.waited += 1
            return False
        gain = self._gain(0, 1.0, p_next, draft_ms)
        if gain > 0.0:
            self._pays(seq_id)
            return True
        probe.rest = _REST
        return self._tries(seq_id, gain)

    def _pays(self, seq_id: int) -> None:
        probe = self._probes[seq_id]
        probe.waited = 0
        probe.n_drafts += 1

    def _tries(self, seq_id: int, gain: float) -> bool:
        """Where a draft loses `gain`: is it time for one all the same?"""
        probe = self._probes[seq_id]
        probe.waited += 1
        if not probe.at_once and probe.waited < min(_LONGEST_WAIT, max(_SHORTEST_WAIT, -gain / _PROBE_LOSS)):
            return False
        probe.waited, probe.at_once = 0, False
        self._probing.add(seq_id)
        return True

    def verified(self, seq_id: int, n_drafted: int, n_accepted: int) -> None:
        """A draft of this slot was verified. A probe that stood whole is followed by another at once."""
        if seq_id in self._probing:
            self._probes[seq_id].at_once = n_accepted == n_drafted

    def _gain(self, n_drafted: int, p_all: float, p_next: float, draft_ms: float) -> float:
        """The best of E - r T over all ways to go on from here, against stopping here."""
        n, r = self.n_slots, self.rate
        here = self.costs.ms(n * (1 + n_drafted))
        best, tokens, p = -math.inf, 0.0, p_all
        for more in range(1, _LOOK_AHEAD + 1):
            p *= p_next
            tokens += p
            step = (self.costs.ms(n * (1 + n_drafted + more)) - here) / n
            best = max(best, tokens - r * (step + more * draft_ms / n))
            if p < 0.01:
                break
        return best

    def cut(self, seq_id: int, probabilities: Sequence[float]) -> int:
        """How many of the drafted tokens are worth verifying; drafting them is paid already.

        `probabilities` are conditional: of each token, given that all before it stand.
        """
        if self.rate <= 0.0 or seq_id in self._probing:
            return min(_TRY_TOKENS, len(probabilities))
        return self._best(probabilities)[0]

    def choose(self, seq_id: int, probabilities: Sequence[float]) -> int:
        """The same for a draft that costs nothing and nobody asked `wants` about."""
        if not self._is_allowed or not probabilities:
            return 0
        if self.rate > 0.0:
            best, gain = self._best(probabilities)
            if best:
                self._pays(seq_id)
                return best
            if not self._tries(seq_id, gain):
                return 0
        return min(_TRY_TOKENS, len(probabilities))

    def _best(self, probabilities: Sequence[float]) -> tuple[int, float]:
        """How many of the drafted tokens to verify, 0 where no number gains, and E - r T of the best against none."""
        if not probabilities:
            return 0, 0.0
        n, r = self.n_slots, self.rate
        ms = [self.costs.ms(n * (1 + k)) for k in range(len(probabilities) + 1)]
        gains = np.cumsum(np.cumprod(probabilities)) - (r / n) * (np.array(ms[1:]) - ms[0])
        best = int(gains.argmax())
        gain = float(gains[best])
        return (best + 1 if gain > 0.0 else 0), gain

    def end_step(self, n_tokens: int, target_ms: float, wall_ms: float, n_gained: int) -> None:
        """A step of only decoding slots is over: its batch size, its times, the tokens that it yielded."""
        self.costs.observe(n_tokens, target_ms)
        self.guard.observe(self.n_slots, n_tokens, n_gained, wall_ms)
        if wall_ms > 0.0:
            # A ratio of sums: the mean of the steps' own rates would make much of short steps.
            self._tokens = _RATE_FADE * self._tokens + n_gained / self.n_slots
            self._ms = _RATE_FADE * self._ms + wall_ms
            self.rate = self._tokens / self._ms

    def drafted(self, drafter: str, n_steps: int, ms: float) -> None:
        """That drafter drafted n_steps tokens, one after the other, in `ms`."""
        if n_steps > 0:
            now, known = ms / n_steps, self.draft_ms.get(drafter)
            self.draft_ms[drafter] = now if known is None else known + 0.1 * (now - known)


class DraftLength:
    """One slot's draft under the rule: the drafter asks it before the first token and after each."""

    __slots__ = (
        "_calibration",
        "_calibrations",
        "_drafter",
        "_p_all",
        "_policy",
        "_probabilities",
        "_seq_id",
    )

    def __init__(self, policy: LengthPolicy, calibrations: Mapping[str, Calibration], seq_id: int) -> None:
        self._policy = policy
        self._calibrations = calibrations
        self._seq_id = seq_id

    def opens(self, drafter: str) -> bool:
        """Is a draft by `drafter` worth a try?"""
        self._drafter, self._calibration = drafter, self._calibrations[drafter]
        self._p_all, self._probabilities = 1.0, list[float]()
        return self._wants()

    def goes_on(self, confidence: float) -> bool:
        """A token was drafted with that confidence, 0 to 1: is another one worth drafting?"""
        p = self._calibration.drafted(len(self._probabilities), confidence)
        self._probabilities.append(p)
        self._p_all *= p
        return self._wants()

    def chooses(self, drafter: str, confidences: Sequence[float]) -> int:
        """How many tokens of a draft that is there already, at no cost, are worth verifying."""
        self._drafter, self._calibration = drafter, self._calibrations[drafter]
        p = [self._calibration.probability(i, confidence) for i, confidence in enumerate(confidences)]
        return self._policy.choose(self._seq_id, p)

    def keeps(self) -> int:
        """How many of the drafted tokens are worth verifying."""
        return self._policy.cut(self._seq_id, self._probabilities)

    def spent(self, n_steps: int, ms: float) -> None:
        """What drafting took, for all slots of the step together."""
        self._policy.drafted(self._drafter, n_steps, ms)

    def _wants(self) -> bool:
        n = len(self._probabilities)
        return self._policy.wants(self._seq_id, n, self._p_all, self._calibration.expected(n), self._drafter)
