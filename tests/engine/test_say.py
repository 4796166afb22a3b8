"""Tokens become text and events when they are asked for, in whatever groups, and none is lost at the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from eval.models import DRAFTER
from spec_server.engine import outbox
from spec_server.engine.base import Delta, Finished, Started
from spec_server.engine.core import EngineCore
from spec_server.engine.errors import GenerationFailed
from tests.engine.harness import Setup, Turn, core_of, drain, filler, model_of, request, run, serve, submit

SETUP = Setup(DRAFTER)


def drive(core: EngineCore, every: int, **fields: object) -> Turn:
    """A generation whose text is asked for after so many steps each."""
    prompt = filler(core.model, 30, 1)
    turn = submit(core, request(prompt, 20, cache_prompt=False, **fields))
    n = 0
    while core.has_work:
        core.step()
        n += 1
        if n % every == 0:
            core.say()
    return turn


def test_steps_say_nothing_by_themselves() -> None:
    with core_of(SETUP) as core:
        turn = submit(core, request(filler(core.model, 30, 1), 20))
        for _ in range(4):
            core.step()
        assert [type(event) for event in turn.events] == [Started]
        core.say()
        assert isinstance(turn.events[-1], Delta)
        assert len(turn.tokens) == 4
        core.say()
        assert len(turn.events) == 2


@pytest.mark.parametrize("end", ["limit", "word", "eos"])
def test_what_is_said_does_not_depend_on_when(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(DRAFTER)
    with core_of(SETUP) as core:
        plain = drive(core, 1)
        fields: dict[str, object] = {}
        if end == "word":
            fields["stop"] = (model.detokenize(plain.tokens[:9]).decode("utf-8", "replace"),)
        if end == "eos":
            fields["ignore_eos"] = False
            last = plain.tokens[8]
            monkeypatch.setattr(core.model, "is_eog", lambda token: token == last)
        turns = [drive(core, every, **fields) for every in (1, 3, 1000)]
    assert [turn.finished.stop_type for turn in turns] == [end] * 3
    assert {(turn.text, tuple(turn.tokens)) for turn in turns} == {(turns[0].text, tuple(turns[0].tokens))}
    said = plain.tokens if end == "limit" else plain.tokens[: plain.tokens.index(plain.tokens[8])]
    spoken = model.detokenize(said).decode("utf-8", "replace")
    assert turns[0].text == ("" if end == "word" else spoken.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert isinstance(turns[2].events[-2], Delta)
    assert isinstance(turns[2].events[-1], Finished)
    assert len(turns[2].events) == 3


def test_what_was_made_before_a_failure_is_said() -> None:
    with core_of(SETUP) as core:
        turn = submit(core, request(filler(core.model, 30, 1), 20))
        for _ in range(4):
            core.step()
        core.finisher.fail(core.slots[0], GenerationFailed("x"))
        assert len(turn.tokens) == 4
        assert str(turn.error) == "x"
        assert run(core, request(filler(core.model, 30, 1), 3))[0].tokens == turn.tokens[:3]


def test_who_waits_for_a_busy_slot_makes_no_step_a_long_one() -> None:
    """Before a long step all is said at once, which costs."""
    with core_of(SETUP) as core:
        prompt = filler(core.model, 30, 1)
        submit(core, request(prompt, 20))
        assert core.reads_prompts
        core.step()
        submit(core, request(prompt, 20))
        assert not core.reads_prompts
        while core.slots[0].task is not None:
            core.step()
        assert core.reads_prompts
        drain(core)


def test_a_worker_says_what_is_due_and_not_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token at once, the rest when the time has come, which it never does here, or with the end."""

    async def ask() -> Turn:
        async with serve(SETUP, tmp_path) as server:
            return await server.ask(request(filler(server.core.model, 30, 1), 20))

    monkeypatch.setattr(outbox, "INTERVAL_S", 1e9)
    turn = asyncio.run(ask())
    assert [len(event.tokens) for event in turn.events if isinstance(event, Delta)] == [1, 19]
