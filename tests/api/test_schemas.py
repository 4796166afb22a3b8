"""Bad requests: each is a 400 that names the field, whichever endpoint it comes to."""

from __future__ import annotations

import httpx
import pytest

from spec_server.api.schemas import UNSUPPORTED
from tests.api.wire import USER
from tests.fakes import N_VOCAB, FakeEngine

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
ENDPOINTS = [
    (CHAT, {"messages": USER}),
    ("/completion", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": "hi"}),
]
BAD_FIELDS = [
    ("max_tokens", -2),
    ("max_tokens", "many"),
    ("n_predict", -5),
    ("max_completion_tokens", 2**40),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("top_k", -2),
    ("top_p", 1.5),
    ("top_p", -0.5),
    ("min_p", 2),
    ("typical_p", 3),
    ("repeat_penalty", 0),
    ("repeat_last_n", -7),
    ("seed", -2),
    ("seed", 1.5),
    ("seed", 2**70),
    ("stop", 5),
    ("stop", ["x"] * 65),
    ("id_slot", -2),
    ("id_slot", "first"),
    ("stream", "perhaps"),
    ("logit_bias", {"abc": 1}),
    ("logit_bias", {"+65": 1}),
    ("logit_bias", {"6_5": 1}),
    ("logit_bias", {" 65": 1}),
    ("logit_bias", {str(N_VOCAB): 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"65": "much"}),
    ("logit_bias", {"65": True}),
    ("logit_bias", [[N_VOCAB, 1]]),
    ("logit_bias", "x"),
]
SAMPLE = {
    "n": 2,
    "n_cmpl": 2,
    "best_of": 3,
    "tools": [{"type": "function"}],
    "functions": [{"name": "f"}],
    "tool_choice": "required",
    "function_call": {"name": "f"},
    "response_format": {"type": "json_object"},
    "modalities": ["text", "audio"],
    "grammar": "root ::= x",
    "samplers": ["top_k"],
    "image_data": [{"data": ""}],
    "lora": [{"id": 0}],
    "stop_token_ids": [1],
    "response_fields": ["content"],
    "suffix": "x",
}


@pytest.mark.parametrize(("path", "base"), ENDPOINTS)
@pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
async def test_value_out_of_range_is_refused_by_name(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    path: str,
    base: dict[str, object],
    name: str,
    value: object,
) -> None:
    response = await client.post(path, json={**base, name: value})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["code"] == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(name)
    assert name in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(("stop", v, "a string, or a list of") for v in (5, {"a": 1}, ["x", 5], ["x"] * 65, ["x" * 1001])),
        *(("logit_bias", v, "an object of token ids") for v in ("x", 5, {"65": "much"}, [[1]], [[1, "x"]])),
        ("prompt", 5, "a string, or a list of"),
    ],
)
async def test_field_of_several_kinds_says_in_one_sentence_what_it_takes(
    client: httpx.AsyncClient, name: str, value: object, message: str
) -> None:
    error = (await client.post("/completion", json={"prompt": "hi", name: value})).json()["error"]
    assert (error["code"], error["param"]) == (400, name)
    assert error["message"].startswith(f"{name}: it takes {message}")
    assert "Input should be" not in error["message"]


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
async def test_unsupported_feature_is_refused_by_name(client: httpx.AsyncClient, name: str) -> None:
    response = await client.post(CHAT, json={"messages": USER, name: SAMPLE.get(name, 5)})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
async def test_unsupported_feature_may_be_null(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.post(CHAT, json={"messages": USER, name: None})).status_code == 200


DEFAULT_CHAIN = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]


@pytest.mark.parametrize(
    "samplers",
    ["edskypmxt", "edkypmxt", DEFAULT_CHAIN, [s for s in DEFAULT_CHAIN if s not in ("dry", "xtc")]],
)
async def test_the_default_order_of_samplers_may_be_named(
    client: httpx.AsyncClient, samplers: object
) -> None:
    """What is off here (DRY, top-n-sigma, XTC) may be left out: older servers' pages know fewer."""
    assert (await client.post(CHAT, json={"messages": USER, "samplers": samplers})).status_code == 200


@pytest.mark.parametrize(
    "samplers", ["", [], "kypmt", "tedskypmx", "edskypmxti", "edskypmxtt", DEFAULT_CHAIN[::-1], [1], {"a": 1}]
)
async def test_another_order_of_samplers_is_refused(client: httpx.AsyncClient, samplers: object) -> None:
    error = (await client.post(CHAT, json={"messages": USER, "samplers": samplers})).json()["error"]
    assert (error["code"], error["param"]) == (400, "samplers")
    assert '"edskypmxt"' in error["message"]


@pytest.mark.parametrize("name", ["idslot", "slot", "slotId", "id-slot", "id_slots", "slotid"])
async def test_mistyped_slot_is_refused(client: httpx.AsyncClient, name: str) -> None:
    error = (await client.post(CHAT, json={"messages": USER, name: 1})).json()["error"]
    assert error["code"] == 400
    assert "id_slot" in error["message"]


async def test_slot_and_its_alias_must_agree(client: httpx.AsyncClient) -> None:
    both = {"messages": USER, "id_slot": 0, "slot_id": 1}
    assert (await client.post(CHAT, json=both)).json()["error"]["param"] == "id_slot"
    assert (await client.post(CHAT, json={**both, "slot_id": 0})).status_code == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "assistant", "content": "x"}], "messages"),
        ([*USER, *[{"role": "assistant", "content": "x"}] * 2], "messages"),
    ],
)
async def test_bad_messages_are_refused(client: httpx.AsyncClient, messages: object, param: str) -> None:
    response = await client.post(CHAT, json={"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "images are not supported"),
        ({"type": "input_audio", "input_audio": {}}, "sounds are not supported"),
        ({"type": "poem"}, "parts of type poem are not supported"),
        ({"type": "text"}, "it takes a string, or a list"),
        ("hi", "it takes a string, or a list"),
    ],
)
async def test_a_part_that_is_no_text_is_refused_in_plain_words(
    client: httpx.AsyncClient, part: object, words: str
) -> None:
    content = [{"type": "text", "text": "what is this?"}, part]
    error = (await client.post(CHAT, json={"messages": [{"role": "user", "content": content}]})).json()[
        "error"
    ]
    assert error["message"].startswith(f"messages[0].content: {words}")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_tokens", "many", "it must be a whole number"),
        ("max_tokens", 2.5, "it must be a whole number"),
        ("max_tokens", -2, "it must be at least -1"),
        ("temperature", "hot", "it must be a number"),
        ("top_p", 2, "it must be at most 1.0"),
        ("stream", "perhaps", "it must be true or false"),
        ("speculative", 5, "it must be an object"),
        ("speculative", {"n_maxx": 5}, "no such field"),
        ("messages", "hi", "it must be a list"),
        ("messages", [], "it must not be empty"),
        ("messages", [5], "it must be an object"),
    ],
)
async def test_a_wrong_value_is_answered_in_plain_words(
    client: httpx.AsyncClient, field: str, value: object, words: str
) -> None:
    error = (await client.post(CHAT, json={"messages": USER, field: value})).json()["error"]
    assert error["message"] == f"{error['param']}: {words}"


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"5", b"null", b"\xff\xfe", b'{"messages": NaN}', b"[" * 5000]
)
@pytest.mark.parametrize("path", [CHAT, "/completion", "/tokenize", "/detokenize", "/slots/0?action=save"])
async def test_body_that_is_no_json_object_is_refused(
    client: httpx.AsyncClient, path: str, raw: bytes
) -> None:
    response = await client.post(path, content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "body"


@pytest.mark.parametrize("path", [CHAT, "/completion"])
async def test_missing_prompt_is_named(client: httpx.AsyncClient, path: str) -> None:
    param = (await client.post(path, json={})).json()["error"]["param"]
    assert param == ("messages" if path == CHAT else "prompt")
