"""Rounds with contestants that only note what they are asked."""

from __future__ import annotations

import random

import pytest

from eval.bench.contestants import at_once
from eval.bench.schedule import Block, Rounds
from eval.bench.stream import Stream
from eval.client import ServerError

PROMPTS = {"chat": [[1, 1], [1, 2], [1, 3]], "json": [[2, 1], [2, 2], [2, 3]]}


class Noting:
    pid = None

    def __init__(self, name: str, diary: list, fails_at: int = -1, has_metrics: bool = True) -> None:
        self.name = name
        self.diary = diary
        self.fails_at = fails_at
        self.has_metrics = has_metrics

    def prime(self, prompts):
        self.diary.append((self.name, "prime", [list(prompt) for prompt in prompts]))
        return [Stream(0.0, 0.2, ((0.2, 1),), 1, 2, 0, 0)]

    def generate(self, prompts, n_tokens):
        self.diary.append((self.name, "generate", [list(prompt) for prompt in prompts]))
        if len([one for one in self.diary if one[:2] == (self.name, "generate")]) == self.fails_at:
            raise ServerError("it broke")
        return [Stream(1.0, 3.0, ((2.0, 1), (3.0, n_tokens - 1)), n_tokens, 1, 4, 3) for _ in prompts]

    def overhead_us(self):
        if not self.has_metrics:
            raise ServerError("no metrics")
        return 10.0, 5.0


class NotingNeighbour:
    def __init__(self, diary: list) -> None:
        self.diary = diary

    def pause(self) -> None:
        self.diary.append(("neighbour", "pause", []))

    def resume(self) -> None:
        self.diary.append(("neighbour", "resume", []))


def run(block, contestants, neighbour=None):
    log: list[str] = []
    rounds = Rounds(block, contestants, PROMPTS, neighbour, random.Random(1), log.append)
    rounds.run()
    return rounds, log


def test_every_contestant_gets_the_same_prompts_in_every_round_and_each_round_others():
    diary: list = []
    rounds, log = run(Block(1, ("chat", "json"), 3, 4), [Noting("a", diary), Noting("b", diary)])
    by_name = {name: [one[1:] for one in diary if one[0] == name] for name in "ab"}
    assert by_name["a"] == by_name["b"]
    generated = [prompts for kind, prompts in by_name["a"] if kind == "generate"]
    assert sorted(generated) == [[one] for name in ("chat", "json") for one in PROMPTS[name]]
    assert len(rounds.samples) == 12
    assert log[-1].startswith("1 client: round 3 of 3")


def test_a_contestant_reads_a_prompt_right_before_it_generates():
    diary: list = []
    run(Block(1, ("chat",), 2, 4), [Noting("a", diary), Noting("b", diary)])
    for first, second in zip(diary[::2], diary[1::2], strict=True):
        assert (first[0], first[1], second[1]) == (second[0], "prime", "generate")


def test_contestants_take_turns_in_going_first():
    diary: list = []
    run(Block(1, ("chat",), 20, 4), [Noting("a", diary), Noting("b", diary)])
    first = [one[0] for one in diary[::4]]
    assert 4 < first.count("a") < 16


def test_clients_have_prompts_of_their_own_from_the_start_again_when_all_were_used():
    diary: list = []
    run(Block(2, ("chat",), 2, 4), [Noting("a", diary)])
    assert [one[2] for one in diary if one[1] == "generate"] == [[[1, 1], [1, 2]], [[1, 3], [1, 1]]]


def test_a_neighbour_is_there_for_a_second_pass_only():
    diary: list = []
    rounds, _ = run(Block(1, ("chat",), 1, 4), [Noting("a", diary)], NotingNeighbour(diary))
    assert [one[1] for one in diary] == ["prime", "generate", "resume", "generate", "pause"]
    assert [one.beside for one in rounds.samples] == [False, True]
    assert rounds.samples[1].first_token_ms == ()


def test_one_that_fails_is_left_out_and_named():
    diary: list = []
    broken = Noting("b", diary, fails_at=2)
    rounds, _ = run(Block(1, ("chat",), 3, 4), [Noting("a", diary), broken])
    assert [one.contestant for one in rounds.samples].count("a") == 3
    assert [one.contestant for one in rounds.samples].count("b") == 1
    assert rounds.notes == ["b, 1 client: left out from here on, it broke"]


def test_a_server_without_metrics_is_measured_all_the_same():
    rounds, _ = run(Block(1, ("chat",), 3, 4), [Noting("a", [], has_metrics=False)])
    assert [one.overhead_us for one in rounds.samples] == [None] * 3
    assert rounds.notes == ["a, 1 client: step overhead not known, no metrics"]


def test_time_that_is_used_up_ends_after_a_whole_round():
    rounds, log = run(Block(1, ("chat", "json"), 9, 4, budget_s=0.0), [Noting("a", [])])
    assert len(rounds.samples) == 2
    assert log == ["1 client: stopped by --minutes after 1 of 9 rounds"]


def test_a_sample_adds_its_clients_up():
    rounds, _ = run(Block(2, ("chat",), 1, 4), [Noting("a", [])])
    (one,) = rounds.samples
    assert (one.n_clients, one.n_tokens, one.seconds, one.tokens_per_s) == (2, 8, 2.0, 4.0)
    assert (one.draft_n, one.draft_n_accepted, one.n_read_again) == (8, 6, 0)
    assert one.gaps_ms == (1000.0, 0.0, 0.0) * 2


def test_the_estimate_counts_all_that_is_asked_for():
    block = Block(1, ("chat", "json"), 1, 70)
    alone = block.round_s(PROMPTS, 1, 1)
    assert block.round_s(PROMPTS, 2, 1) == pytest.approx(2 * alone)
    assert 2.0 < alone < 3.0


def test_an_error_of_one_client_comes_out_after_all_have_ended():
    ended = []

    def one(client: int) -> Stream:
        if client == 0:
            raise ServerError("no")
        ended.append(client)
        return Stream(0.0, 1.0, (), 0, 0, 0, 0)

    with pytest.raises(ServerError, match="no"):
        at_once(one, 4)
    assert sorted(ended) == [1, 2, 3]
