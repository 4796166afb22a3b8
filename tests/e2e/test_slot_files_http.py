"""What the directory holds, over HTTP: listing, one file, removal; the keys, and what /metrics counts."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from eval.models import DRAFTER
from tests.e2e.conftest import Start
from tests.e2e.served import Served, flags
from tests.e2e.slot_files import refused
from tests.e2e.texts import prompt_of

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("listed")


@pytest.fixture(scope="module")
def server(folder: Path, start_server: Start) -> Iterator[Served]:
    server = start_server(flags("self", slots=2, slot_dir=folder))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _clean(folder: Path) -> Iterator[None]:
    yield
    for path in folder.iterdir():
        path.unlink()


def names(server: Served) -> list[str]:
    return [entry["name"] for entry in server.get("/slot-files")["data"]]


def samples(server: Served) -> dict[str, float]:
    """Every sample of /metrics, labels included, without the prefix."""
    lines = server.http.get("/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.partition(":")[2]: float(value) for name, value in pairs}


def test_a_saved_file_is_listed_with_what_it_is(server: Served, folder: Path) -> None:
    server.ask(prompt_of(server, 70), 6, ignore_eos=True)
    saved = server.save(0, "chat 1.bin")
    entry = server.get("/slot-files/chat 1.bin")
    assert abs(entry.pop("modified") - time.time()) < 60
    assert entry == {
        "name": "chat 1.bin",
        "model": DRAFTER.name,
        "draft_model": DRAFTER.name,
        "n_tokens": saved["n_saved"],
        "n_checkpoints": 0,
        "has_draft": True,
        "bytes": saved["n_written"],
        "fits": True,
        "reason": "",
    }
    assert names(server) == ["chat 1.bin"]


def test_the_listing_follows_the_directory(server: Served, folder: Path) -> None:
    assert names(server) == []
    server.ask(prompt_of(server, 30), 2)
    server.save(0, "b.bin")
    shutil.copy(folder / "b.bin", folder / "a.bin")
    assert names(server) == ["a.bin", "b.bin"]
    server.ask(prompt_of(server, 60), 2)
    server.save(0, "b.bin")
    assert [entry["n_tokens"] for entry in server.get("/slot-files")["data"]] == [31, 61]
    (folder / "a.bin").unlink()
    assert names(server) == ["b.bin"]


def test_files_of_other_models_and_damaged_ones_are_listed_with_the_reason(
    server: Served, folder: Path
) -> None:
    for name in ("v1-full.bin", "stock-plain.bin", "refused-cut.bin", "refused-gguf.bin"):
        shutil.copy(GOLDEN / name, folder / name)
    (folder / "empty.bin").touch()
    (folder / ".hidden").touch()
    (folder / "folder").mkdir()
    listed = {entry["name"]: entry for entry in server.get("/slot-files")["data"]}
    (folder / "folder").rmdir()
    assert sorted(listed) == sorted(p.name for p in folder.iterdir() if p.name != ".hidden")
    assert not any(listed[name]["fits"] for name in listed if name != "stock-plain.bin")
    assert "model" in listed["v1-full.bin"]["reason"]
    assert "not a slot file" in listed["refused-gguf.bin"]["reason"]
    assert "empty" in listed["empty.bin"]["reason"]
    assert listed["stock-plain.bin"]["n_tokens"] > 0


def test_a_removed_file_is_gone_and_nothing_else(server: Served, folder: Path) -> None:
    server.ask(prompt_of(server, 30), 2)
    for name in ("a.bin", "b.bin"):
        server.save(0, name)
    assert server.http.delete("/slot-files/a.bin").json() == {"name": "a.bin", "deleted": True}
    assert names(server) == ["b.bin"]
    assert os.listdir(folder) == ["b.bin"]
    for method in ("GET", "DELETE"):
        assert server.http.request(method, "/slot-files/a.bin").status_code == 404
    refused(server, 1, "restore", "a.bin", 404)
    # the slot lives on
    assert server.ask([*prompt_of(server, 30), 5], 1).timings["cache_n"] == 30


@pytest.mark.parametrize(
    "name", ["..", "..%2F..%2Fetc%2Fpasswd", "a%2Fb", "a%5Cb", ".hidden", "x.", "%20x", "x%00y", "n" * 300]
)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_only_plain_names_are_looked_for(server: Served, folder: Path, method: str, name: str) -> None:
    (folder.parent / "b").write_text("x")
    # httpx would tidy the path up, so the target goes out as it is
    target = httpx.URL(server.base_url).copy_with(raw_path=f"/slot-files/{name}".encode())
    response = server.http.request(method, target)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["code"] == response.status_code
    assert (folder.parent / "b").exists()


def test_without_a_directory_there_is_nothing_to_list(plain: Served) -> None:
    for method, path in (("GET", "/slot-files"), ("GET", "/slot-files/a"), ("DELETE", "/slot-files/a")):
        response = plain.http.request(method, path)
        assert (response.status_code, response.json()["error"]["type"]) == (501, "not_supported_error")


def test_the_keys_guard_slots_and_files(start_server: Start, folder: Path) -> None:
    server = start_server(flags("self", "--api-key", "secret", slot_dir=folder))
    (folder / "a.bin").write_bytes((GOLDEN / "v1-full.bin").read_bytes())
    calls = [
        ("GET", "/slot-files", 200),
        ("GET", "/slot-files/a.bin", 200),
        ("POST", "/slots/0?action=restore", 400),
        ("POST", "/slots/0?action=save", 200),
        ("POST", "/slots/0?action=erase", 200),
        ("DELETE", "/slot-files/a.bin", 200),
    ]
    for method, path, status in calls:
        body = {"filename": "a.bin"} if method == "POST" else None
        for headers in ({}, {"Authorization": "Bearer other"}):
            response = server.http.request(method, path, json=body, headers=headers)
            assert response.status_code == 401, path
        response = server.http.request(method, path, json=body, headers={"Authorization": "Bearer secret"})
        assert response.status_code == status, response.text
    server.stop()


def test_the_metrics_count_transfers(server: Served, folder: Path) -> None:
    before = samples(server)
    server.ask(prompt_of(server, 50), 4)
    saved = server.save(0, "a.bin")
    refused(server, 0, "save", ".bad", 400)
    server.restore(1, "a.bin")
    refused(server, 1, "restore", "nope.bin", 404)
    (folder / "bad.bin").write_bytes((folder / "a.bin").read_bytes()[:-5])
    refused(server, 1, "restore", "bad.bin", 400)
    data = bytearray((folder / "a.bin").read_bytes())
    data[len(data) * 3 // 4] ^= 1
    (folder / "half.bin").write_bytes(data)
    assert server.restore(1, "half.bin")["draft"]["reason"] == "checksum"
    after = samples(server)
    grown = {name: after[name] - before.get(name, 0.0) for name in after if name.startswith("slot_")}
    grown = {name: value for name, value in grown.items() if value}
    assert 0 < grown.pop("slot_save_seconds_total") < 60
    assert 0 < grown.pop("slot_restore_seconds_total") < 60
    assert grown == {
        'slot_saves_total{outcome="saved"}': 1,
        'slot_saves_total{outcome="failed"}': 1,
        "slot_save_bytes_total": saved["n_written"],
        'slot_restores_total{outcome="restored"}': 2,
        'slot_restores_total{outcome="not found"}': 1,
        'slot_restores_total{outcome="refused"}': 1,
        "slot_restore_bytes_total": 2 * saved["n_written"],
        'slot_restore_dropped_total{part="draft",reason="checksum"}': 1,
    }


def test_every_metric_name_is_one(server: Served) -> None:
    for name in samples(server):
        assert re.fullmatch(r'[a-z_0-9]+(\{([a-z]+="[^"\\]*",?)+\})?', name), name


# -- versions and forms


@pytest.mark.parametrize(
    ("golden", "words"),
    [
        ("refused-ggsq-4.bin", ("version 4", "version 3")),
        ("refused-packed-2.bin", ("version 2", "version 1")),
        ("v2-unreadable.bin", ("version 2", "version 1")),
        ("refused-gguf.bin", ("not a slot file", "GGUF")),
        ("refused-media.bin", ("images",)),
    ],
)
def test_another_format_or_version_is_refused_by_name(
    server: Served, folder: Path, golden: str, words: tuple[str, ...]
) -> None:
    held = server.ask(prompt_of(server, 40), 4, ignore_eos=True)
    shutil.copy(GOLDEN / golden, folder / "other.bin")
    error = refused(server, 0, "restore", "other.bin", 400)
    assert error["slot"] == "unchanged"
    for word in words:
        assert word in error["message"]
    got = server.ask([*held.history, 5], 1)
    assert got.timings["cache_n"] == len(held.history)


def test_an_empty_file_is_refused_by_name(server: Served, folder: Path) -> None:
    (folder / "other.bin").touch()
    assert "empty" in refused(server, 0, "restore", "other.bin", 400)["message"]


def test_a_gguf_is_refused_by_name(server: Served, folder: Path) -> None:
    shutil.copy(DRAFTER, folder / "other.bin")
    assert "GGUF" in refused(server, 0, "restore", "other.bin", 400)["message"]
