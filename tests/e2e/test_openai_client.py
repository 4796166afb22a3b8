"""The openai package as a client: whole and streamed answers, our extra fields in and out, its own error classes."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.served import Served
from tests.e2e.texts import conversations

MESSAGES = conversations(2)[1]


@pytest.fixture
def client(real: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    [model] = client.models.list().data
    return model.id


def test_a_whole_answer_has_usage_and_timings(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=16, temperature=0, extra_body={"id_slot": 0}
    )
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16
    extra = answer.model_extra
    assert extra["id_slot"] == 0
    assert extra["timings"]["predicted_n"] == 16
    assert 0 < extra["timings"]["draft_n_accepted"] <= extra["timings"]["draft_n"]


def test_a_stream_gives_the_same_text_and_ends_with_usage(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=24, temperature=0)
    stream = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_prompt": False},
    )
    chunks = list(stream)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert len([text for text in texts if text]) > 4
    *_, finish, usage = chunks
    assert finish.choices[0].finish_reason == "length"
    assert finish.model_extra["timings"]["predicted_n"] == 24
    assert usage.choices == []
    assert usage.usage.completion_tokens == 24
    assert usage.usage.prompt_tokens == whole.usage.prompt_tokens


def test_without_include_usage_no_chunk_has_usage(client: openai.OpenAI, model: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=4, temperature=0, stream=True
        )
    )
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_the_next_turn_reuses_the_one_before(client: openai.OpenAI, model: str) -> None:
    def turn(messages: list[dict[str, str]]) -> openai.types.chat.ChatCompletion:
        return client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0)

    first = turn(MESSAGES)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    second = turn([*MESSAGES, said, {"role": "user", "content": "Why?"}])
    held = first.usage.prompt_tokens + 16 - 1
    # The last token of an answer that was cut off is not decoded, and the template may join what follows to it.
    assert held - 1 <= second.usage.prompt_tokens_details.cached_tokens <= held
    assert second.model_extra["timings"]["cache_n"] == second.usage.prompt_tokens_details.cached_tokens


def test_text_completions_work_too(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, temperature=0)
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 8


def test_a_stop_string_ends_the_answer(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=24, temperature=0)
    text = whole.choices[0].message.content
    stop = text.split()[5]
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=24, temperature=0, stop=[stop]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text[: text.index(stop)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "error", "word"),
    [
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, openai.BadRequestError, "2048"),
        ({"max_tokens": -7}, openai.BadRequestError, "max_tokens"),
        ({"n": 2}, openai.BadRequestError, "n:"),
        ({"extra_body": {"id_slot": 9}}, openai.NotFoundError, "slot 9"),
    ],
)
def test_errors_arrive_as_the_client_s_own(
    client: openai.OpenAI,
    model: str,
    stream: bool,
    fields: dict[str, object],
    error: type[Exception],
    word: str,
) -> None:
    body = {"model": model, "messages": MESSAGES, "max_tokens": 4, **fields}
    with pytest.raises(error, match=word):
        client.chat.completions.create(**body, stream=stream)


def test_a_client_that_closes_its_stream_frees_the_slot(
    client: openai.OpenAI, model: str, real: Served
) -> None:
    stream = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=1500,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for _, chunk in zip(range(3), stream, strict=False):
        assert chunk.choices
    stream.close()
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=2, temperature=0)
    assert answer.usage.completion_tokens == 2
    assert real.busy() == []
