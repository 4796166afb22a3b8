"""Slots and slot files over HTTP."""

from __future__ import annotations

import httpx
import pytest

from spec_server.api.base import ApiOptions
from spec_server.engine.errors import FileRefused, StorageFull
from tests.fakes import FakeEngine

pytestmark = pytest.mark.anyio
BAD_NAMES = [
    "",
    ".",
    "..",
    "...",
    "../x",
    "a/b",
    "a\\b",
    "/etc/x",
    "x\u0000y",
    " x",
    "x.",
    "x" * 300,
    5,
    None,
]


async def test_save_erase_restore(client: httpx.AsyncClient) -> None:
    await client.post("/completion", json={"prompt": "hi", "id_slot": 1})
    saved = await client.post("/slots/1?action=save", json={"filename": "chat-1_A.bin"})
    assert saved.json() == {
        "id_slot": 1,
        "filename": "chat-1_A.bin",
        "n_saved": 14,
        "n_written": 100,
        "n_ckpt_saved": 0,
        "target": {"bytes": 60},
        "draft": {"saved": True, "n_tokens": 14, "bytes": 40, "reason": ""},
        "timings": {"save_ms": 1.5, "hold_ms": 0.0, "sync_ms": 0.0},
    }
    erased = await client.post("/slots/1?action=erase")
    assert erased.json() == {"id_slot": 1, "n_erased": 14}
    restored = await client.post("/slots/0?action=restore", json={"filename": "chat-1_A.bin"})
    assert restored.json() == {
        "id_slot": 0,
        "filename": "chat-1_A.bin",
        "n_restored": 14,
        "n_read": 100,
        "n_ckpt_restored": 0,
        "n_ckpt_dropped": 1,
        "n_reusable": 14,
        "checksum": "verified",
        "target": {"bytes": 60},
        "draft": {"restored": False, "n_tokens": 0, "bytes": 0, "reason": "another draft model"},
        "notes": ["a note"],
        "timings": {"restore_ms": 1.5, "hold_ms": 0.0},
    }


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("action", ["save", "restore"])
async def test_only_plain_file_names(
    client: httpx.AsyncClient, engine: FakeEngine, action: str, name: object
) -> None:
    response = await client.post(f"/slots/0?action={action}", json={"filename": name})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "filename"
    assert engine.files == {}


@pytest.mark.parametrize(
    ("url", "body", "status", "param"),
    [
        ("/slots/0?action=save", b"", 400, "body"),
        ("/slots/0?action=save", b"{}", 400, "filename"),
        ("/slots/0?action=foo", b"{}", 400, "action"),
        ("/slots/0", b"{}", 400, "action"),
        ("/slots/99?action=save", b'{"filename":"x"}', 404, "id_slot"),
        ("/slots/-1?action=save", b'{"filename":"x"}', 404, "id_slot"),
        ("/slots/abc?action=save", b'{"filename":"x"}', 400, "id_slot"),
        ("/slots/1.5?action=erase", b"", 400, "id_slot"),
        ("/slots/-0?action=erase", b"", 404, "id_slot"),
        ("/slots/+1?action=erase", b"", 400, "id_slot"),
        ("/slots/%201?action=erase", b"", 400, "id_slot"),
        ("/slots/1%0A?action=erase", b"", 400, "id_slot"),
        ("/slots/0_1?action=erase", b"", 400, "id_slot"),
        ("/slots/\u0661?action=erase", b"", 400, "id_slot"),
        (f"/slots/{'9' * 5000}?action=erase", b"", 400, "id_slot"),
    ],
)
async def test_bad_slot_calls_name_what_is_wrong(
    client: httpx.AsyncClient, url: str, body: bytes, status: int, param: str
) -> None:
    response = await client.post(url, content=body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


async def test_save_without_a_directory_is_not_supported(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.has_directory = False
    response = await client.post("/slots/0?action=save", json={"filename": "x"})
    assert (response.status_code, response.json()["error"]["type"]) == (501, "not_supported_error")


async def test_restore_of_a_missing_file(client: httpx.AsyncClient) -> None:
    error = (await client.post("/slots/0?action=restore", json={"filename": "nope.bin"})).json()["error"]
    assert (error["code"], error["type"], error["slot"]) == (404, "not_found_error", "unchanged")


async def test_refused_file_names_the_field_and_both_values(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.refusal = FileRefused("another model", field="model", expected="a", found="b", slot="unchanged")
    response = await client.post("/slots/0?action=restore", json={"filename": "x.bin"})
    assert response.status_code == 400
    assert response.json()["error"] == {
        "code": 400,
        "type": "invalid_request_error",
        "message": "another model",
        "field": "model",
        "expected": "a",
        "found": "b",
        "slot": "unchanged",
    }


async def test_full_disk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.refusal = StorageFull("no room")
    assert (await client.post("/slots/0?action=restore", json={"filename": "x.bin"})).status_code == 507


async def test_slots_are_listed(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    slots = (await client.get("/slots")).json()
    assert [slot["id"] for slot in slots] == [0, 1]
    assert (await client.get("/slots?fail_on_no_slot=1")).status_code == 200
    engine.n_active = 2
    assert (await client.get("/slots?fail_on_no_slot=1")).status_code == 503


async def test_slot_files(client: httpx.AsyncClient) -> None:
    await client.post("/completion", json={"prompt": "hi"})
    await client.post("/slots/0?action=save", json={"filename": "a.bin"})
    entry = {
        "name": "a.bin",
        "model": "fake",
        "draft_model": "drafty",
        "n_tokens": 14,
        "n_checkpoints": 0,
        "has_draft": True,
        "bytes": 100,
        "modified": 2.0,
        "fits": True,
        "reason": "",
    }
    assert (await client.get("/slot-files")).json() == {"object": "list", "data": [entry]}
    assert (await client.get("/slot-files/a.bin")).json() == entry
    assert (await client.delete("/slot-files/a.bin")).json() == {"name": "a.bin", "deleted": True}
    assert (await client.delete("/slot-files/a.bin")).status_code == 404
    assert (await client.get("/slot-files/a.bin")).status_code == 404


@pytest.mark.parametrize("name", ["a%2Fb", "..%2Fx", "", "x.", "%20x"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_slot_file_names_obey_the_same_rule(client: httpx.AsyncClient, method: str, name: str) -> None:
    response = await client.request(method, f"/slot-files/{name}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "filename")


class TestWithoutSlotsEndpoint:
    @pytest.fixture
    def options(self) -> ApiOptions:
        return ApiOptions(slots_endpoint=False)

    async def test_listing_is_not_supported_and_actions_are(self, client: httpx.AsyncClient) -> None:
        assert (await client.get("/slots")).status_code == 501
        assert (await client.post("/slots/0?action=erase")).status_code == 200
