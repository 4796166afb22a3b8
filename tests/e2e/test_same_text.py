"""Drafting never changes the output: greedy answers equal those of a server without a drafter, up to rounding."""

from __future__ import annotations

import pytest

from tests.e2e.rounding import Shape, judge_all, parting
from tests.e2e.served import PAIRS, Served, differences
from tests.e2e.texts import chat_prompts, conversations

REAL = Shape(PAIRS["real"][0])


def compare(real: Served, plain: Served, n_prompts: int, n_tokens: int, **fields: object) -> str:
    partings = []
    for prompt in chat_prompts(plain, n_prompts):
        plain.erase(0)
        real.erase(0)
        without = plain.ask(prompt, n_tokens)
        drafted = real.ask(prompt, n_tokens, **fields)
        assert without.timings["draft_n"] == 0
        assert drafted.timings["draft_n"] > 0
        partings.append(parting(without, drafted, REAL))
    return judge_all(partings)


def test_with_a_drafter_the_text_is_that_of_a_server_without_one(real: Served, plain: Served) -> None:
    print(compare(real, plain, 3, 64))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_answers_of_128_tokens_are_those_of_a_server_without_a_drafter(
    real: Served, plain: Served
) -> None:
    print(compare(real, plain, 20, 128))


@pytest.mark.slow
def test_long_drafts_do_not_change_the_text_either(real: Served, plain: Served) -> None:
    """A request may only lower the server's draft length, so that this needs drafts of every length below it."""
    print(compare(real, plain, 3, 64, speculative={"n_max": 1}))


def test_a_request_without_drafting_is_answered_as_by_a_server_without_a_drafter(
    real: Served, plain: Served
) -> None:
    """The same batches, so the very same answer."""
    [prompt] = chat_prompts(plain, 1)
    without = plain.ask(prompt, 48)
    switched_off = real.ask(prompt, 48, speculative={"type": "none"})
    found = differences(without, switched_off)
    # A server without a drafter says nothing of where it stands.
    found.pop("rounds", None)
    assert found == {}


def test_chat_and_completion_give_the_same_text(real: Served) -> None:
    [messages] = conversations(1)
    chat = real.post("/v1/chat/completions", {"messages": messages, "max_tokens": 32, "temperature": 0})
    real.erase(0)
    completion = real.ask(real.chat_tokens(messages), 32)
    assert chat["choices"][0]["message"]["content"] == completion.text
    assert chat["usage"]["prompt_tokens"] == len(completion.prompt)
