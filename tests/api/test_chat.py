"""POST /v1/chat/completions."""

from __future__ import annotations

import httpx
import pytest

from tests.api.wire import USER, chat_text, events
from tests.fakes import BOS, FakeEngine

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


async def test_answer_has_openai_form_and_llama_servers_extensions(client: httpx.AsyncClient) -> None:
    answer = (await client.post(CHAT, json={"messages": USER})).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "hello world"}, "finish_reason": "stop"}
    ]
    n_prompt = len("[user]hi\n[assistant]") + 1
    assert answer["usage"] == {
        "prompt_tokens": n_prompt,
        "completion_tokens": 11,
        "total_tokens": n_prompt + 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["id_slot"] == 0
    assert answer["cache"] == {"kind": "none", "n_checkpoint": 0}
    timings = answer["timings"]
    assert timings["prompt_n"] == n_prompt
    assert timings["prompt_per_second"] == n_prompt / 0.002
    assert timings["predicted_per_token_ms"] == 4.0 / 11
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (11, 5)
    assert timings["accepted_per_pos"] == [5]
    assert timings["drafters"] == {"draft-simple": {"draft_n": 11}}
    assert "trace" not in answer


async def test_draft_counts_are_zero_without_a_drafter(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.is_drafting = False
    timings = (await client.post(CHAT, json={"messages": USER})).json()["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"], timings["draft_prompt_n"]) == (0, 0, 0)


async def test_trace_comes_when_asked_for(client: httpx.AsyncClient) -> None:
    answer = (await client.post(CHAT, json={"messages": USER, "trace": True})).json()
    assert answer["trace"] == [{"drafted": [1, 2], "n_accepted": 1}]


async def test_stream_says_the_same_as_the_whole_answer(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={"messages": USER, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in response.headers
    assert chat_text(response.text) == "hello world"
    assert response.text.endswith("\n\ndata: [DONE]\n\n")
    first, *middle, last = events(response.text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["id_slot"] == 0
    assert [event["choices"][0]["delta"]["content"] for event in middle] == ["hel", "lo ", "wor", "ld"]
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    assert last["timings"]["predicted_n"] == 11
    assert not any("usage" in event for event in (first, *middle, last))
    assert len({event["id"] for event in (first, *middle, last)}) == 1


async def test_usage_chunk_has_no_choices(client: httpx.AsyncClient) -> None:
    body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    *_, last, usage = events((await client.post(CHAT, json=body)).text)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    whole = (await client.post(CHAT, json={"messages": USER})).json()
    assert usage["usage"] == whole["usage"]


async def test_max_tokens_zero_processes_the_prompt_only(client: httpx.AsyncClient) -> None:
    answer = (await client.post(CHAT, json={"messages": USER, "max_tokens": 0})).json()
    assert answer["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": ""},
        "finish_reason": "length",
    }
    assert answer["timings"]["prompt_n"] > 0


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({"max_tokens": 4}, 4),
        ({"max_completion_tokens": 5, "max_tokens": 4}, 5),
        ({"n_predict": 3, "max_tokens": 4}, 3),
        ({"max_tokens": -1}, -1),
        ({}, -1),
    ],
)
async def test_token_limits(
    client: httpx.AsyncClient, engine: FakeEngine, given: dict[str, int], limit: int
) -> None:
    await client.post(CHAT, json={"messages": USER, **given})
    assert engine.requests[0].max_tokens == limit


async def test_template_writes_the_begin_token_once(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(CHAT, json={"messages": USER})
    prompt = list(engine.requests[0].prompt)
    assert prompt.count(BOS) == 1
    assert engine.detokenize(prompt) == "[user]hi\n[assistant]"


async def test_text_parts_are_joined_by_new_lines(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    response = await client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]})
    assert response.status_code == 200
    assert engine.detokenize(engine.requests[0].prompt) == "[user]A\nB\n[assistant]"


async def test_trailing_assistant_message_begins_the_answer(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    await client.post(CHAT, json={"messages": messages})
    assert engine.detokenize(engine.requests[0].prompt) == "[user]hi\n[assistant]Well, "


async def test_developer_is_system_where_the_template_knows_no_developer(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await client.post(CHAT, json={"messages": [{"role": "developer", "content": "be kind"}, *USER]})
    assert engine.detokenize(engine.requests[0].prompt).startswith("[system]be kind\n")


async def test_what_the_template_refuses_is_told_in_its_words(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={"messages": [{"role": "wizard", "content": "x"}]})
    assert response.status_code == 400
    assert "no role wizard" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "messages"


async def test_boundary_is_the_prompt_before_the_last_user_message(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        *USER,
        {"role": "assistant", "content": "yes"},
        *USER,
    ]
    await client.post(CHAT, json={"messages": messages})
    request = engine.requests[0]
    assert request.boundaries == (len("[system]be kind\n[user]hi\n[assistant]yes\n") + 1,)
    assert engine.detokenize(request.prompt[request.boundaries[0] :]) == "[user]hi\n[assistant]"


async def test_first_user_message_has_no_boundary_before_it(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await client.post(CHAT, json={"messages": USER})
    assert engine.requests[0].boundaries == ()


@pytest.mark.parametrize("key", ["id_slot", "slot_id"])
async def test_answer_says_which_slot_served(client: httpx.AsyncClient, engine: FakeEngine, key: str) -> None:
    answer = (await client.post(CHAT, json={"messages": USER, key: 1})).json()
    assert answer["id_slot"] == 1
    assert engine.requests[0].id_slot == 1


@pytest.mark.parametrize(
    "form",
    [{"speculative": {"n_max": 2, "type": "none"}}, {"speculative.n_max": 2, "speculative.type": "none"}],
)
async def test_speculative_overrides_in_both_forms(
    client: httpx.AsyncClient, engine: FakeEngine, form: dict[str, object]
) -> None:
    await client.post(CHAT, json={"messages": USER, **form})
    speculative = engine.requests[0].speculative
    assert (speculative.n_max, speculative.type, speculative.n_min) == (2, "none", None)


async def test_sampling_fields_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {
        "messages": USER,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.7,
        "seed": 2**32 + 5,
        "repeat_last_n": -1,
        "presence_penalty": None,
        "logit_bias": {"65": -100, "66": 1.5, "67": False},
        "stop": ["", "END"],
        "ignore_eos": True,
        "cache_prompt": False,
    }
    await client.post(CHAT, json=body)
    request = engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.9, 0.1)
    assert (sampling.typ_p, sampling.seed, sampling.presence_penalty) == (0.7, 5, 0.0)
    assert sampling.repeat_last_n == engine.model.n_ctx_seq
    assert sampling.logit_bias == ((65, -100.0), (66, 1.5), (67, float("-inf")))
    assert request.stop == ("END",)
    assert request.ignore_eos
    assert not request.cache_prompt


async def test_harmless_fields_are_ignored(client: httpx.AsyncClient) -> None:
    body = {
        "messages": USER,
        "model": "gpt-4",
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "n": 1,
        "logprobs": False,
        "stop": None,
        "speculative": None,
        "timings_per_token": True,
        "unknown_field": 5,
    }
    assert (await client.post(CHAT, json=body)).status_code == 200


async def test_apply_template_shows_the_prompt(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/apply-template", json={"messages": USER})).json()
    assert answer == {"prompt": "<s>[user]hi\n[assistant]"}


async def test_last_message_is_continued_in_the_other_servers_words(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    words = {"add_generation_prompt": False, "continue_final_message": True}
    await client.post(CHAT, json={"messages": messages, **words})
    assert engine.detokenize(engine.requests[0].prompt) == "[user]hi\n[assistant]Well, "
    await client.post(CHAT, json={"messages": messages, "add_generation_prompt": False})
    assert engine.detokenize(engine.requests[1].prompt) == "[user]hi\n[assistant]Well, \n"
