"""A body beyond the bound is refused, whether or not its length is announced."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from spec_server.api.base import ApiOptions

pytestmark = pytest.mark.anyio


@pytest.fixture
def options() -> ApiOptions:
    return ApiOptions(max_body_bytes=1000)


async def in_pieces(n_bytes: int) -> AsyncIterator[bytes]:
    for _ in range(n_bytes // 100):
        yield b" " * 100


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/slots/0?action=save"])
async def test_an_announced_body_beyond_the_bound_is_refused(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(path, content=b" " * 1001)
    assert answer.status_code == 413
    assert "1000" in answer.json()["error"]["message"]


async def test_a_body_that_grows_beyond_the_bound_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.post("/completion", content=in_pieces(2000))
    assert answer.status_code == 413


async def test_a_body_within_the_bound_is_read(client: httpx.AsyncClient) -> None:
    answer = await client.post("/completion", content=b'{"prompt": "a"}'.ljust(1000))
    assert answer.status_code == 200
