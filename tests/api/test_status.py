"""Readiness, keys, and the routes that tell about the server."""

from __future__ import annotations

import inspect
from types import MappingProxyType

import httpx
import pytest

from spec_server.api.app import create_app
from spec_server.api.base import ApiOptions, EngineHolder
from spec_server.api.errors import STATUS, status_of
from spec_server.api.metrics import exposition
from spec_server.engine import errors
from tests.api.wire import USER
from tests.fakes import FakeEngine

pytestmark = pytest.mark.anyio
ROUTES = [
    ("GET", "/slots"),
    ("GET", "/props"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/slot-files"),
    ("GET", "/nowhere"),
    ("DELETE", "/slot-files/x"),
    ("POST", "/slots/0?action=save"),
    ("POST", "/slots/0?action=erase"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/completion"),
    ("POST", "/tokenize"),
]


def connect(holder: EngineHolder, options: ApiOptions | None = None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=create_app(holder, options or ApiOptions()))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def test_health_is_200_only_when_a_request_would_be_served(engine: FakeEngine) -> None:
    holder = EngineHolder()
    async with connect(holder) as client:
        for path in ("/health", "/v1/health"):
            response = await client.get(path)
            assert response.status_code == 503
            assert response.json() == {
                "error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}
            }
        holder.engine = engine
        engine.is_ready = (False, "restoring slots")
        assert (await client.get("/health")).json()["error"]["message"] == "restoring slots"
        engine.is_ready = (True, "")
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.post("/v1/chat/completions", json={"messages": USER})).status_code == 200


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_everything_else_is_503_while_the_model_loads(method: str, path: str) -> None:
    async with connect(EngineHolder()) as client:
        response = await client.request(method, path)
    assert (response.status_code, response.json()["error"]["type"]) == (503, "unavailable_error")
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": ""}, {"Authorization": "Bearer sesame2"}]
)
async def test_every_route_but_health_asks_for_the_key(
    method: str, path: str, headers: dict[str, str]
) -> None:
    holder = EngineHolder(FakeEngine())
    async with connect(holder, ApiOptions(api_keys=("sesame", "other"))) as client:
        response = await client.request(method, path, headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer sesame"}, {"X-Api-Key": "other"}])
async def test_a_known_key_opens(headers: dict[str, str]) -> None:
    options = ApiOptions(api_keys=("sesame", "other"))
    async with connect(EngineHolder(FakeEngine()), options) as client:
        assert (await client.get("/slots", headers=headers)).status_code == 200


async def test_n_ctx_is_one_number_everywhere(client: httpx.AsyncClient) -> None:
    props = (await client.get("/props")).json()
    (model,) = (await client.get("/v1/models")).json()["data"]
    slots = (await client.get("/slots")).json()
    numbers = {props["default_generation_settings"]["n_ctx"], props["n_ctx"], model["meta"]["n_ctx"]}
    assert numbers | {slot["n_ctx"] for slot in slots} == {512}


async def test_props_say_whether_drafting_is_on(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    props = (await client.get("/props")).json()
    assert props["speculative"] == {"enabled": True, "reason": ""}
    assert (props["slot_draft"], props["slot_checkpoints"]) == (True, True)
    assert (props["model_alias"], props["total_slots"]) == ("fake", 2)
    assert props["bos_token"] == "<s>"
    assert props["default_generation_settings"]["params"]["temperature"] == 0.8


async def test_models_are_listed_under_both_names(client: httpx.AsyncClient) -> None:
    assert (await client.get("/models")).json() == (await client.get("/v1/models")).json()


async def test_unknown_routes_and_methods_have_the_same_error_form(client: httpx.AsyncClient) -> None:
    missing = await client.get("/nowhere")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    wrong = await client.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, 405)
    assert wrong.headers["allow"] == "POST"


async def test_any_origin_may_call(client: httpx.AsyncClient) -> None:
    preflight = await client.options(
        "/v1/chat/completions",
        headers={
            "Origin": "http://a.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type",
        },
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "http://a.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]


async def test_preflight_needs_no_key_and_no_engine() -> None:
    async with connect(EngineHolder(), ApiOptions(api_keys=("k",))) as client:
        headers = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
        assert (await client.options("/completion", headers=headers)).status_code == 200


def samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_metrics_are_there_and_zero_before_anything_happened(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = samples(response.text)
    for name in (
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_drafts_total",
        'spec_decode_num_accepted_tokens_per_pos_total{position="0"}',
        "tokens_predicted_total",
        "predicted_tokens_seconds",
        "requests_processing",
    ):
        assert values[f"llamacpp:{name}"] == 0.0


async def test_metrics_follow_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post("/completion", json={"prompt": "hi"})
    per_position = "spec_decode_num_accepted_tokens_per_pos_total"
    engine.counts |= {
        f'{per_position}{{position="0"}}': 9,
        f'{per_position}{{position="1"}}': 4,
        'slot_restores_total{outcome="refused",reason="model"}': 2,
        "tokens_predicted_seconds_total": 2.0,
        "checkpoint_bytes": 5,
    }
    text = (await client.get("/metrics")).text
    values = samples(text)
    assert values["llamacpp:tokens_predicted_total"] == 11
    assert values["llamacpp:predicted_tokens_seconds"] == 5.5
    assert values[f'llamacpp:{per_position}{{position="1"}}'] == 4
    assert values['llamacpp:slot_restores_total{outcome="refused",reason="model"}'] == 2
    assert "# TYPE llamacpp:checkpoint_bytes gauge" in text
    assert f"# TYPE llamacpp:{per_position} counter" in text
    assert text.count(f"# TYPE llamacpp:{per_position}") == 1


@pytest.mark.parametrize(
    "cls",
    [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__],
)
def test_every_engine_error_has_a_status(cls: type[errors.EngineError]) -> None:
    assert cls in STATUS or cls is errors.EngineError
    code, kind = status_of(cls("x"))
    assert 400 <= code < 600
    assert kind.endswith("_error")


def test_a_subclass_is_served_as_its_parent() -> None:
    class WrongModel(errors.FileRefused):
        pass

    assert status_of(WrongModel("x")) == STATUS[errors.FileRefused]


async def test_read_only_views_of_the_engine_are_served(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    view = MappingProxyType({"id": 0, "positions": range(3), 5: "five"})
    engine.slots = lambda: [view]  # type: ignore[method-assign]
    assert (await client.get("/slots")).json() == [{"id": 0, "positions": [0, 1, 2], "5": "five"}]


def test_labels_may_come_in_any_order() -> None:
    text = exposition({'x_total{a="1",b="2"}': 3, 'x_total{b="4",a="5"}': 6}).decode()
    assert 'llamacpp:x_total{a="5",b="4"} 6.0' in text
