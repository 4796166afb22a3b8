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
from draft.pace import Pace
from draft.quiet import QuietSteps
from draft.steady import SteadyLength

_LOOK_AHEAD = 4  # tokens behind the next one
_TRY_SHARE = 0.003  # of the rate, that a slot may lose to drafts that do not pay
_MOST_SAVED = 0.2  # tokens, for such drafts
_MOST_EXTRA = 4.0  # tokens; one slow try must not be the last for thousands of rounds
_REST, _FAR_REST, _LONG_REST = 7, 31, 127  # rounds; nothing that the answer depends on moves far in them
_FAR = 0.5  # of a draft's price, that it is short of
_LONG_DRAFT = 48  # tokens, of a drafter that copies text
_TRY_TOKENS = 2  # length of a draft of which nothing is known
_STEADY_TRY, _FIRST_TRIES = 4, 12  # tokens; tries
_DOUBT = 2.0  # drafts


@dataclass(slots=True)
class _Account:
    """What a slot may lose to drafts that do not seem to pay, in tokens: what they find pays for more of them."""

    saved: float = _MOST_SAVED
    is_try: bool = False
    rest: int = 0  # rounds for which the last answer, no, holds
    is_resting: bool = False  # in this round
    value: float = 0.0  # tokens a round that its drafts made token by token were last expected to bring

    def add(self, tokens: float) -> None:
        self.saved = min(_MOST_SAVED, self.saved + tokens)


@dataclass(slots=True)
class LengthPolicy:
    """The rule for one engine. `begin_step` opens a step; drafters ask it for each slot in it."""

    pace: Pace = field(default_factory=Pace)
    guard: DraftGuard = field(default_factory=DraftGuard)
    quiet: QuietSteps = field(default_factory=QuietSteps)
    _is_allowed: bool = True
    _accounts: dict[int, _Account] = field(default_factory=lambda: defaultdict(_Account))
    steady: SteadyLength = field(default_factory=SteadyLength)
    _is_steady: bool = False
    _first_tries: int = _FIRST_TRIES
    free_rests: bool = False  # no draft that is there at once can pay at present, whatever it is
    _drafting: dict[int, tuple[Calibration, str]] = field(
        default_factory=dict
    )  # who asked since it was chosen

    def begin(self, seq_id: int) -> None:
        """A request begins in that slot; not every drafter need take part in it."""
        account = self._accounts[seq_id]
        account.value, account.rest = 0.0, 0
        self.quiet.request_begins()

    def begin_step(self, n_slots: int) -> None:
        if self.pace.begin_step(n_slots):
            self._refresh()
        self._is_allowed = self.guard.allows(self.pace.n_slots)
        if self._is_steady and self._is_allowed and self.steady.is_due(self.pace.n_slots):
            self._choose_steady()

    def _refresh(self) -> None:
        pace = self.pace
        self._is_steady = SteadyLength.is_wanted(pace.costs.change_ms, pace.costs.ms(1))
        if self._is_steady:
            self.guard.shortest_block = LONGEST_BLOCK  # each block without drafts is two changes
        self.free_rests = self._is_steady and pace.rate > 0.0 and not self._free_may_pay()

    def _free_may_pay(self) -> bool:
        """Could a draft of text alone pay for the change to its length if all of it stood?"""
        pace = self.pace
        n, changes = pace.n_slots, pace.price_of_changes()
        usual_ms = pace.costs.ms(n * (1 + self.steady.n))
        return any(
            k > n * (pace.rate * (pace.costs.ms(n * (1 + k)) - usual_ms) + changes)
            for k in (_LONG_DRAFT // 4, _LONG_DRAFT // 2, _LONG_DRAFT)
        )

    def _choose_steady(self) -> None:
        pace = self.pace
        if not self._drafting:
            self.steady.nobody_asked(pace.n_slots)
            return
        names = {name for _, name in self._drafting.values()}
        draft_ms = max((pace.draft_ms.get(name, 0.0) for name in names), default=0.0)
        first_ms = max((pace.first_ms.get(name, 0.0) for name in names), default=0.0)
        chances = [_sure_chances(calibration) for calibration, _ in self._drafting.values()]
        ms = pace.costs.curve(pace.n_slots, SteadyLength.longest)
        ms[0] += pace.own_ms[0]
        ms[1:] += pace.own_ms[1] + first_ms
        self.steady.choose(pace.n_slots, chances, ms, draft_ms, pace.costs.change_ms)
        self._drafting.clear()

    def fill(self, longest: int) -> int:
        """To what length the drafts of this step are brought by tokens that nobody verifies; 0: as they are."""
        return self.steady.fill(longest) if self._is_steady and self._is_allowed else 0

    # -- a draft that is made token by token

    def rests(self, seq_id: int) -> bool:
        """Once in a step: does the last no of `opens` still hold? Then only who drafts at no cost need be asked."""
        account = self._accounts[seq_id]
        if self._is_steady and self.steady.n and self._is_allowed:
            account.rest = 0
        account.is_resting = account.rest > 0
        if account.is_resting:
            account.rest -= 1
            account.add(_TRY_SHARE)
        return account.is_resting

    def may_be_quiet(self, seq_ids: Sequence[int]) -> int:
        """Nobody has a draft in this step: before how many of the next ones need nobody be asked?"""
        n = self.quiet.in_vain()
        if self.pace.has_drafted or not self.pace.costs.has_settled_at(len(seq_ids)):
            return 0
        for seq_id in seq_ids:
            account = self._accounts[seq_id]
            # Without a rest nobody who drafts token by token was asked at all.
            n = min(n, account.rest if account.is_resting or account.rest else _REST)
        return n

    def be_quiet(self, seq_ids: Sequence[int], n_steps: int) -> None:
        """Nobody will be asked before the next n_steps steps; who rests, rests in them."""
        self.quiet.begin(n_steps)
        for seq_id in seq_ids:
            account = self._accounts[seq_id]
            account.rest = max(0, account.rest - n_steps)
            account.add(n_steps * _TRY_SHARE)

    def interrupted(self) -> None:
        """A step of another kind is over."""
        self.pace.costs.interrupted()
        self.quiet.interrupted()

    def opens(self, seq_id: int, calibration: Calibration, drafter: str) -> bool:
        """Is a draft worth beginning, or at least a try?"""
        account = self._accounts[seq_id]
        if account.is_resting:
            return False
        account.add(_TRY_SHARE)
        if self._is_allowed and self._is_worth_it(account, seq_id, calibration, drafter):
            return True
        rest = self._rest(account, drafter)
        account.rest = min(account.rest, rest) if account.rest else rest
        return False

    def _rest(self, account: _Account, drafter: str) -> int:
        """How many rounds a no holds. What is far from paying will not pay soon: until then there are tries only."""
        if not self._is_allowed:
            return _REST
        if self._is_steady:
            return _LONG_REST
        price = self.pace.draft_price(drafter, 1)
        if account.value > -_FAR * price:
            return _REST
        return max(_REST, min(_FAR_REST, int((self._try_price(drafter) - account.saved) / _TRY_SHARE)))

    def _is_worth_it(self, account: _Account, seq_id: int, calibration: Calibration, drafter: str) -> bool:
        if self._is_steady:
            self._drafting[seq_id] = calibration, drafter
        if self.pace.rate <= 0.0 or (self._is_steady and self.steady.n):
            return True
        account.value = 0.0 if self._is_steady else self._value_of_more([], calibration, drafter)
        account.is_try = account.value <= 0.0
        return not account.is_try or self._may_try(account, drafter)

    def _may_try(self, account: _Account, drafter: str) -> bool:
        if self._is_steady and self._first_tries:
            # What is learnt by a few drafts in the beginning would else take thousands of tokens.
            self._first_tries -= 1
            return True
        return account.saved >= self._try_price(drafter)

    def _try_price(self, drafter: str) -> float:
        """In tokens. The others wait for a slot that tries alone."""
        return min(self.pace.n_slots * self.pace.draft_price(drafter, 1), _MOST_SAVED)

    def goes_on(self, probabilities: Sequence[float], calibration: Calibration, drafter: str) -> bool:
        """Draft one more token? `probabilities`, of those drafted: that each stands, given that all before it do."""
        if self.pace.rate <= 0.0:
            return len(probabilities) < _TRY_TOKENS
        if self._is_steady:
            return len(probabilities) < (self.steady.n or _STEADY_TRY)
        return self._value_of_more(probabilities, calibration, drafter) > 0.0

    def cut(self, seq_id: int, probabilities: Sequence[float], drafter: str) -> int:
        """How many of the drafted tokens are worth verifying; drafting them is paid already."""
        if self.pace.rate <= 0.0:
            return min(_TRY_TOKENS, len(probabilities))
        if self._is_steady and self.steady.n:
            return min(self.steady.n, len(probabilities))
        n, gain = self._best(probabilities)
        account = self._accounts[seq_id]
        if account.is_try:
            # Who rests reads what was said meanwhile, and what was not used for long is slow: that is part of what a
            # try costs, and of no later draft.
            price = self.pace.n_slots * self.pace.draft_price(drafter, len(probabilities))
            price += max(0.0, min(_MOST_EXTRA, self.pace.price_of_drafting() - price))
            # Where a try is not verified it brings nothing; one that looks good is followed by the next sooner.
            account.add((min(gain, 0.5 * price) if self._is_steady else gain) - price)
        return 0 if self._is_steady else n

    @property
    def drops_all(self) -> bool:
        """Is nothing verified of what is drafted in this step token by token?"""
        return self._is_steady and not self.steady.n and self.pace.rate > 0.0

    def _value_of_more(self, probabilities: Sequence[float], calibration: Calibration, drafter: str) -> float:
        """Tokens to be won by drafting one more, its price taken off, against the best end so far.

        Its confidence is not known yet: for each that it may have, the best of all ways to go on, the tokens behind
        it standing with the mean probability, or of giving up; weighed with how often each comes.
        """
        n = len(probabilities)
        price = self.pace.prices(n + 1 + _LOOK_AHEAD)
        draft_price = self.pace.price_of_more(drafter)
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
        value = -self.pace.draft_price(drafter, 1) if n == 0 else -draft_price
        for share, p in zip(*calibration.outlook(n), strict=True):
            gain = won - best + max([p * gained - spent for gained, spent in ways])
            if gain > 0.0:
                value += share * gain
        return value

    # -- a draft that is there at once

    def choose(self, seq_id: int, probabilities: Sequence[float]) -> int:
        """How many tokens of a draft that costs nothing are worth verifying; nobody asked `opens` about it. None, where
        a drafter that is asked later has more to give."""
        if not self._is_allowed:
            return 0
        if self.pace.rate <= 0.0:
            return min(_TRY_TOKENS, len(probabilities))
        if self._is_steady:
            return self._best_of_steady(probabilities)
        n, gain = self._best(probabilities)
        # Where nothing else drafts this step is the only one of its kind, and costs more than its tokens do.
        value = self._accounts[seq_id].value
        return n if gain > (value if value > 0.0 else self.pace.price_of_detour()) else 0

    def _best_of_steady(self, probabilities: Sequence[float]) -> int:
        """The same where another number of tokens than before makes steps slow, against what the steady length has
        to give."""
        usual, filled = self.steady.n, self.steady.filled
        price = self.pace.prices(max(len(probabilities), filled))
        changes = self.pace.price_of_changes()
        p_all, won, best, best_gain = 1.0, 0.0, 0, 0.0
        for k, p in enumerate(probabilities, 1):
            p_all *= p
            won += p_all
            spent = changes + price[k] if k > filled else price[filled] if k > usual else price[usual]
            gain = won - self.pace.n_slots * (spent - price[usual]) - self.steady.gain
            if gain > best_gain:
                best, best_gain = k, gain
        return best

    def _best(self, probabilities: Sequence[float]) -> tuple[int, float]:
        """The number of tokens with the best gain, and that; 0 and 0 where none has one."""
        price = self.pace.prices(len(probabilities))
        p_all, won, best, best_gain = 1.0, 0.0, 0, 0.0
        for k, p in enumerate(probabilities, 1):
            p_all *= p
            won += p_all
            if won - price[k] > best_gain:
                best, best_gain = k, won - price[k]
        return best, best_gain

    # -- what is learnt

    def end_step(self, n_tokens: int, target_ms: float, wall_ms: float, n_gained: int) -> None:
        """A step of only decoding slots is over: its batch size, its times, the tokens that it yielded."""
        pace = self.pace
        if self.quiet.is_on:
            pace.end_quiet_step(target_ms, wall_ms)
            return
        learnt = pace.end_step(n_tokens, target_ms, wall_ms, n_gained)
        if learnt is not None:
            self.guard.observe(
                pace.n_slots,
                learnt.n_tokens,
                learnt.n * learnt.n_gained,
                learnt.n * learnt.ms,
                n_steps=learnt.n,
                is_settled=pace.costs.is_settled,
            )


def _sure_chances(calibration: Calibration) -> list[float]:
    """By position, the first one lower the less is known: a length is not changed on the word of a few drafts."""
    chances = [_mean_chance(calibration, i) for i in range(4)]
    n = calibration.n_drawn
    chances[0] *= n / (n + _DOUBT)
    return chances


def _mean_chance(calibration: Calibration, position: int) -> float:
    return sum(share * p for share, p in zip(*calibration.outlook(position), strict=True))
