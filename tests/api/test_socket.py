"""The same over a real socket, with uvicorn and the openai package."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
import uvicorn

from spec_server.api.app import create_app
from spec_server.api.base import ApiOptions, EngineHolder
from tests.api.wire import USER
from tests.fakes import FakeEngine

pytestmark = pytest.mark.http


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(EngineHolder(engine), ApiOptions(ping_interval_s=0.2))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(5)
    listener.close()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        yield client


def wait_until(is_so: Callable[[], bool], seconds: float = 2.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.005)


def test_openai_client_reads_both_forms(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="any", messages=USER)
    assert whole.choices[0].message.content == "hello world"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    stream = client.chat.completions.create(
        model="any", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "hello world"
    assert chunks[-1].usage == whole.usage
    assert client.completions.create(model="any", prompt="hi").choices[0].text == "hello world"
    assert client.models.list().data[0].id == "fake"


def test_openai_client_sees_pings_as_nothing(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.prefill_s = 0.5
    stream = client.chat.completions.create(model="any", messages=USER, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hello world"


def test_openai_client_raises_on_an_error_in_mid_stream(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.fail_at = 6
    stream = client.chat.completions.create(model="any", messages=USER, stream=True)
    texts: list[str] = []
    with pytest.raises(openai.APIError, match="decode failed"):
        texts.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    engine.fail_at = None
    assert client.chat.completions.create(model="any", messages=USER).choices


def test_openai_client_gets_the_status_of_a_refusal(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "x" * 600}]
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="any", messages=messages, stream=True)
    assert refusal.value.body["n_ctx"] == 512


@pytest.mark.parametrize("stream", [True, False])
def test_closed_socket_stops_the_work(url: str, engine: FakeEngine, stream: bool) -> None:
    engine.step_s, engine.answer = 0.005, "x" * 100_000
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"messages": USER, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body)
        wait_until(lambda: engine.n_active == 1)
        if stream:
            connection.recv(1000)
    wait_until(lambda: engine.n_active == 0)
    assert engine.n_closed == 1


def test_status_routes_answer_while_streams_run(url: str, engine: FakeEngine) -> None:
    engine.step_s, engine.answer = 0.002, "x" * 3000
    with httpx.Client(base_url=url) as client:
        threads = [
            threading.Thread(target=client.post, args=("/completion",), kwargs={"json": {"prompt": "hi"}})
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for path in ("/health", "/slots", "/metrics", "/props") * 5:
            assert client.get(path, timeout=1.0).status_code == 200
        for thread in threads:
            thread.join()
