"""What the steps just past took and yielded: the rate, and what verifying and drafting a token cost at that rate.

Learnt from every step of only decoding slots. Decides nothing, reads no clock and knows no llama.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from draft.step_costs import StepCosts, StepSum

# Plain steps that are learnt from together: more of fast ones, since each look costs as much as a good part of one.
_QUIET_STEPS, _MOST_QUIET = 16, 32
_QUIET_MS = 24.0
_OWN_MS = 0.3  # of a step with drafts, until it is known
_PRICES_FOR = 8  # steps that were learnt from; what they are made of moves by a hundredth in one
_RATE_FADE = 0.99  # of the sums behind the rate, per step


@dataclass(frozen=True, slots=True)
class Steps:
    """One step or some alike: their number, tokens in the batch, and of each the tokens gained and the time without
    what a change of the batch's size took."""

    n: int
    n_tokens: int
    n_gained: int
    ms: float


@dataclass(slots=True)
class Pace:
    """One engine's. A price is in tokens that a slot makes in the time."""

    costs: StepCosts = field(default_factory=StepCosts)
    # Of a drafted token, all slots together, by drafter; and what the first of a draft takes longer: behind a target
    # step its model's weights are in no cache.
    draft_ms: dict[str, float] = field(default_factory=dict)
    first_ms: dict[str, float] = field(default_factory=dict)
    rate: float = 0.0  # tokens per millisecond and slot
    n_slots: int = 1
    # Of a step, neither drafting nor in the target: without drafts, and with.
    own_ms: list[float] = field(default_factory=lambda: [0.0, _OWN_MS])
    _tokens: float = 0.0  # by slot, of the steps just past, as is the next
    _time: float = 0.0  # in steps over one token, so that a machine that slows down does not bend the rate
    _prices: list[float] = field(default_factory=list)  # see prices
    _prices_for: int = 0  # steps for which they hold
    _quiet: StepSum = field(default_factory=StepSum)  # plain steps behind plain ones
    _drafted_ms: float = 0.0  # in this step

    def begin_step(self, n_slots: int) -> bool:
        """True where the prices have changed."""
        self._drafted_ms = 0.0
        if n_slots != self.n_slots:
            self.n_slots, self._prices_for, self._quiet = max(1, n_slots), 0, StepSum()
        if self._prices_for > 0:
            return False
        self._prices, self._prices_for = [], _PRICES_FOR
        return True

    @property
    def has_drafted(self) -> bool:
        """Was anything drafted token by token in this step?"""
        return self._drafted_ms > 0.0

    # -- prices

    def prices(self, n_draft: int) -> list[float]:
        """[> n_draft] what verifying a draft of 0, 1, ... tokens costs a slot: the step takes longer for all slots, and
        all of them draft as much."""
        if len(self._prices) <= n_draft:
            curve = self.costs.curve(self.n_slots, max(32, n_draft))
            self._prices = (self.rate * (curve - curve[0])).tolist()
        return self._prices

    def draft_price(self, drafter: str, n_draft: int) -> float:
        """Of drafting n_draft tokens."""
        return self.rate * (self.first_ms.get(drafter, 0.0) + n_draft * self.draft_ms.get(drafter, 0.0))

    def price_of_more(self, drafter: str) -> float:
        """Of drafting one token more."""
        return self.rate * self.draft_ms.get(drafter, 0.0)

    def price_of_changes(self) -> float:
        """Of going to another number of tokens in the batch and back again."""
        return 2.0 * self.rate * self.costs.change_ms

    def price_of_detour(self) -> float:
        """Of a step with drafts among steps without, beside what its size takes."""
        return self.rate * (max(0.0, self.own_ms[1] - self.own_ms[0]) + self.costs.detour_ms)

    def price_of_drafting(self) -> float:
        """Of all that drafting took in this step, which every slot waits for."""
        return self.n_slots * self.rate * self._drafted_ms

    # -- what is learnt

    def drafted(self, drafter: str, n_steps: int, ms: float, last_ms: float, lag_ms: float = 0.0) -> None:
        """That drafter drafted n_steps tokens, one after the other, in `ms`, the last of them in `last_ms`; before that
        it read in `lag_ms` what it lacked of the text."""
        self._drafted_ms += ms + lag_ms
        if n_steps > 0:
            known = self.draft_ms.get(drafter)
            if known is None or n_steps > 1:
                self.draft_ms[drafter] = last_ms if known is None else known + 0.1 * (last_ms - known)
            first, extra = self.first_ms.get(drafter, 0.0), ms - n_steps * self.draft_ms[drafter]
            self.first_ms[drafter] = first + 0.1 * (max(0.0, extra) - first)

    def end_step(self, n_tokens: int, target_ms: float, wall_ms: float, n_gained: int) -> Steps | None:
        """A step is over: its batch size, its times, the tokens that it yielded.

        What was learnt from; None where that waits for more steps.
        """
        if n_tokens > self.n_slots or self.has_drafted or not self.costs.has_settled_at(n_tokens):
            return self._learn(1, n_tokens, target_ms, wall_ms, n_gained)
        quiet = self._quiet
        quiet.add(target_ms, wall_ms)
        if quiet.n < _QUIET_STEPS or (quiet.wall_ms < _QUIET_MS and quiet.n < _MOST_QUIET):
            return None
        self._quiet = StepSum()
        return self._learn(quiet.n, n_tokens, quiet.target_ms / quiet.n, quiet.wall_ms / quiet.n, n_gained)

    def end_quiet_step(self, target_ms: float, wall_ms: float) -> None:
        """A step without drafts is over behind which others of its kind follow: learnt with one of them."""
        self._quiet.add(target_ms, wall_ms)

    def _learn(self, n: int, n_tokens: int, target_ms: float, wall_ms: float, n_gained: int) -> Steps:
        self._prices_for -= n
        self.costs.observe(n_tokens, target_ms, n)
        own_ms = max(0.0, wall_ms - target_ms - self._drafted_ms)
        has_drafts = n_tokens > self.n_slots or self.has_drafted
        known = self.own_ms[has_drafts]
        # One slow step is no reason.
        self.own_ms[has_drafts] += (1.0 - 0.95**n) * min(own_ms - known, known + _OWN_MS)
        steps = Steps(n, n_tokens, n_gained, max(0.0, wall_ms - self.costs.extra_ms()))
        if wall_ms > 0.0 and target_ms > 0.0:
            # A ratio of sums: the mean of the steps' own rates would make much of short steps.
            fade, one = _RATE_FADE**n, self.costs.ms(1)
            self._tokens = fade * self._tokens + n * n_gained / self.n_slots
            self._time = fade * self._time + n * wall_ms / one
            self.rate = self._tokens / (self._time * one)
        return steps
