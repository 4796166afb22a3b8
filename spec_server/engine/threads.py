"""How many threads llama gets while the machine is shared; reads no clock.

llama's workers wait for each other at every barrier, so that one core taken by somebody else slows all of them. When
steps stay slow for long, fewer threads are tried for a few steps and kept where they are faster; later one more is
tried again. Steps that were always slow look like steps that are not, so fewer are also tried now and then unasked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draft.step_costs import StepCosts, StepSum

_KEPT = 0.85  # of the mean cost, by a step
_SLOW = 1.3  # times the usual cost of a step
_SLOW_FOR_MS = 700.0
_TRIAL_STEPS = 6
_TOGETHER_MS = 50.0  # of steps over the same number of tokens that count as their mean, outside a trial
_BETTER = 0.95  # of the cost before the trial
_HOPELESS = 1.1  # of the cost before: a trial that begins so is over
_FIRST_WAIT_MS, _LAST_WAIT_MS = 700.0, 3_000.0
_FIRST_LOOK_MS, _LAST_LOOK_MS = 500.0, 30_000.0  # between trials of fewer threads without a reason
_TRIAL_COST = 0.02  # of the time: what trials of fewer threads that fail may take away, the first left out
_LONGEST_PAUSE_MS = 30_000.0
_LEAST_STEPS = 12.0  # before a trial of one thread instead of two; the more there are, the less it costs


@dataclass(slots=True)
class ThreadTuner:
    """`observe` the steps without prompt tokens; it returns the number of threads for the next one."""

    n_max: int
    n_now: int = 0
    _usual: dict[int, float] = field(default_factory=dict)  # cost of a step in its best times, by threads
    _cost: float = 0.0
    _slow_ms: float = 0.0
    _waited_ms: float = 0.0
    _wait_ms: float = _FIRST_WAIT_MS
    _look_ms: float = _FIRST_LOOK_MS
    _is_look: bool = False  # is the trial one of those?
    _trial_from: int = 0  # threads before the trial, 0 outside one
    _trial: list[float] = field(default_factory=list)
    _trial_step_ms: float = 0.0  # its shortest step, on the clock
    # Since the last trial of fewer threads; trials of more, which may come every few seconds, do not begin it anew.
    _pause_ms: float = 0.0  # for what that trial cost
    _paused_ms: float = 0.0
    _n_paused: int = 0

    def __post_init__(self) -> None:
        self.n_now = self.n_now or self.n_max

    @property
    def is_trying(self) -> bool:
        """Every step is to be observed alone."""
        return self._trial_from > 0

    def observe(self, cost: float, ms: float, n_steps: int = 1) -> int:
        """`cost`: milliseconds of a step as if it had one token; `ms`: what n_steps of them took on the clock."""
        if self._trial_from:
            self._trial.append(cost)
            self._trial_step_ms = min(self._trial_step_ms or ms, ms)
            if len(self._trial) >= _TRIAL_STEPS or self._is_hopeless():
                self._end_trial()
            return self.n_now
        weight = 1.0 - _KEPT**n_steps
        self._cost = cost if self._cost <= 0.0 else self._cost + weight * (cost - self._cost)
        usual = self._usual.get(self.n_now, self._cost)
        # Best times fade, since a longer context makes every step dearer.
        self._usual[self.n_now] = min(self._cost, usual * (1.0 + 1e-4 * ms / 10.0))
        self._waited_ms += ms
        self._paused_ms += ms
        self._n_paused += n_steps
        self._slow_ms = self._slow_ms + ms if self._cost > _SLOW * usual else 0.0
        may_go_down = (
            self.n_now > 1
            and self._n_paused >= _LEAST_STEPS / (self.n_now - 1)
            and self._paused_ms >= self._pause_ms
        )
        if may_go_down and self._slow_ms >= _SLOW_FOR_MS and self._waited_ms >= self._wait_down_ms():
            self._begin_trial(self.n_now - 1)
        elif self.n_now < self.n_max and self._waited_ms >= self._wait_ms:
            self._begin_trial(self.n_now + 1)
        elif may_go_down and self._waited_ms >= self._look_ms:
            self._begin_trial(self.n_now - 1)
            self._is_look = True
        return self.n_now

    def _is_hopeless(self) -> bool:
        return len(self._trial) == 2 and min(self._trial) > _HOPELESS * self._cost

    def _wait_down_ms(self) -> float:
        """Trials downwards wait as well after one that failed."""
        return 0.0 if self._wait_ms <= _FIRST_WAIT_MS else self._wait_ms

    def _begin_trial(self, n_threads: int) -> None:
        self._trial_from, self.n_now = self.n_now, n_threads
        self._trial.clear()
        self._trial_step_ms = 0.0

    def _end_trial(self) -> None:
        """The median of the trial, its first step left out, against what was before."""
        tried = sorted(self._trial[1:])[len(self._trial[1:]) // 2]
        if self.n_now < self._trial_from:
            self._pause_ms = min(self._lost_ms(tried) / _TRIAL_COST, _LONGEST_PAUSE_MS)
            self._paused_ms, self._n_paused = 0.0, 0
        if tried < _BETTER * self._cost:
            self._cost, self._wait_ms, self._look_ms = tried, _FIRST_WAIT_MS, _FIRST_LOOK_MS
            self._pause_ms = 0.0
        else:
            self.n_now = self._trial_from
            if self._is_look:
                self._look_ms = min(2 * self._look_ms, _LAST_LOOK_MS)
            else:
                self._wait_ms = min(2 * self._wait_ms, _LAST_WAIT_MS)
        self._is_look = False
        self._trial_from, self._slow_ms, self._waited_ms = 0, 0.0, 0.0

    def _lost_ms(self, tried: float) -> float:
        """By a trial of fewer threads. What else made it slow, a stop of the process say, is no reason to wait."""
        if not 0.0 < self._cost < tried:
            return 0.0
        slower = min(tried / self._cost, self._trial_from / self.n_now)
        return len(self._trial) * self._trial_step_ms * (1.0 - 1.0 / slower)


class ThreadControl:
    """A tuner over all contexts. `set_threads` are the contexts' own."""

    def __init__(self, n_threads: int, set_threads: Sequence[Callable[[int], None]]) -> None:
        self._tuner = ThreadTuner(n_threads)
        self._costs = StepCosts()
        self._set_threads = set_threads
        self._n_tokens = 0  # of the steps that are looked at together next
        self._together = StepSum()

    @property
    def n_threads(self) -> int:
        return self._tuner.n_now

    def after_step(self, n_tokens: int, target_ms: float, wall_ms: float) -> None:
        """A step without prompt tokens is over."""
        if self._tuner.n_max == 1:
            return
        was_trying = self._tuner.is_trying
        if n_tokens != self._n_tokens:
            self._look()
            self._n_tokens = n_tokens
            if self._tuner.is_trying and not was_trying:
                return  # the step is older than the trial
        self._together.add(target_ms, wall_ms)
        if self._together.wall_ms >= _TOGETHER_MS or self._tuner.is_trying:
            self._look()

    def _look(self) -> None:
        steps = self._together
        if not steps.n:
            return
        self._together = StepSum()
        target_ms = steps.target_ms / steps.n
        self._costs.observe(self._n_tokens, target_ms, steps.n)
        before = self._tuner.n_now
        now = self._tuner.observe(self._costs.as_one(self._n_tokens, target_ms), steps.wall_ms, steps.n)
        if now != before:
            for set_threads in self._set_threads:
                set_threads(now)
