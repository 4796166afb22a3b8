"""POST /completion, /v1/completions, /tokenize, /detokenize."""

from __future__ import annotations

import httpx
import pytest

from tests.api.wire import events
from tests.fakes import BOS, N_VOCAB, FakeEngine

pytestmark = pytest.mark.anyio


async def test_native_answer_has_llama_servers_fields(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/completion", json={"prompt": "hi", "n_predict": 5, "seed": 3})).json()
    settings = answer.pop("generation_settings")
    timings = answer.pop("timings")
    assert answer == {
        "index": 0,
        "content": "hello",
        "tokens": [],
        "id_slot": 0,
        "stop": True,
        "model": "fake",
        "tokens_predicted": 5,
        "tokens_evaluated": 3,
        "prompt": "hi",
        "has_new_line": False,
        "truncated": False,
        "stop_type": "limit",
        "stopping_word": "",
        "tokens_cached": 7,
        "cache": {"kind": "none", "n_checkpoint": 0},
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert (settings["seed"], settings["n_predict"], settings["temperature"]) == (3, 5, 0.8)
    assert timings["predicted_n"] == 5


async def test_native_answer_gives_tokens_when_asked(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "n_predict": 2, "return_tokens": True}
    assert (await client.post("/completion", json=body)).json()["tokens"] == list(b"he")


async def test_native_stream_ends_with_the_object_that_says_stop(client: httpx.AsyncClient) -> None:
    response = await client.post("/completion", json={"prompt": "hi", "stream": True})
    *parts, last = events(response.text)
    assert "".join(part["content"] for part in parts) == "hello world"
    assert [token for part in parts for token in part["tokens"]] == list(b"hello world")
    assert [part["tokens_predicted"] for part in parts] == [3, 6, 9, 11]
    assert not any(part["stop"] for part in parts)
    assert last["stop"] is True
    assert last["content"] == ""
    assert last["prompt"] == "hi"
    assert "[DONE]" not in response.text


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("hi", [BOS, 104, 105]),
        ("<s>hi", [BOS, 104, 105]),
        (["hi"], [BOS, 104, 105]),
        ([104, 105], [104, 105]),
        ([[104, 105]], [104, 105]),
        (["h", 105, "!"], [BOS, 104, 105, 33]),
        ([104, "i"], [104, 105]),
    ],
)
async def test_prompt_forms(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: object, tokens: list[int]
) -> None:
    assert (await client.post("/completion", json={"prompt": prompt})).status_code == 200
    assert list(engine.requests[0].prompt) == tokens


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        (["a", "b"], "prompt"),
        ([[1], [2]], "prompt"),
        ([N_VOCAB], "prompt[0]"),
        ([1, -1], "prompt[1]"),
        ([1, 2.5], "prompt[1]"),
        ([1, None], "prompt[1]"),
        ([1, True], "prompt[1]"),
        (5, "prompt"),
        (None, "prompt"),
        ({"prompt_string": "x"}, "prompt"),
    ],
)
async def test_bad_prompts_are_refused(client: httpx.AsyncClient, prompt: object, param: str) -> None:
    response = await client.post("/completion", json={"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_text_completion_has_openai_form(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/v1/completions", json={"prompt": "hi"})).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert answer["timings"]["predicted_n"] == 11


async def test_text_completion_stream(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}
    response = await client.post("/v1/completions", json=body)
    assert response.text.endswith("data: [DONE]\n\n")
    *parts, last, usage = events(response.text)
    assert "".join(part["choices"][0]["text"] for part in parts) == "hello world"
    assert last["choices"][0]["finish_reason"] == "stop"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 11)


async def test_characters_outside_the_basic_plane_arrive_whole(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.answer, engine.n_step = "🙂漢ď", 100
    response = await client.post("/completion", json={"prompt": "hi", "stream": True})
    assert "".join(part["content"] for part in events(response.text)) == "🙂漢ď"
    assert (await client.post("/completion", json={"prompt": "🙂"})).json()["content"] == "🙂漢ď"


async def test_tokenize_and_detokenize(client: httpx.AsyncClient) -> None:
    assert (await client.post("/tokenize", json={"content": "hi"})).json() == {"tokens": [104, 105]}
    special = {"content": "hi<s>", "add_special": True, "parse_special": False}
    assert (await client.post("/tokenize", json=special)).json() == {"tokens": [BOS, *b"hi<s>"]}
    pieces = (await client.post("/tokenize", json={"content": "hi", "with_pieces": True})).json()
    assert pieces == {"tokens": [{"id": 104, "piece": "h"}, {"id": 105, "piece": "i"}]}
    assert (await client.post("/detokenize", json={"tokens": [104, 105]})).json() == {"content": "hi"}
    bad = await client.post("/detokenize", json={"tokens": [N_VOCAB]})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "tokens[0]")
    for no_id in (True, 1.0):
        assert (await client.post("/detokenize", json={"tokens": [no_id]})).status_code == 400


async def test_long_text_is_tokenised_beside_the_event_loop(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/tokenize", json={"content": "x" * 10_000})).json()
    assert answer["tokens"] == [120] * 10_000
