"""The thread rule against simulated machines: costs are drawn, nothing is timed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from spec_server.engine.threads import ThreadControl, ThreadTuner


def run(
    cost: Callable[[int, float], float], seconds: float, n_max: int = 2, seed: int = 0
) -> tuple[float, list[int]]:
    """Mean step time, and the threads of every step; `cost(n_threads, t)` gives milliseconds."""
    tuner, rng = ThreadTuner(n_max), random.Random(seed)
    t, threads = 0.0, []
    while t < seconds * 1e3:
        threads.append(tuner.n_now)
        ms = cost(tuner.n_now, t / 1e3) * (1 + 0.1 * rng.random())
        t += ms
        tuner.observe(ms, ms)
    return t / len(threads), threads


@pytest.mark.parametrize("sizes", [(1,), (1, 2, 3, 4, 5), (8, 8, 8, 3)])
def test_steps_of_any_size_tell_when_a_core_is_gone_and_back(sizes: tuple[int, ...]) -> None:
    threads = [2]
    control = ThreadControl(2, [threads.append])
    t = 0.0
    seen: dict[str, list[int]] = {"before": [], "busy": [], "after": []}
    while t < 40e3:
        when = "before" if t < 5e3 else "busy" if t < 20e3 else "after"
        n_tokens = sizes[len(seen[when]) % len(sizes)]
        one = 15.0 if threads[-1] == 1 else 24.0 if when == "busy" else 8.0
        ms = one * (1 + 0.5 * (n_tokens - 1))
        t += ms
        control.after_step(n_tokens, ms, ms)
        seen[when].append(control.n_threads)
        assert control.n_threads == threads[-1]
    assert seen["before"].count(1) < 0.05 * len(seen["before"])
    assert seen["busy"].count(1) > 0.7 * len(seen["busy"])
    assert seen["after"].count(2) > 0.7 * len(seen["after"])
    assert seen["after"][-1] == 2


def test_alone_the_threads_stay_what_they_were() -> None:
    mean, threads = run(lambda n, t: 16.0 / n, 120)
    assert threads.count(2) > 0.995 * len(threads)
    assert mean < 1.005 * run(lambda n, t: 8.0, 120)[0]


@pytest.mark.parametrize("step_ms", [2.0, 8.0, 50.0, 120.0])
@pytest.mark.parametrize("slower", [1.0, 4.0])
def test_trials_that_fail_cost_little_however_long_a_step_is(step_ms: float, slower: float) -> None:
    """Half the threads take twice as long, and from the third second on, say by a long context, all of them more.
    The first trial of a kind, which comes soon, is not counted."""

    def lost(seconds: float) -> float:
        def cost(n: int, t: float) -> float:
            return 2.0 * step_ms / n * (slower if t > 3.0 else 1.0)

        return (run(cost, seconds)[1].count(1) - 4) * step_ms * slower

    for seconds in (10.0, 30.0, 120.0):
        assert lost(seconds) < 0.025 * seconds * 1e3, seconds


def test_a_long_context_that_slows_every_step_alike_costs_little() -> None:
    mean, threads = run(lambda n, t: (1 + t / 60) * 16.0 / n, 120)
    fixed, _ = run(lambda n, t: (1 + t / 60) * 8.0, 120)
    assert mean < 1.02 * fixed
    assert threads.count(2) > 0.97 * len(threads)


def test_with_a_core_taken_away_one_thread_takes_over_and_two_come_back() -> None:
    def cost(n: int, t: float) -> float:
        busy = 5 <= t < 25
        return (24.0 if busy else 8.0) if n == 2 else 15.0

    mean, threads = run(cost, 60)
    assert threads[-1] == 2
    assert threads.count(1) > 1000 / 15
    one, two = run(lambda n, t: cost(1, t), 60)[0], run(lambda n, t: cost(2, t), 60)[0]
    assert mean < 0.95 * min(one, two)
    assert mean < 1.03 * run(lambda n, t: min(cost(1, t), cost(2, t)), 60)[0]


def test_a_core_that_was_taken_before_the_start_is_noticed() -> None:
    """Nothing was ever faster: that steps are slow shows only in comparison."""
    mean, threads = run(lambda n, t: 24.0 if n == 2 else 15.0, 10)
    assert threads.count(1) > 0.8 * len(threads)
    assert mean < 16.5


@pytest.mark.parametrize("n_max", [1, 2, 8])
def test_the_number_stays_within_its_bounds(n_max: int) -> None:
    rng = random.Random(1)
    _, threads = run(lambda n, t: 8.0 * rng.choice((1, 1, 3)), 60, n_max)
    assert min(threads) >= 1
    assert max(threads) <= n_max


@pytest.mark.parametrize("step_ms", [8.0, 30.0, 100.0])
def test_cores_that_are_taken_one_after_the_other_are_all_noticed(step_ms: float) -> None:
    """Two threads are best of three with one core gone, one with two gone; trials of three go on meanwhile."""

    def cost(n: int, t: float) -> float:
        by_threads = (3.0, 1.5, 1.0) if t < 5 else (3.0, 1.5, 2.2) if t < 60 else (3.0, 4.5, 6.0)
        return step_ms * by_threads[n - 1]

    _, threads = run(cost, 180, n_max=3)
    assert threads[-200:].count(1) > 0.8 * 200


def test_a_stop_of_the_process_in_a_trial_is_not_what_the_trial_cost() -> None:
    tuner = ThreadTuner(2)
    while not tuner.is_trying:
        tuner.observe(8.0, 8.0)
    tuner.observe(16.0, 180e3)
    steps = 0
    while tuner.is_trying or tuner.n_now == 2:
        n_threads = tuner.n_now
        ms = 15.0 if n_threads == 1 else 24.0
        tuner.observe(ms, ms)
        steps += not tuner.is_trying
        assert steps < 200
