"""What is too long or too much is refused by a bound, and the last that is within it is served."""

from __future__ import annotations

import difflib
from typing import Any

import httpx
import pytest

from spec_server.api import bounds
from tests.api.wire import USER
from tests.fakes import N_VOCAB, FakeEngine

pytestmark = pytest.mark.anyio
N_CTX = 512  # FakeEngine's


async def error_of(client: httpx.AsyncClient, body: object, path: str = "/completion") -> dict[str, Any]:
    answer = await client.post(path, json=body)
    return answer.json()["error"] if answer.status_code == 400 else {"status": answer.status_code}


@pytest.mark.parametrize("form", ["pairs", "object"])
@pytest.mark.parametrize(("n", "is_fine"), [(N_VOCAB, True), (N_VOCAB + 1, False)])
async def test_biases_for_more_tokens_than_there_are(
    client: httpx.AsyncClient, form: str, n: int, is_fine: bool
) -> None:
    bias: object = [[5, 1]] * n if form == "pairs" else {("0" * 20 + str(i))[-6:]: 1 for i in range(n)}
    error = await error_of(client, {"prompt": "hi", "logit_bias": bias})
    assert error == {"status": 200} if is_fine else error["message"].startswith(f"logit_bias: {n} entries")


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    ("ids", "kind", "n"),
    [
        ([5] * N_CTX, "exceed_context_size_error", N_CTX),
        ([5] * (N_CTX + 1), "exceed_context_size_error", N_CTX + 1),
        ([N_VOCAB] * (N_CTX + 1), "exceed_context_size_error", N_CTX + 1),
        ([N_VOCAB] * N_CTX, "invalid_request_error", None),
        (["a"] * (N_CTX + 1), "invalid_request_error", None),
    ],
)
async def test_more_ids_than_the_context_are_refused_before_each_is_looked_at(
    client: httpx.AsyncClient, is_nested: bool, ids: list[object], kind: str, n: int | None
) -> None:
    error = await error_of(client, {"prompt": [ids] if is_nested else ids})
    assert (error["type"], error.get("n_prompt_tokens")) == (kind, n)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"content": [5] * 10}), ("/detokenize", {"tokens": [5] * 10})],
)
async def test_lists_for_the_tokenizer_s_routes_are_bounded(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object]
) -> None:
    monkeypatch.setattr(bounds, "MOST_TOKENS", 10)
    assert await error_of(client, body, path) == {"status": 200}
    monkeypatch.setattr(bounds, "MOST_TOKENS", 9)
    assert (await error_of(client, body, path))["param"] == next(iter(body))


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize(("n", "is_fine"), [(1000, True), (1001, False)])
async def test_a_stop_string_has_at_most_1000_characters(
    client: httpx.AsyncClient, is_list: bool, n: int, is_fine: bool
) -> None:
    stop: object = ["x" * n] if is_list else "x" * n
    error = await error_of(client, {"prompt": "hi", "stop": stop})
    assert error.get("param") == (None if is_fine else "stop")


@pytest.mark.parametrize("nested", ["x", "", 5, 0, [1], [], True, False])
async def test_speculative_that_is_no_object_is_refused_beside_dotted_names_too(
    client: httpx.AsyncClient, nested: object
) -> None:
    for more in ({}, {"speculative.n_max": 1}):
        error = await error_of(client, {"prompt": "a", "speculative": nested, **more})
        assert error["param"].startswith("speculative"), more


@pytest.mark.parametrize("nested", [None, {}, {"n_min": 1}])
async def test_dotted_names_join_the_object(
    client: httpx.AsyncClient, engine: FakeEngine, nested: object
) -> None:
    body = {"prompt": "a", "speculative": nested, "speculative.n_max": 4}
    assert await error_of(client, body) == {"status": 200}
    assert engine.requests[0].speculative.n_max == 4
    assert engine.requests[0].speculative.n_min == (1 if nested else None)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("speculatve.n_max", "speculative.n_max"),
        ("Speculative.n_max", "speculative.n_max"),
        ("speculative.nmax", None),  # of the object's own names the object's check speaks
        ("Speculative", "speculative"),
        ("my.n_max", ""),
        ("id_slot.x", ""),
    ],
)
async def test_a_mistyped_dotted_name_is_refused(
    client: httpx.AsyncClient, name: str, wanted: str | None
) -> None:
    error = await error_of(client, {"prompt": "a", name: 1})
    if wanted == "":
        assert error == {"status": 200}
    else:
        assert error["param"] == name
        assert wanted is None or error["message"].endswith(f"did you mean {wanted}?")


async def test_only_so_many_unknown_names_are_compared(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    compare = difflib.get_close_matches

    def counted(word: str, *rest: Any, **more: Any) -> list[str]:
        compared.append(word)
        return compare(word, *rest, **more)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    body = {"prompt": "a", "id_slot" * 20: 1, **{f"unheard{i}": 1 for i in range(5000)}}
    assert await error_of(client, body) == {"status": 200}
    assert len(compared) == 255
    assert (await error_of(client, {"idslot": 1, **body}))["param"] == "idslot"


async def test_prompts_are_tokenised_with_a_bound_and_other_text_without(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    tokenize = engine.tokenize

    def noted(text: str, **how: Any) -> list[int]:
        asked.append(how["is_prompt"])
        return tokenize(text, **how)

    monkeypatch.setattr(engine, "tokenize", noted)
    for path, body, expected in (
        ("/completion", {"prompt": "a"}, True),
        ("/completion", {"prompt": [5, "a"]}, True),
        ("/v1/completions", {"prompt": "a"}, True),
        ("/v1/chat/completions", {"messages": USER}, True),
        ("/tokenize", {"content": "a"}, False),
    ):
        asked.clear()
        assert (await client.post(path, json=body)).status_code == 200
        assert set(asked) == {expected}, path


async def test_a_conversation_of_many_messages_is_rendered_as_a_short_one(
    client: httpx.AsyncClient,
) -> None:
    body = {"messages": USER * 300}
    prompt = (await client.post("/apply-template", json=body)).json()["prompt"]
    assert prompt.count("[user]hi") == 300
