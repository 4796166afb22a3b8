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
from collections.abc import Sequence
from dataclasses import dataclass, field

from draft.calibration import Calibration
from draft.guard import LONGEST_BLOCK, DraftGuard
from draft.steady import SteadyLength
from draft.step_costs import StepCosts

_LOOK_AHEAD = 4  # tokens behind the next one
_TRY_SHARE = 0.003  # of the rate, that a slot may lose to drafts that do not pay
_MOST_SAVED = 0.2  # tokens, for such drafts
_MOST_FOR_LAG = 1.0  # tokens; a long lag must not make a try the last for thousands of rounds
_REST, _LONG_REST = 7, 31  # rounds; nothing that the answer depends on moves far in them
_QUIET_STEPS = 8
_OWN_MS = 0.3  # of a step with drafts, until it is known
_LONG_DRAFT = 48  # tokens, of a drafter that copies text
_PRICES_FOR = 8  # steps; what they are made of moves by a hundredth in one
_RATE_FADE = 0.99  # of the sums behind the rate, per step
_TRY_TOKENS = 2  # length of a draft of which nothing is known
_STEADY_TRY, _FIRST_TRIES = 4, 12  # tokens; tries
_DOUBT = 2.0  # drafts


@dataclass(slots=True)
class _Account:
    """What a slot may lose to drafts that do not seem to pay, in tokens: what they find pays for more of them."""

    saved: float = _MOST_SAVED
    is_try: bool = False
    rest: int = 0  # rounds for which the last answer, no, holds
    value: float = 0.0  # tokens a round that its drafts made token by token were last expected to bring

    def add(self, tokens: float) -> None:
        self.saved = min(_MOST_SAVED, self.saved + tokens)


@dataclass(slots=True)
class _Quiet:
    """Steps in which nobody thought of drafting: they are learnt from together, as their mean."""

    n: int = 0
    target_ms: float = 0.0
    wall_ms: float = 0.0


@dataclass(slots=True)
class LengthPolicy:
    """The rule for one engine. `begin_step` opens a step; drafters ask it for each slot in it."""

    costs: StepCosts = field(default_factory=StepCosts)
    # Of a drafted token, all slots together, by drafter; and what the first of a draft takes longer: behind a target
    # step its model's weights are in no cache.
    draft_ms: dict[str, float] = field(default_factory=dict)
    first_ms: dict[str, float] = field(default_factory=dict)
    rate: float = 0.0  # tokens per millisecond and slot, of the rounds just past
    n_slots: int = 1
    guard: DraftGuard = field(default_factory=DraftGuard)
    _tokens: float = 0.0  # by slot, of the steps just past, as is the next
    _time: float = 0.0  # in steps over one token, so that a machine that slows down does not bend the rate
    _is_allowed: bool = True
    _accounts: dict[int, _Account] = field(default_factory=lambda: defaultdict(_Account))
    _prices: list[float] = field(default_factory=list)  # see _price
    _prices_for: int = 0  # steps for which they hold
    _n_resting: int = 0  # slots in this step
    _quiet: _Quiet = field(default_factory=_Quiet)
    steady: SteadyLength = field(default_factory=SteadyLength)
    _is_steady: bool = False
    _first_tries: int = _FIRST_TRIES
    _has_free: bool = False  # does some drafter draft at no cost?
    _free_rests: bool = False  # no such draft can pay at present
    _drafting: dict[int, tuple[Calibration, str]] = field(
        default_factory=dict
    )  # who asked since it was chosen
    _drafted_ms: float = 0.0  # in this step, as is the next
    _lag_ms: float = 0.0
    # Of a step, neither drafting nor in the target: without drafts, and with.
    _own_ms: list[float] = field(default_factory=lambda: [0.0, _OWN_MS])

    def begin(self, seq_id: int) -> None:
        """A request begins in that slot; not every drafter need take part in it."""
        self._accounts[seq_id].value = 0.0

    def begin_step(self, n_slots: int) -> None:
        self._prices_for -= 1
        if n_slots != self.n_slots:
            self.n_slots, self._prices_for, self._quiet = max(1, n_slots), 0, _Quiet()
        if self._prices_for <= 0:
            self._refresh()
        self._n_resting = 0
        self._lag_ms = 0.0
        self._is_allowed = self.guard.allows(self.n_slots)
        if self._is_steady and self._is_allowed and self.steady.is_due(self.n_slots):
            self._choose_steady()

    def _refresh(self) -> None:
        self._prices, self._prices_for = [], _PRICES_FOR
        self._is_steady = SteadyLength.is_wanted(self.costs.change_ms, self.costs.ms(1))
        if self._is_steady:
            self.guard.shortest_block = LONGEST_BLOCK  # each block without drafts is two changes
        self._free_rests = self._is_steady and self.rate > 0.0 and not self._free_may_pay()

    def _free_may_pay(self) -> bool:
        """Could a draft of text alone pay for the change to its length if all of it stood?"""
        price, changes = self._price(_LONG_DRAFT), self._price_of_changes()
        return any(
            k > self.n_slots * (price[k] - price[self.steady.n] + changes)
            for k in (_LONG_DRAFT // 4, _LONG_DRAFT // 2, _LONG_DRAFT)
        )

    def _price_of_changes(self) -> float:
        """What it costs a slot to go to another length and back again."""
        return 2.0 * self.rate * self.costs.change_ms

    def _choose_steady(self) -> None:
        names = {name for _, name in self._drafting.values()}
        draft_ms = max((self.draft_ms.get(name, 0.0) for name in names), default=0.0)
        first_ms = max((self.first_ms.get(name, 0.0) for name in names), default=0.0)
        chances = [_sure_chances(calibration) for calibration, _ in self._drafting.values()]
        ms = self.costs.curve(self.n_slots, SteadyLength.longest)
        ms[0] += self._own_ms[0]
        ms[1:] += self._own_ms[1] + first_ms
        self.steady.choose(self.n_slots, chances, ms, draft_ms, self.costs.change_ms)
        self._drafting.clear()

    def fill(self, longest: int) -> int:
        """To what length the drafts of this step are brought by tokens that nobody verifies; 0: as they are."""
        return self.steady.fill(longest) if self._is_steady and self._is_allowed else 0

    # -- a draft that is made token by token

    def rests(self, seq_id: int) -> bool:
        """Does the last no of `opens` still hold? Then nobody need ask, unless a draft may be had for nothing."""
        account = self._accounts[seq_id]
        if self._is_steady and self.steady.n and self._is_allowed:
            account.rest = 0
        if not account.rest:
            return False
        if self._has_free and not self._free_rests:
            return False
        account.rest -= 1
        account.add(_TRY_SHARE)
        self._n_resting += 1
        return True

    def opens(self, seq_id: int, calibration: Calibration, drafter: str) -> bool:
        """Is a draft worth beginning, or at least a try?"""
        account = self._accounts[seq_id]
        account.add(_TRY_SHARE)
        if account.rest:
            account.rest -= 1
            return False
        if self._is_allowed and self._is_worth_it(account, seq_id, calibration, drafter):
            return True
        account.rest = _LONG_REST if self._is_steady and self._is_allowed else _REST
        return False

    def _is_worth_it(self, account: _Account, seq_id: int, calibration: Calibration, drafter: str) -> bool:
        if self._is_steady:
            self._drafting[seq_id] = calibration, drafter
        if self.rate <= 0.0 or (self._is_steady and self.steady.n):
            return True
        account.value = 0.0 if self._is_steady else max(0.0, self._value_of_more([], calibration, drafter))
        account.is_try = account.value <= 0.0
        return not account.is_try or self._may_try(account, drafter)

    def _may_try(self, account: _Account, drafter: str) -> bool:
        if self._is_steady and self._first_tries:
            # What is learnt by a few drafts in the beginning would else take thousands of tokens.
            self._first_tries -= 1
            return True
        # The others wait for a slot that tries alone.
        return account.saved >= min(self.n_slots * self._draft_price(drafter, 1), _MOST_SAVED)

    def goes_on(self, probabilities: Sequence[float], calibration: Calibration, drafter: str) -> bool:
        """Draft one more token? `probabilities`, of those drafted: that each stands, given that all before it do."""
        if self.rate <= 0.0:
            return len(probabilities) < _TRY_TOKENS
        if self._is_steady:
            return len(probabilities) < (self.steady.n or _STEADY_TRY)
        return self._value_of_more(probabilities, calibration, drafter) > 0.0

    def cut(self, seq_id: int, probabilities: Sequence[float], drafter: str) -> int:
        """How many of the drafted tokens are worth verifying; drafting them is paid already."""
        if self.rate <= 0.0:
            return min(_TRY_TOKENS, len(probabilities))
        if self._is_steady and self.steady.n:
            return min(self.steady.n, len(probabilities))
        n, gain = self._best(probabilities)
        account = self._accounts[seq_id]
        if account.is_try:
            # Who rests reads what was said meanwhile: that is part of what a try costs, and of no later draft.
            price = self.n_slots * self._draft_price(drafter, len(probabilities))
            price += min(_MOST_FOR_LAG, self.n_slots * self.rate * self._lag_ms)
            # Where a try is not verified it brings nothing; one that looks good is followed by the next sooner.
            account.add((min(gain, 0.5 * price) if self._is_steady else gain) - price)
        return 0 if self._is_steady else n

    @property
    def drops_all(self) -> bool:
        """Is nothing verified of what is drafted in this step token by token?"""
        return self._is_steady and not self.steady.n and self.rate > 0.0

    def _value_of_more(self, probabilities: Sequence[float], calibration: Calibration, drafter: str) -> float:
        """Tokens to be won by drafting one more, its price taken off, against the best end so far.

        Its confidence is not known yet: for each that it may have, the best of all ways to go on, the tokens behind
        it standing with the mean probability, or of giving up; weighed with how often each comes.
        """
        n = len(probabilities)
        price = self._price(n + 1 + _LOOK_AHEAD)
        draft_price = self.rate * self.draft_ms.get(drafter, 0.0)
        p_all, won, best = 1.0, 0.0, 0.0
        for k, p in enumerate(probabilities, 1):
            p_all *= p
            won += p_all
            best = max(best, won - price[k])
        ways, stands, p_behind, p_later = [], 0.0, 1.0, _mean_chance(calibration, n + 1)
        for more in range(_LOOK_AHEAD + 1):
            stands += p_behind
            p_behind *= p_later
            ways.append((p_all * stands, price[n + 1 + more] + more * draft_price))
        value = -self._draft_price(drafter, 1) if n == 0 else -draft_price
        for share, p in zip(*calibration.outlook(n), strict=True):
            gain = won - best + max([p * gained - spent for gained, spent in ways])
            if gain > 0.0:
                value += share * gain
        return value

    # -- a draft that is there at once

    def choose(self, seq_id: int, probabilities: Sequence[float]) -> int:
        """How many tokens of a draft that costs nothing are worth verifying; nobody asked `opens` about it. None, where
        a drafter that is asked later has more to give."""
        self._has_free = True
        if not self._is_allowed:
            return 0
        if self.rate <= 0.0:
            return min(_TRY_TOKENS, len(probabilities))
        if self._is_steady:
            return self._best_of_steady(probabilities)
        n, gain = self._best(probabilities)
        return n if gain > self._accounts[seq_id].value else 0

    def _best_of_steady(self, probabilities: Sequence[float]) -> int:
        """The same where another number of tokens than before makes steps slow, against what the steady length has
        to give."""
        usual, filled = self.steady.n, self.steady.filled
        price = self._price(max(len(probabilities), filled))
        changes = self._price_of_changes()
        p_all, won, best, best_gain = 1.0, 0.0, 0, 0.0
        for k, p in enumerate(probabilities, 1):
            p_all *= p
            won += p_all
            spent = changes + price[k] if k > filled else price[filled] if k > usual else price[usual]
            gain = won - self.n_slots * (spent - price[usual]) - self.steady.gain
            if gain > best_gain:
                best, best_gain = k, gain
        return best

    def _best(self, probabilities: Sequence[float]) -> tuple[int, float]:
        """The number of tokens with the best gain, and that; 0 and 0 where none has one."""
        price = self._price(len(probabilities))
        p_all, won, best, best_gain = 1.0, 0.0, 0, 0.0
        for k, p in enumerate(probabilities, 1):
            p_all *= p
            won += p_all
            if won - price[k] > best_gain:
                best, best_gain = k, won - price[k]
        return best, best_gain

    def _price(self, n_draft: int) -> list[float]:
        """[> n_draft] what verifying a draft of 0, 1, ... tokens costs a slot, in tokens: the step takes longer for all
        slots, and all of them draft as much."""
        if len(self._prices) <= n_draft:
            curve = self.costs.curve(self.n_slots, max(32, n_draft))
            self._prices = (self.rate * (curve - curve[0])).tolist()
        return self._prices

    def _draft_price(self, drafter: str, n_draft: int) -> float:
        """The same of drafting them."""
        return self.rate * (self.first_ms.get(drafter, 0.0) + n_draft * self.draft_ms.get(drafter, 0.0))

    # -- what is learnt

    def end_step(self, n_tokens: int, target_ms: float, wall_ms: float, n_gained: int) -> None:
        """A step of only decoding slots is over: its batch size, its times, the tokens that it yielded."""
        if self._n_resting == n_tokens == self.n_slots:
            quiet = self._quiet
            quiet.n += 1
            quiet.target_ms += target_ms
            quiet.wall_ms += wall_ms
            if quiet.n == _QUIET_STEPS:
                self._quiet = _Quiet()
                self._learn(n_tokens, quiet.target_ms / quiet.n, quiet.wall_ms / quiet.n, n_gained, quiet.n)
        else:
            self._learn(n_tokens, target_ms, wall_ms, n_gained, 1)

    def _learn(self, n_tokens: int, target_ms: float, wall_ms: float, n_gained: int, n_steps: int) -> None:
        self.costs.observe(n_tokens, target_ms)
        own_ms = max(0.0, wall_ms - target_ms - self._drafted_ms)
        has_drafts = n_tokens > self.n_slots or self._drafted_ms > 0.0
        known = self._own_ms[has_drafts]
        self._own_ms[has_drafts] += 0.05 * min(own_ms - known, known + _OWN_MS)  # one slow step is no reason
        self._drafted_ms = 0.0
        settled_ms = max(0.0, wall_ms - self.costs.extra_ms())
        self.guard.observe(
            self.n_slots,
            n_tokens,
            n_steps * n_gained,
            n_steps * settled_ms,
            is_settled=self.costs.is_settled,
        )
        if wall_ms > 0.0 and target_ms > 0.0:
            # A ratio of sums: the mean of the steps' own rates would make much of short steps.
            fade, one = _RATE_FADE**n_steps, self.costs.ms(1)
            self._tokens = fade * self._tokens + n_steps * n_gained / self.n_slots
            self._time = fade * self._time + n_steps * wall_ms / one
            self.rate = self._tokens / (self._time * one)

    def drafted(self, drafter: str, n_steps: int, ms: float, last_ms: float, lag_ms: float = 0.0) -> None:
        """That drafter drafted n_steps tokens, one after the other, in `ms`, the last of them in `last_ms`; before that
        it read in `lag_ms` what it lacked of the text."""
        if n_steps > 0:
            self._drafted_ms += ms + lag_ms
            self._lag_ms = lag_ms
            known = self.draft_ms.get(drafter)
            if known is None or n_steps > 1:
                self.draft_ms[drafter] = last_ms if known is None else known + 0.1 * (last_ms - known)
            first, extra = self.first_ms.get(drafter, 0.0), ms - n_steps * self.draft_ms[drafter]
            self.first_ms[drafter] = first + 0.1 * (max(0.0, extra) - first)


def _sure_chances(calibration: Calibration) -> list[float]:
    """By position, the first one lower the less is known: a length is not changed on the word of a few drafts."""
    chances = [_mean_chance(calibration, i) for i in range(4)]
    n = calibration.n_drawn
    chances[0] *= n / (n + _DOUBT)
    return chances


def _mean_chance(calibration: Calibration, position: int) -> float:
    return sum(share * p for share, p in zip(*calibration.outlook(position), strict=True))
