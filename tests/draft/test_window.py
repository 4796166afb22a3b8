"""The draft length rule against simulated machines and texts."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.calibration import Calibration
from draft.length import DraftLength
from draft.pace import Pace
from draft.step_costs import StepCosts
from draft.window import LengthPolicy
from tests.draft.simulation import MACHINES, WARM_UP, FakeGuard, Simulation, drafted, said


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.6, 0.8, 0.95])
def test_adaptive_length_is_near_the_best_fixed_one_and_never_slower_than_none(
    machine: str, acceptance: float
) -> None:
    seeds = range(3)
    simulations = [Simulation(MACHINES[machine], lambda i: acceptance, n_rounds=1500, seed=s) for s in seeds]
    fixed = [mean(s.fixed(k) for s in simulations) for k in range(9)]
    adaptive = mean(s.adaptive() for s in simulations)
    assert adaptive >= 0.98 * fixed[0]
    assert adaptive >= 0.95 * max(fixed)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("acceptance", [0.2, 0.8, 0.95, 0.985])
def test_of_a_draft_that_costs_nothing_as_much_is_verified_as_pays(machine: str, acceptance: float) -> None:
    """A passage that is copied: 48 tokens are there in every round, each stands with the same probability."""
    rng, cost = random.Random(1), MACHINES[machine]

    def play(choose: Callable[[int, int], int], learn: Callable[[int, int, float], None]) -> float:
        tokens, ms = 0, 0.0
        for _ in range(3000):
            n_stands = next((j for j in range(48) if rng.random() >= acceptance), 48)
            k = choose(tokens, n_stands)
            stood = min(k, n_stands)
            step = cost(1 + k) * (1 + 0.1 * rng.random())
            learn(k, stood, step)
            tokens, ms = tokens + 1 + stood, ms + step
        return tokens / ms

    policy, calibration = LengthPolicy(guard=FakeGuard()), Calibration()
    for n in (*WARM_UP, 32, 49) * 3:
        policy.pace.costs.observe(n, cost(n) * (1 + 0.1 * rng.random()))
    confidence = [0.9] * 48
    length = DraftLength(policy, {"": calibration}, 0)

    def choose(n_said: int, n_stands: int) -> int:
        policy.begin_step(1)
        length.read(said(n_said), 1)
        return length.chooses("", drafted(n_stands, 48), 0.9)

    def learn(k: int, stood: int, step: float) -> None:
        calibration.learn(confidence[:k], stood)
        policy.end_step(1 + k, step, step, 1 + stood)

    adaptive = play(choose, learn)
    fixed = [play(lambda *_, k=k: k, lambda *_: None) for k in (0, 1, 2, 4, 8, 16, 32, 48)]  # type: ignore[misc]
    assert adaptive >= 0.97 * fixed[0]
    assert adaptive >= 0.92 * max(fixed)


def test_the_rate_is_a_ratio_of_sums() -> None:
    policy = LengthPolicy(guard=FakeGuard())
    for _ in range(200):
        policy.begin_step(1)
        policy.end_step(1, 10.0, 10.0, 1)
        policy.end_step(33, 200.0, 200.0, 33)
    assert policy.pace.rate == pytest.approx(34 / 210, rel=0.02)


def test_drafting_comes_back_when_the_text_changes() -> None:
    simulation = Simulation(
        MACHINES["bound by arithmetic"], lambda i: 0.95 if (i // 1000) % 2 else 0.1, n_rounds=6000
    )
    off, best = simulation.fixed(0), max(simulation.fixed(k) for k in range(9))
    adaptive = simulation.adaptive()
    assert best < 1.01 * off  # no fixed length gains anything to speak of over both texts together
    assert adaptive > 1.03 * off


def test_where_nothing_is_accepted_drafts_become_rare() -> None:
    policy, calibration = LengthPolicy(Pace(rate=1 / 8, draft_ms={"": 0.4}), FakeGuard()), Calibration()
    length = DraftLength(policy, {"": calibration}, 0)
    for n in WARM_UP:
        policy.pace.costs.observe(n, 8.0 * n)
    n_drafts = 0
    for i in range(2000):
        policy.begin_step(1)
        length.read(said(i), 1)
        if not policy.rests(0) and length.opens(""):
            n_drafts += 1
            length.goes_on(0.5)
            if length.keeps(drafted(0, 1)):
                calibration.learn([0.5], 0)
    assert 20 <= n_drafts <= 160  # a draft costs 0.05 tokens, 0.003 a round may be lost


@pytest.mark.parametrize(
    ("draft_ms", "saved", "n_rounds"),
    [
        pytest.param(6.0, 0.0, 7, id="nearly pays"),
        pytest.param(16.0, 0.0, 31, id="far from paying"),
        pytest.param(16.0, 0.16, 13, id="far from paying, but a try is near"),
        pytest.param(16.0, 0.19, 7, id="a try is nearer still"),
    ],
)
def test_a_no_holds_longer_where_drafts_are_far_from_paying(
    draft_ms: float, saved: float, n_rounds: int
) -> None:
    """Steps of 8 ms, 0.8 more for each token; one in two stands: a draft of one may cost 8 / 2 - 0.8 ms."""
    policy, calibration = LengthPolicy(Pace(rate=1 / 8, draft_ms={"": draft_ms}), FakeGuard()), Calibration()
    for n in WARM_UP:
        policy.pace.costs.observe(n, 8.0 * (1 + 0.1 * (n - 1)))
    for i in range(40):
        calibration.drafted(0, 0.5)
        calibration.learn([0.5], i % 2)
    policy._accounts[0].saved = saved - 0.003
    length = DraftLength(policy, {"": calibration}, 0)
    policy.begin_step(1)
    assert not policy.rests(0)
    assert not length.opens("")
    rests = [policy.rests(0) for _ in range(40)]
    assert rests == [i < n_rounds for i in range(40)]


def test_with_a_request_everybody_is_asked_again() -> None:
    policy = LengthPolicy(guard=FakeGuard())
    policy._accounts[0].rest = 31
    policy.begin(0)
    assert not policy.rests(0)


def test_a_calibration_that_is_wrong_is_put_right() -> None:
    """Confident tokens were never accepted; now they always are, though no draft seems worth verifying."""
    policy, calibration = LengthPolicy(Pace(rate=1 / 8, draft_ms={"": 0.4}), FakeGuard()), Calibration()
    length = DraftLength(policy, {"": calibration}, 0)
    for n in WARM_UP:
        policy.pace.costs.observe(n, 8.0 * (1 + 0.5 * (n - 1)))
    for _ in range(32):
        calibration.drafted(0, 0.9)
        calibration.learn([0.9], 0)
    assert calibration.probability(0, 0.9) < 0.1
    for i in range(2000):
        policy.begin_step(1)
        length.read(said(i), 1)
        if not policy.rests(0) and length.opens(""):
            length.goes_on(0.9)
            n_kept = length.keeps(drafted(1, 1))
            calibration.learn([0.9] * n_kept, n_kept)
    assert calibration.probability(0, 0.9) > 0.7


def test_a_token_that_may_turn_out_sure_is_worth_drafting() -> None:
    """On average a token does not pay; one in four is all but certain, and pays for drafting all of them."""
    policy, calibration = LengthPolicy(Pace(rate=1 / 8, draft_ms={"": 0.3}), FakeGuard()), Calibration()
    for n in WARM_UP:
        policy.pace.costs.observe(n, 8.0 * (1 + 0.6 * (n - 1)))
    for i in range(40):
        confidence = 0.99 if i % 4 == 0 else 0.2
        calibration.drafted(0, confidence)
        calibration.learn([confidence], int(i % 4 == 0))
    length = DraftLength(policy, {"": calibration}, 0)
    n_drafts = n_verified = 0
    for i in range(200):
        policy.begin_step(1)
        if not policy.rests(0) and length.opens(""):
            n_drafts += 1
            length.goes_on(0.99 if i % 4 == 0 else 0.2)
            n_verified += length.keeps(drafted(i % 4 == 0, 1))
    assert n_drafts == 200
    assert n_verified == 50


def test_the_first_token_of_a_draft_has_a_cost_of_its_own() -> None:
    policy = LengthPolicy(guard=FakeGuard())
    for i in range(300):
        n = 1 + i % 4
        policy.pace.drafted("d", n, 0.4 + n * 0.5, 0.5)
    assert policy.pace.draft_ms["d"] == pytest.approx(0.5, rel=0.05)
    assert policy.pace.first_ms["d"] == pytest.approx(0.4, rel=0.1)


def test_step_costs_follow_a_slower_machine_without_changing_their_shape() -> None:
    costs = StepCosts()
    for _ in range(30):
        for n in (1, 2, 4):
            costs.observe(n, 8.0 * (0.5 + 0.5 * n))
    before = costs.ms(4) / costs.ms(1)
    for _ in range(60):
        costs.observe(1, 16.0)
    assert costs.ms(1) == pytest.approx(16.0, rel=0.1)
    assert costs.ms(4) / costs.ms(1) == pytest.approx(before, rel=0.25)


def test_one_outlier_moves_a_known_cost_little() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.observe(1, 8.0)
    costs.observe(1, 800.0)
    assert costs.ms(1) < 10.0


@given(st.lists(st.tuples(st.lists(st.floats(0, 1), max_size=6), st.integers(0, 6)), max_size=40))
def test_a_calibration_survives_packing(rounds: list[tuple[list[float], int]]) -> None:
    calibration, again = Calibration(), Calibration()
    for confidences, n in rounds:
        for position, confidence in enumerate(confidences):
            calibration.drafted(position, confidence)
        calibration.learn(confidences, min(n, len(confidences)))
    again.unpack(calibration.pack())
    for position in range(6):
        for confidence in (0.0, 0.3, 0.99, 1.0):
            p = calibration.probability(position, confidence)
            assert 0.0 <= p <= 1.0
            assert again.probability(position, confidence) == p
        shares, chances = calibration.outlook(position)
        assert again.outlook(position) == (shares, chances)
        assert sum(shares) == pytest.approx(1.0)


@pytest.mark.parametrize("data", [b"", b"x" * 10, b"\xff" * Calibration.n_bytes])
def test_bytes_that_are_no_calibration_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="calibration"):
        Calibration().unpack(data)
