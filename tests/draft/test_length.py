"""What the text teaches about drafts that nobody verified, and who drafts where two could."""

from __future__ import annotations

import numpy as np
import pytest

from draft.calibration import Calibration
from draft.length import DraftLength
from draft.pace import Pace
from draft.window import LengthPolicy
from tests.draft.simulation import FakeGuard

CONFIDENCE = 0.55  # below what a token costs to verify in `slot`


def slot(ms_per_token: float = 7.0) -> tuple[DraftLength, dict[str, Calibration]]:
    policy = LengthPolicy(Pace(rate=1 / 8, draft_ms={"model": 0.1}), FakeGuard())
    for n in (1, 2, 3, 4, 6, 8, 12, 16) * 3:
        policy.pace.costs.observe(n, 8.0 + ms_per_token * (n - 1))
    policy.begin_step(1)
    calibrations = {"text": Calibration(), "model": Calibration()}
    return DraftLength(policy, calibrations, 0), calibrations


def seen(calibration: Calibration, position: int) -> tuple[float, float]:
    """Observations of that position, and how many of them stood."""
    cells = slice(10 * position, 10 * position + 10)
    return sum(calibration._seen[cells]), sum(calibration._accepted[cells])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([5, 6, 7, 8], [(1, 1), (1, 1), (1, 1)]),
        ([5, 6, 9, 8], [(1, 1), (1, 1), (1, 0)]),
        ([9, 6, 7, 8], [(1, 0), (0, 0), (0, 0)]),
        ([5, 6], [(0, 0), (0, 0), (0, 0)]),  # it could still go either way
    ],
)
def test_the_text_tells_how_an_unverified_draft_would_have_done(
    said: list[int], expected: list[tuple[int, int]]
) -> None:
    length, calibrations = slot()
    length.read(np.array([1, 2, 3], np.int32), 4)
    assert length.chooses("text", [5, 6, 7], CONFIDENCE) == 0
    text = [1, 2, 3, 4, *said]
    for n in range(5, len(text) + 1):
        length.read(np.array(text[: n - 1], np.int32), text[n - 1])
    assert [seen(calibrations["text"], i) for i in range(3)] == expected
    assert seen(calibrations["text"], 3) == (0, 0)  # a draft that ends is no rejection


@pytest.mark.parametrize(("said", "n_learnt"), [([5, 6], 1), ([5, 9], 1), ([9, 9], 0)])
def test_of_a_draft_that_was_cut_only_the_end_is_learnt_from_the_text(said: list[int], n_learnt: int) -> None:
    """The verified part is learnt about elsewhere; where it fell, nobody knows about the end."""
    length, calibrations = slot()
    length.read(np.array([1, 2], np.int32), 3)
    assert length.opens("model")
    length.goes_on(0.99)
    length.goes_on(0.05)
    assert length.keeps([5, 6]) == 1
    length.read(np.array([1, 2, 3, said[0]], np.int32), said[1])
    assert seen(calibrations["model"], 0) == (0, 0)
    assert seen(calibrations["model"], 1) == (n_learnt, n_learnt * (said[1] == 6))


def test_a_draft_made_token_by_token_is_learnt_about_too() -> None:
    length, calibrations = slot()
    length.read(np.array([1], np.int32), 2)
    assert length.opens("model")
    length.goes_on(0.2)
    assert length.keeps([7]) == 0
    length.read(np.array([1, 2], np.int32), 7)
    assert seen(calibrations["model"], 0) == (1, 1)


def test_another_text_says_nothing_of_a_former_draft() -> None:
    length, calibrations = slot()
    length.read(np.array([1, 2], np.int32), 3)
    length.chooses("text", [5], CONFIDENCE)
    length.begin()
    length.read(np.array([1, 2, 3], np.int32), 5)
    assert seen(calibrations["text"], 0) == (0, 0)


@pytest.mark.parametrize(("n_sure", "n_taken"), [(2, 0), (8, 8)])
def test_a_draft_from_text_has_to_bring_more_than_the_model_would(n_sure: int, n_taken: int) -> None:
    length, calibrations = slot(ms_per_token=1.0)
    for _ in range(60):
        for i in range(8):
            calibrations["model"].drafted(i, 0.95)
        calibrations["model"].learn([0.95] * 8, 8)
    length.read(np.array([1], np.int32), 2)
    assert length.chooses("text", [5] * n_sure, 0.99) == n_sure
    assert length.opens("model")
    assert length.chooses("text", [5] * n_sure, 0.99) == n_taken
    length.begin()  # the model need not be asked in this request
    assert length.chooses("text", [5] * n_sure, 0.99) == n_sure


def test_a_text_that_was_copied_does_not_make_the_next_ones_drafts_long() -> None:
    everywhere = Calibration()
    for _ in range(5):
        everywhere.learn([0.75] * 48, 48)
    text = everywhere.start_text(6.0)
    length, calibrations = slot(ms_per_token=3.5)
    calibrations["text"] = text

    def chosen() -> int:
        length.read(np.arange(9, dtype=np.int32), 9)
        return length.chooses("text", list(range(100, 115)), 0.75)

    assert 3 <= chosen() <= 7
    text.learn([0.75] * 15, 15)
    assert chosen() == 15


def test_a_try_pays_for_what_it_takes_reading_included() -> None:
    """Nothing is ever accepted; reading takes as long as ten tokens of drafting."""

    def n_tries(lag_ms: float) -> int:
        policy = LengthPolicy(Pace(rate=1 / 8, draft_ms={"": 0.2}), FakeGuard())
        for n in (1, 2, 3, 4, 6, 8, 12, 16) * 3:
            policy.pace.costs.observe(n, 8.0 * n)
        length, n = DraftLength(policy, {"": Calibration()}, 0), 0
        for i in range(3000):
            policy.begin_step(1)
            length.read(np.ones(i, np.int32), 1)
            if not policy.rests(0) and length.opens(""):
                n += 1
                length.goes_on(0.3)
                length.spent(1, 0.2, 0.2, lag_ms)
                length.keeps([0])
        return n

    at_once, behind, far_behind = n_tries(0.0), n_tries(2.0), n_tries(200.0)
    # 0.003 tokens a round are there for tries; one costs 0.025 tokens, or 0.275.
    assert behind == pytest.approx(0.003 * 3000 / 0.275, rel=0.25)
    assert at_once > 5 * behind
    assert far_behind >= 2  # it pays 4.025 tokens, not 25: a try every 1340 rounds


def test_a_long_draft_from_text_that_fails_speaks_against_the_next_one_for_a_while() -> None:
    length, calibrations = slot(ms_per_token=4.0)
    for _ in range(8):
        calibrations["text"].learn([0.97] * 48, 48)

    def chosen(length: DraftLength) -> int:
        length.read(np.arange(9, dtype=np.int32), 9)
        return length.chooses("text", list(range(100, 148)), 0.97)

    assert chosen(length) == 48
    length.stood(0)
    assert chosen(length) == 0
    assert chosen(DraftLength(length._policy, calibrations, 1)) == 48  # another text
    later = []
    for _ in range(200):
        later.append(chosen(length))
        length.stood(later[-1])
    assert 40 <= later.index(48) <= 160


def test_in_a_text_that_copies_one_draft_that_fails_changes_nothing() -> None:
    length, calibrations = slot(ms_per_token=4.0)
    for _ in range(8):
        calibrations["text"].learn([0.97] * 48, 48)
    taken = []
    for n_stood in (48, 48, 0, 48):
        length.read(np.arange(9, dtype=np.int32), 9)
        taken.append(length.chooses("text", list(range(100, 148)), 0.97))
        length.stood(n_stood)
    assert taken == [48] * 4
