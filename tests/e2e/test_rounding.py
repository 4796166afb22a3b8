"""The judge of partings is strict: it finds every fault that it is there to tell from rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.e2e.rounding import Parting, Pick, Shape, _steps, judge_all, judged, opened, parting, replay
from tests.e2e.served import PAIRS, Answer, Served
from tests.e2e.texts import chat_prompts

DOUBLE = Shape(PAIRS["self"][0], slots=2)


@pytest.fixture
def drafted(double: Served) -> Answer:
    return double.ask(chat_prompts(double, 2)[1], 48, 1, ignore_eos=True)


def changed(answer: Answer, at: int, token: int) -> Answer:
    return replace(answer, tokens=(*answer.tokens[:at], token, *answer.tokens[at + 1 :]))


def test_a_drafted_answer_is_replayed_token_for_token(drafted: Answer) -> None:
    with opened(DOUBLE) as model:
        [picks] = replay([drafted], DOUBLE, model)
    assert len(picks) == 48
    assert all(pick.gap >= 0 and pick.best != pick.second for pick in picks)


def test_answers_that_followed_each_other_on_one_slot_are_replayed_together(double: Served) -> None:
    prompts = chat_prompts(double, 3)
    answers = [double.ask(prompt, 24, 1, ignore_eos=True) for prompt in prompts]
    assert answers[1].timings["cache_n"] > 0
    with opened(DOUBLE) as model:
        assert [len(picks) for picks in replay(answers, DOUBLE, model)] == [24, 24, 24]


@pytest.mark.parametrize(("started", "slots"), [((1.0, 2.0), [0, 1]), ((2.0, 1.0), [1, 0])])
def test_prompts_of_one_step_are_replayed_oldest_request_first(
    drafted: Answer, started: tuple[float, float], slots: list[int]
) -> None:
    both = [replace(drafted, id_slot=slot, started=at) for slot, at in enumerate(started)]
    prompts, *rounds = _steps(both, DOUBLE)
    assert [work.slot for work in prompts] == slots
    assert [[work.slot for work in works] for works in rounds] == [[0, 1]] * len(rounds)


@pytest.mark.parametrize("at", [0, 9, 46])
def test_a_token_that_no_replay_gives_is_no_rounding(drafted: Answer, at: int) -> None:
    wrong = changed(drafted, at, drafted.tokens[at] + 1)
    with pytest.raises(AssertionError, match="the replay comes to other tokens"):
        parting(drafted, wrong, DOUBLE)


def test_equal_answers_do_not_part(drafted: Answer) -> None:
    assert parting(drafted, drafted, DOUBLE) is None


def test_an_answer_that_only_goes_on_longer_does_not_part(drafted: Answer) -> None:
    assert parting(drafted, replace(drafted, tokens=drafted.tokens[:-1]), DOUBLE) is None


@pytest.mark.parametrize(
    ("of_plain", "of_other", "complaint"),
    [
        (Pick(5, 6, 0.1), Pick(6, 5, 0.1), ""),
        (Pick(5, 6, 0.51), Pick(6, 5, 0.1), "gap=0.51"),
        (Pick(5, 7, 0.1), Pick(6, 5, 0.1), "not among the best two"),
        (Pick(6, 5, 0.1), Pick(6, 5, 0.1), "the plain run has 5"),
        (Pick(5, 6, 0.1), Pick(5, 6, 0.1), "the other run has 6"),
    ],
)
def test_a_parting_needs_both_replays_and_a_near_tie(
    drafted: Answer, of_plain: Pick, of_other: Pick, complaint: str
) -> None:
    ours, theirs = changed(drafted, 0, 5), changed(drafted, 0, 6)
    if not complaint:
        assert judged(ours, theirs, [of_plain], [of_other], 0) == Parting(0, 5, 6, 0.1)
        return
    with pytest.raises(AssertionError, match=complaint):
        judged(ours, theirs, [of_plain], [of_other], 0)


def test_more_than_a_fifth_of_the_prompts_may_not_part() -> None:
    one = Parting(3, 5, 6, 0.1)
    assert judge_all([one, None, None, None, None]) == "1 of 5 part: 0.100 at token 3"
    with pytest.raises(AssertionError, match="1 of 4 part"):
        judge_all([one, None, None, None])
