"""The log has one line for each finished request, with its counts and without its text."""

from __future__ import annotations

import logging

import httpx
import pytest

from tests.api.wire import USER
from tests.fakes import FakeEngine

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        ("/completion", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": "hi"}),
    ],
)
async def test_a_finished_request_is_one_line(
    client: httpx.AsyncClient,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, object],
    stream: bool,
) -> None:
    with caplog.at_level(logging.INFO, "spec_server"):
        await client.post(path, json={**body, "stream": stream, "id_slot": 1})
    [line] = [record.getMessage() for record in caplog.records if record.name.startswith("spec_server")]
    assert line.startswith("slot 1: prompt of ")
    assert "11 generated in 4 ms (2750.0/s), 5 of 11 drafted accepted; end: eos" in line
    assert not {"hi", "hello", "world"} & set(line.replace(";", " ").replace(",", " ").split())


async def test_a_refused_request_is_no_finished_one(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, engine: FakeEngine
) -> None:
    engine.fail_at = 3
    with caplog.at_level(logging.INFO, "spec_server"):
        await client.post("/completion", json={"prompt": "hi"})
    assert "generated" not in caplog.text
