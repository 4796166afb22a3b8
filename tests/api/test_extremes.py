"""Numbers that would overflow in the sampler are refused by name, and a key matches whatever it is made of."""

from __future__ import annotations

import httpx
import pytest

from spec_server.api.base import ApiOptions

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"5": 1e39}),
        ("logit_bias", [[5, -1e7]]),
        ("presence_penalty", -1e39),
        ("frequency_penalty", 1e7),
        ("repeat_penalty", 1e-40),
        ("repeat_penalty", 1e7),
        ("temperature", 1e7),
    ],
)
async def test_a_number_beyond_reason_is_refused(
    client: httpx.AsyncClient, field: str, value: object
) -> None:
    answer = await client.post("/completion", json={"prompt": "a", field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)


async def test_an_override_that_does_not_exist_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.post("/completion", json={"prompt": "a", "speculative": {"nmax": 3}})
    assert answer.status_code == 400
    assert "nmax" in answer.json()["error"]["param"]


class TestKeys:
    @pytest.fixture
    def options(self) -> ApiOptions:
        return ApiOptions(api_keys=("ключ", "k1"))

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({"Authorization": "Bearer ключ".encode()}, 200),
            ({"Authorization": b"bearer k1"}, 200),
            ({"Authorization": b"Basic abc", "X-Api-Key": b"k1"}, 200),
            ({"X-Api-Key": b"k1"}, 200),
            ({"Authorization": b"k1"}, 401),
            ({"Authorization": b"Basic k1"}, 401),
            ({"Authorization": b"Bearer "}, 401),
            ({"X-Api-Key": b""}, 401),
        ],
    )
    async def test_a_key_matches_by_its_bytes_in_either_header(
        self, client: httpx.AsyncClient, headers: dict[str, bytes], status: int
    ) -> None:
        answer = await client.get("/v1/models", headers=list(headers.items()))
        assert answer.status_code == status
