"""What a stream does when things go wrong: errors early and late, silence, a client that leaves."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from spec_server.api.app import create_app
from spec_server.api.base import ApiOptions, EngineHolder
from spec_server.engine.errors import GenerationFailed, Unavailable
from tests.api.wire import USER, RawClient, chat_text, events
from tests.fakes import FakeEngine

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODIES = [
    (CHAT, {"messages": USER}),
    ("/completion", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": "hi"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [True, False])
async def test_over_long_prompt_is_refused_before_the_headers(
    client: httpx.AsyncClient, path: str, body: dict[str, object], stream: bool
) -> None:
    long = "x" * 600
    body = {"messages": [{"role": "user", "content": long}]} if path == CHAT else {"prompt": long}
    response = await client.post(path, json={**body, "stream": stream})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "exceed_context_size_error"
    assert error["n_ctx"] == 512
    assert error["n_prompt_tokens"] in (601, 601 + len("[user]\n[assistant]"))
    assert "data:" not in response.text


@pytest.mark.parametrize("stream", [True, False])
async def test_full_queue_says_when_to_come_back(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.n_waiting_limit = 0
    response = await client.post(CHAT, json={"messages": USER, "stream": stream})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [True, False])
async def test_error_in_the_prompt_gets_its_own_status(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.refusal = Unavailable("shutting down")
    response = await client.post(CHAT, json={"messages": USER, "stream": stream})
    assert (response.status_code, response.json()["error"]["type"]) == (503, "unavailable_error")


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_error_in_mid_stream_is_its_last_event(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, object]
) -> None:
    engine.fail_at = 6
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200
    *_, last = events(response.text)
    assert last == {"error": {"code": 500, "message": "decode failed", "type": "server_error"}}
    assert "[DONE]" not in response.text
    assert engine.n_active == 0
    engine.fail_at = None
    assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_same_failure_without_a_stream_is_a_500(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, object]
) -> None:
    engine.fail_at = 6
    response = await client.post(path, json=body)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "decode failed"
    assert engine.n_active == 0


async def test_unforeseen_error_is_told_in_one_word(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.refusal = RuntimeError("secret")
    for stream in (True, False):
        response = await client.post(CHAT, json={"messages": USER, "stream": stream})
        assert response.status_code == 500
        assert response.json()["error"] == {"code": 500, "message": "internal error", "type": "server_error"}


class TestSilence:
    @pytest.fixture
    def options(self) -> ApiOptions:
        return ApiOptions(ping_interval_s=0.05)

    async def test_pings_fill_the_silence_and_nothing_else_changes(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.prefill_s, engine.step_s = 0.18, 0.12
        response = await client.post(CHAT, json={"messages": USER, "stream": True})
        before, _, after = response.text.partition("data: ")
        assert before == ": ping\n\n" * before.count(": ping")
        assert 2 <= before.count(": ping") <= 4
        assert after.count(": ping") >= 4
        assert chat_text(response.text) == "hello world"
        assert response.text.endswith("data: [DONE]\n\n")

    async def test_answer_without_a_stream_has_none(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.prefill_s = 0.12
        response = await client.post(CHAT, json={"messages": USER})
        assert response.json()["choices"][0]["message"]["content"] == "hello world"

    async def test_error_after_a_ping_is_an_event(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.prefill_s, engine.refusal = 0.12, GenerationFailed("decode failed")
        response = await client.post(CHAT, json={"messages": USER, "stream": True})
        assert response.status_code == 200
        assert response.text.startswith(": ping\n\n")
        assert [event["error"]["code"] for event in events(response.text)] == [500]

    async def test_request_may_switch_them_off(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.prefill_s = 0.12
        body = {"messages": USER, "stream": True, "sse_ping_interval": -1}
        assert ": ping" not in (await client.post(CHAT, json=body)).text


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prefill_s", [0.0, 60.0])
async def test_client_that_hangs_up_stops_the_work(
    engine: FakeEngine, path: str, body: dict[str, object], stream: bool, prefill_s: float
) -> None:
    """In the prompt and in the answer, with and without a stream."""
    engine.prefill_s, engine.step_s, engine.answer = prefill_s, 0.005, "x" * 100_000
    client = RawClient(create_app(EngineHolder(engine), ApiOptions()), path, {**body, "stream": stream})
    await asyncio.sleep(0.05)
    assert engine.n_active == 1
    assert bool(client.messages) == (stream and prefill_s == 0.0)
    client.hang_up()
    await asyncio.wait_for(client.task, 1.0)
    assert (engine.n_active, engine.n_closed) == (0, 1)


async def test_many_clients_that_hang_up_leave_nothing_behind(engine: FakeEngine) -> None:
    app = create_app(EngineHolder(engine), ApiOptions(ping_interval_s=0.01))
    engine.prefill_s, engine.step_s, engine.answer = 0.01, 0.001, "x" * 100_000
    n_tasks = len(asyncio.all_tasks())
    clients = [RawClient(app, CHAT, {"messages": USER, "stream": i % 2 == 0}) for i in range(50)]
    for i, client in enumerate(clients):
        asyncio.get_running_loop().call_later(0.001 * i, client.hang_up)
    await asyncio.wait_for(asyncio.gather(*(client.task for client in clients)), 5.0)
    assert engine.n_active == 0
    assert len(asyncio.all_tasks()) == n_tasks


async def test_broken_connection_closes_the_generation(engine: FakeEngine) -> None:
    engine.answer = "x" * 100_000
    client = RawClient(
        create_app(EngineHolder(engine), ApiOptions()), "/completion", {"prompt": "hi", "stream": True}
    )
    client.breaks_at = 5
    await asyncio.wait_for(client.task, 1.0)
    assert (engine.n_active, engine.n_closed) == (0, 1)


async def test_cancelling_the_request_itself_closes_the_generation(engine: FakeEngine) -> None:
    engine.prefill_s = 60.0
    client = RawClient(
        create_app(EngineHolder(engine), ApiOptions()), CHAT, {"messages": USER, "stream": True}
    )
    await asyncio.sleep(0.02)
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert (engine.n_active, engine.n_closed) == (0, 1)
