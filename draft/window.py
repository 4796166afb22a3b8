"""How many tokens to draft: the length that makes the most tokens per second, found while running.

A round with k drafted tokens takes the time T(k) of drafting and of one target step, and yields E(k) = 1 + P_1 + ...
+ P_k tokens, P_j being the probability that the first j drafted tokens all stand. Over many rounds the rate is the
sum of E over the sum of T. It is largest where every round takes the k that maximises E(k) - r T(k), r being that
largest rate itself (Dinkelbach 1967, "On nonlinear fractional programming"). r is taken from the rounds just past.
Whether to draft one more token is a matter of optimal stopping: what may turn up is worth something too.
Nothing here draws random numbers, reads a clock or knows llama; docs/adaptive-speculation.md derives it at length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from draft.calibration import Calibration
from draft.guard import DraftGuard
from draft.step_costs import StepCosts

_LOOK_AHEAD = 4  # tokens behind the next one
_TRY_SHARE = 0.003  # of the rate, that a slot may lose to drafts that do not pay
_MOST_SAVED = 0.2  # tokens, for such drafts
_REST = 7  # rounds; nothing that the answer depends on moves far in them
_RATE_FADE = 0.99  # of the sums behind the rate, per step
_TRY_TOKENS = 2  # length of a draft of which nothing is known
_AHEAD = np.arange(_LOOK_AHEAD + 1)

_Array = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Account:
    """What a slot may lose to drafts that do not seem to pay, in tokens: what they find pays for more of them."""

    saved: float = _MOST_SAVED
    is_try: bool = False
    rest: int = 0  # rounds for which the last answer, no, holds

    def add(self, tokens: float) -> None:
        self.saved = min(_MOST_SAVED, self.saved + tokens)


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
    _time: float = 0.0  # in steps over one token, so that a machine that slows down does not bend the rate
    _is_allowed: bool = True
    _accounts: dict[int, _Account] = field(default_factory=lambda: defaultdict(_Account))
    _prices: _Array = field(default_factory=lambda: np.zeros(0))  # of this step, see _price

    def begin_step(self, n_slots: int) -> None:
        self.n_slots = max(1, n_slots)
        self._is_allowed = self.guard.allows(self.n_slots)
        self._prices = np.zeros(0)

    # -- a draft that is made token by token

    def opens(self, seq_id: int, calibration: Calibration, drafter: str) -> bool:
        """Is a draft worth beginning, or at least a try?"""
        if not self._is_allowed:
            return False
        if self.rate <= 0.0:
            return True
        account = self._accounts[seq_id]
        account.add(_TRY_SHARE)
        if account.rest:
            account.rest -= 1
            return False
        value = self._value_of_more([], calibration, drafter)
        account.is_try = value <= 0.0
        if account.is_try and account.saved < self._draft_price(drafter):
            account.rest = _REST
            return False
        return True

    def goes_on(self, probabilities: Sequence[float], calibration: Calibration, drafter: str) -> bool:
        """Draft one more token? `probabilities`, of those drafted: that each stands, given that all before it do."""
        if self.rate <= 0.0:
            return len(probabilities) < _TRY_TOKENS
        return self._value_of_more(probabilities, calibration, drafter) > 0.0

    def cut(self, seq_id: int, probabilities: Sequence[float], drafter: str) -> int:
        """How many of the drafted tokens are worth verifying; drafting them is paid already."""
        if self.rate <= 0.0:
            return min(_TRY_TOKENS, len(probabilities))
        n, gain = self._best(probabilities)
        account = self._accounts[seq_id]
        if account.is_try:
            account.add(gain - len(probabilities) * self._draft_price(drafter))
        return n

    def _value_of_more(self, probabilities: Sequence[float], calibration: Calibration, drafter: str) -> float:
        """Tokens to be won by drafting one more, its price taken off, against the best end so far.

        Its confidence is not known yet: for each that it may have, the best of all ways to go on, the tokens behind
        it standing with the mean probability, or of giving up; weighed with how often each comes.
        """
        n = len(probabilities)
        price = self._price(n + 1 + _LOOK_AHEAD)
        p_all, won = 1.0, 0.0
        best = 0.0
        for k, p in enumerate(probabilities, 1):
            p_all *= p
            won += p_all
            best = max(best, won - price[k])
        draft_price = self._draft_price(drafter)
        shares, chances = calibration.outlook(n)
        later = calibration.outlook(n + 1)
        p_later = sum(share * p for share, p in zip(*later, strict=True))
        yields = np.cumsum(p_later**_AHEAD)
        spent = price[n + 1 : n + 2 + _LOOK_AHEAD] + draft_price * _AHEAD
        ways = won - best + p_all * np.outer(chances, yields) - spent
        return float(np.dot(shares, np.maximum(0.0, ways.max(axis=1)))) - draft_price

    def choose(self, probabilities: Sequence[float]) -> int:
        """How many tokens of a draft that costs nothing are worth verifying; nobody asked `opens` about it."""
        if not self._is_allowed:
            return 0
        return self._best(probabilities)[0] if self.rate > 0.0 else min(_TRY_TOKENS, len(probabilities))

    def _best(self, probabilities: Sequence[float]) -> tuple[int, float]:
        """The number of tokens with the best gain, and that; 0 and 0 where none has one."""
        if not probabilities:
            return 0, 0.0
        n = len(probabilities)
        gains = np.cumsum(np.cumprod(probabilities)) - self._price(n)[1 : n + 1]
        best = int(gains.argmax())
        gain = float(gains[best])
        return (best + 1, gain) if gain > 0.0 else (0, 0.0)

    def _price(self, n_draft: int) -> _Array:
        """[> n_draft] what verifying a draft of 0, 1, ... tokens costs a slot, in tokens."""
        if len(self._prices) <= n_draft:
            curve = self.costs.curve(self.n_slots, max(32, n_draft))
            self._prices = (self.rate / self.n_slots) * (curve - curve[0])
        return self._prices

    def _draft_price(self, drafter: str) -> float:
        """The same of drafting one."""
        return self.rate * self.draft_ms.get(drafter, 0.0) / self.n_slots

    # -- what is learnt

    def end_step(self, n_tokens: int, target_ms: float, wall_ms: float, n_gained: int) -> None:
        """A step of only decoding slots is over: its batch size, its times, the tokens that it yielded."""
        self.costs.observe(n_tokens, target_ms)
        self.guard.observe(self.n_slots, n_tokens, n_gained, wall_ms)
        if wall_ms > 0.0:
            # A ratio of sums: the mean of the steps' own rates would make much of short steps.
            self._tokens = _RATE_FADE * self._tokens + n_gained / self.n_slots
            one = self.costs.ms(1)
            self._time = _RATE_FADE * self._time + wall_ms / one
            self.rate = self._tokens / (self._time * one)

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
        "_confidences",
        "_drafter",
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
        self._confidences, self._probabilities = list[float](), list[float]()
        return self._policy.opens(self._seq_id, self._calibration, drafter)

    def goes_on(self, confidence: float) -> bool:
        """A token was drafted with that confidence, 0 to 1: is another one worth drafting?"""
        self._probabilities.append(self._calibration.drafted(len(self._confidences), confidence))
        self._confidences.append(confidence)
        return self._policy.goes_on(self._probabilities, self._calibration, self._drafter)

    def chooses(self, drafter: str, confidences: Sequence[float]) -> int:
        """How many tokens of a draft that is there already, at no cost, are worth verifying."""
        calibration = self._calibrations[drafter]
        n = self._policy.choose([calibration.probability(i, c) for i, c in enumerate(confidences)])
        if n < len(confidences):
            calibration.passed(n, confidences[n])
        return n

    def keeps(self) -> int:
        """How many of the drafted tokens are worth verifying."""
        n = self._policy.cut(self._seq_id, self._probabilities, self._drafter)
        if n < len(self._confidences):
            self._calibration.passed(n, self._confidences[n])
        return n

    def spent(self, n_steps: int, ms: float) -> None:
        """What drafting took, for all slots of the step together."""
        self._policy.drafted(self._drafter, n_steps, ms)
