"""A disk that is full, read-only or gone, and names that are no plain files: a clear error, the old file as it was, no
temporary file, and a slot that lost nothing."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from eval.server import ServerDied
from tests.e2e.conftest import Start
from tests.e2e.served import Answer, Served, flags
from tests.e2e.slot_files import assert_unchanged, leftovers, refused
from tests.e2e.texts import prompt_of

SLOT = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def server(folder: Path, start_server: Start) -> Iterator[Served]:
    """Its directory is a link, which each test points to the place where something is wrong."""
    (folder / "good").mkdir()
    point(folder, folder / "good")
    server = start_server(flags("self", slots=2, slot_dir=folder / "here"))
    yield server
    server.stop()


def point(folder: Path, place: Path) -> None:
    (folder / "new").symlink_to(place)
    os.replace(folder / "new", folder / "here")


@pytest.fixture
def held(server: Served, folder: Path) -> Answer:
    point(folder, folder / "good")
    return server.ask(prompt_of(server, 200), 8, SLOT, ignore_eos=True)


@contextmanager
def mounted(place: Path, size: str) -> Iterator[None]:
    """A small file system of its own; skips where that is not allowed."""
    place.mkdir(exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no mount here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


# -- no room


def test_a_full_disk_keeps_the_old_file_and_the_slot(server: Served, folder: Path, held: Answer) -> None:
    place = folder / "small"
    with mounted(place, "400k"):
        point(folder, place)
        server.ask(prompt_of(server, 30), 2, 0)
        server.save(0, "a.bin")
        old = (place / "a.bin").read_bytes()
        error = refused(server, SLOT, "save", "a.bin", 507)
        assert error["type"] == "storage_full_error"
        assert error["slot"] == "unchanged"
        assert "a.bin" in error["message"]
        assert (place / "a.bin").read_bytes() == old
        assert leftovers(place) == []
        assert_unchanged(server, SLOT, held)
        assert server.restore(0, "a.bin")["n_read"] == len(old)
        refused(server, SLOT, "save", "b.bin", 507)
        assert [path.name for path in place.iterdir()] == ["a.bin"]
        point(folder, folder / "good")


def test_a_limit_on_the_size_of_files_keeps_the_old_file_and_the_slot(
    server: Served, folder: Path, held: Answer
) -> None:
    """Needs no rights of its own, unlike a mount."""
    server.ask(prompt_of(server, 30), 2, 0)
    server.save(0, "a.bin")
    old = (folder / "good" / "a.bin").read_bytes()
    whole = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (len(old) + 100, whole[1]))
    try:
        error = refused(server, SLOT, "save", "a.bin", 507)
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, whole)
    assert error["slot"] == "unchanged"
    assert (folder / "good" / "a.bin").read_bytes() == old
    assert leftovers(folder / "good") == []
    assert_unchanged(server, SLOT, held)
    saved = server.save(SLOT, "a.bin")
    assert saved["n_written"] == (folder / "good" / "a.bin").stat().st_size > len(old)


# -- no rights


def test_a_read_only_disk_is_read_and_not_written(server: Served, folder: Path, held: Answer) -> None:
    place = folder / "sealed"
    with mounted(place, "8m"):
        point(folder, place)
        server.save(SLOT, "a.bin")
        old = (place / "a.bin").read_bytes()
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        error = refused(server, SLOT, "save", "a.bin", 403)
        assert (error["type"], error["slot"]) == ("permission_error", "unchanged")
        assert (place / "a.bin").read_bytes() == old
        assert leftovers(place) == []
        assert_unchanged(server, SLOT, held)
        assert server.restore(0, "a.bin")["n_read"] == len(old)
        assert server.http.delete("/slot-files/a.bin").status_code == 403
        point(folder, folder / "good")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_directory_without_write_permission(server: Served, folder: Path, held: Answer) -> None:
    place = folder / "mode"
    place.mkdir()
    point(folder, place)
    server.save(SLOT, "a.bin")
    place.chmod(0o500)
    try:
        assert refused(server, SLOT, "save", "a.bin", 403)["slot"] == "unchanged"
        assert_unchanged(server, SLOT, held)
    finally:
        place.chmod(0o700)


def test_a_server_whose_directory_cannot_be_written_does_not_start(
    tmp_path: Path, start_server: Start
) -> None:
    place = tmp_path / "sealed"
    with mounted(place, "1m"):
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        with pytest.raises(ServerDied, match=r"status 1\n.*cannot start: .*sealed"):
            start_server(flags("self", slot_dir=place))


def test_a_missing_directory_is_made_for_the_owner_alone(tmp_path: Path, start_server: Start) -> None:
    place = tmp_path / "a" / "b"
    server = start_server(flags("self", slot_dir=place))
    assert (place.stat().st_mode & 0o777, place.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    server.ask(prompt_of(server, 20), 2)
    saved = server.save(0, "a.bin")
    assert saved["n_written"] == (place / "a.bin").stat().st_size
    assert (place / "a.bin").stat().st_mode & 0o777 == 0o600
    server.stop()


# -- nothing there, or no file


def test_a_directory_that_vanishes_is_not_made_anew(server: Served, folder: Path, held: Answer) -> None:
    point(folder, folder / "vanished")
    for action in ("save", "restore"):
        error = refused(server, SLOT, action, "a.bin", 404)
        assert (error["type"], error["slot"]) == ("not_found_error", "unchanged")
    assert server.http.get("/slot-files").status_code == 404
    assert not (folder / "vanished").exists()
    assert_unchanged(server, SLOT, held)
    point(folder, folder / "good")
    server.save(SLOT, "back.bin")


def directory(path: Path) -> None:
    path.mkdir()


def filled_directory(path: Path) -> None:
    path.mkdir()
    (path / "content").write_text("x")


def link_out(path: Path) -> None:
    (path.parent.parent / "outside.bin").write_text("precious")
    path.symlink_to(path.parent.parent / "outside.bin")


def link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent.parent / "new-outside.bin")


def link_to_a_directory(path: Path) -> None:
    path.symlink_to(path.parent.parent)


def pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "make",
    [directory, filled_directory, link_out, link_to_nothing, link_to_a_directory, pipe],
    ids=lambda make: make.__name__,
)
@pytest.mark.parametrize("action", ["save", "restore"])
def test_a_name_that_is_no_plain_file_is_refused(
    server: Served, folder: Path, held: Answer, action: str, make: Callable[[Path], None]
) -> None:
    path = folder / "good" / f"{make.__name__}-{action}.bin"
    make(path)
    before = path.lstat()
    error = refused(server, SLOT, action, path.name, 400)
    assert (error["slot"], error["param"]) == ("unchanged", "filename")
    assert path.name in error["message"]
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    if make is link_out:
        assert (folder / "outside.bin").read_text() == "precious"
    assert not (folder / "new-outside.bin").exists()
    assert leftovers(folder / "good") == []
    assert_unchanged(server, SLOT, held)
    assert path.name not in [entry["name"] for entry in server.get("/slot-files")["data"]]
    for method in ("GET", "DELETE"):
        response = server.http.request(method, f"/slot-files/{path.name}")
        assert response.status_code == 400, response.text
    assert os.path.lexists(path)


# -- nothing to save


def test_an_empty_slot_saves_and_restores(server: Served, folder: Path) -> None:
    point(folder, folder / "good")
    server.erase(0)
    saved = server.save(0, "empty.bin")
    assert saved["n_saved"] == 0
    assert saved["draft"]["saved"] is False
    assert saved["n_written"] == (folder / "good" / "empty.bin").stat().st_size
    server.ask(prompt_of(server, 20), 2, 0)
    restored = server.restore(0, "empty.bin")
    assert (restored["n_restored"], restored["n_reusable"]) == (0, 0)
    assert server.get("/slots")[0]["n_tokens"] == 0
    assert server.ask(prompt_of(server, 20), 2, 0).timings["cache_n"] == 0
    assert server.http.get("/health").status_code == 200


def test_the_disk_is_asked_while_the_server_answers_others(server: Served, folder: Path) -> None:
    """A save that fails costs nobody else anything: the other slot's answer is what it is alone."""
    point(folder, folder / "good")
    alone = server.ask(prompt_of(server, 50), 40, 0, ignore_eos=True)
    server.erase(0)
    with (
        httpx.Client(base_url=server.base_url, timeout=60) as client,
        client.stream(
            "POST",
            "/completion",
            json={"prompt": list(alone.prompt), "n_predict": 40, "id_slot": 0, "temperature": 0.0}
            | {"ignore_eos": True, "stream": True},
        ) as response,
    ):
        point(folder, folder / "vanished")
        text = ""
        for line in response.iter_lines():
            if line.startswith("data: {"):
                refused(server, SLOT, "save", "a.bin", 404)
                text += json.loads(line[6:])["content"]
    point(folder, folder / "good")
    assert text == alone.text
