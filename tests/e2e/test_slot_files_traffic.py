"""Transfers beside requests and beside each other: in order, whole, and without a part in anybody else's answer."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from persistence.files import SystemFiles
from persistence.reader import SlotFile
from tests.e2e.conftest import Start
from tests.e2e.served import Answer, Served, body_of, flags, until
from tests.e2e.slot_files import leftovers
from tests.e2e.texts import prompt_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traffic")


@pytest.fixture(scope="module")
def server(folder: Path, start_server: Start) -> Iterator[Served]:
    server = start_server(flags("self", slots=4, slot_dir=folder))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _clean(server: Served, folder: Path) -> Iterator[None]:
    yield
    server.erase_all()
    assert leftovers(folder) == []
    for path in folder.iterdir():
        path.unlink()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def verified(path: Path) -> int:
    """The number of tokens of a file without a fault."""
    with SlotFile.open(path, SystemFiles()) as file:
        assert file.verify() == []
        return len(file.tokens)


def post(server: Served, path: str, body: object) -> httpx.Response:
    """On a connection of its own."""
    return httpx.post(f"{server.base_url}{path}", json=body, timeout=60)


def transfer(server: Served, slot: int, action: str, name: str) -> httpx.Response:
    return post(server, f"/slots/{slot}?action={action}", {"filename": name})


def text_of(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[6:])["content"]


def test_other_slots_go_on_while_one_is_saved_and_restored(
    server: Served, folder: Path, pool: ThreadPoolExecutor
) -> None:
    alone = server.ask(prompt_of(server, 40), 300, 0, ignore_eos=True)
    server.erase(0)
    held = server.ask(prompt_of(server, 1500, skip=5), 2, 1, ignore_eos=True)
    busy = threading.Event()
    pieces_between: list[int] = []
    pieces: list[str] = []

    def transfers() -> None:
        busy.wait(30)
        while busy.is_set():
            before = len(pieces)
            assert transfer(server, 1, "save", "a.bin").status_code == 200
            assert transfer(server, 2, "restore", "a.bin").status_code == 200
            pieces_between.append(len(pieces) - before)

    working = pool.submit(transfers)
    body = body_of(alone.prompt, 300, 0, ignore_eos=True, stream=True)
    with httpx.stream("POST", f"{server.base_url}/completion", json=body, timeout=60) as response:
        for text in text_of(response.iter_lines()):
            pieces.append(text)
            busy.set()
    busy.clear()
    working.result(30)
    assert "".join(pieces) == alone.text
    assert sum(pieces_between) > 0
    for slot in (1, 2):
        got = server.ask([*held.history, 9], 1, slot)
        assert got.timings["cache_n"] == len(held.history)


def test_saves_to_one_name_leave_one_of_them(server: Served, folder: Path, pool: ThreadPoolExecutor) -> None:
    lengths = {slot: 100 + 400 * slot for slot in range(4)}
    for slot, n in lengths.items():
        server.ask(prompt_of(server, n, skip=slot), 1, slot)
    for _ in range(5):
        saves = [pool.submit(transfer, server, slot, "save", "one.bin") for slot in (0, 1, 2, 3, 0, 1)]
        answers = [save.result(60) for save in saves]
        assert [answer.status_code for answer in answers] == [200] * 6
        found = verified(folder / "one.bin")
        assert found in lengths.values()
        written = {a.json()["n_written"] for a in answers if a.json()["n_saved"] == found}
        assert (folder / "one.bin").stat().st_size in written


def test_a_reader_never_sees_half_of_a_save(server: Served, folder: Path, pool: ThreadPoolExecutor) -> None:
    for slot, n in ((0, 50), (1, 1800)):
        server.ask(prompt_of(server, n, skip=slot), 1, slot)
    server.save(0, "one.bin")
    ended = threading.Event()

    def save() -> None:
        for i in range(12):
            assert transfer(server, i % 2, "save", "one.bin").status_code == 200
        ended.set()

    saving = pool.submit(save)
    seen = set()
    while not ended.is_set():
        seen.add(verified(folder / "one.bin"))
        restored = transfer(server, 2, "restore", "one.bin")
        assert restored.status_code == 200, restored.text
        assert restored.json()["n_restored"] in (50, 1800)
        assert restored.json()["draft"]["restored"] is True
    saving.result(60)
    assert seen <= {50, 1800}


def send(server: Served, path: str, body: object) -> socket.socket:
    """A request on its way; nothing is waited for."""
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", httpx.URL(server.base_url).port or 80), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def answer_to(sock: socket.socket) -> dict[str, Any]:
    with sock, sock.makefile("rb") as file:
        head, _, body = file.read().partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], body
    answer: dict[str, Any] = json.loads(body)
    return answer


def test_a_restore_and_a_chat_of_the_same_instant_are_served_one_after_the_other(server: Served) -> None:
    """Never a prompt that is processed and then thrown away in the middle, never a file over a newer answer."""
    first = server.ask(prompt_of(server, 1000), 2, 3, ignore_eos=True)
    n = len(first.history)
    server.save(3, "chat.bin")
    n_restored_first = 0
    for _ in range(8):
        server.erase_all()
        restoring = send(server, "/slots/3?action=restore", {"filename": "chat.bin"})
        chatting = send(server, "/completion", body_of([*first.history, 9], 8, 3, ignore_eos=True))
        restored, chat = answer_to(restoring), answer_to(chatting)
        assert restored["n_restored"] == n
        holds = server.get("/slots")[3]["n_tokens"]
        assert (chat["timings"]["cache_n"], holds) in ((n, n + 1 + 7), (0, n))
        n_restored_first += holds > n
    assert n_restored_first >= 1


def test_an_automatic_choice_finds_the_restored_slot(server: Served) -> None:
    first = server.ask(prompt_of(server, 1000), 2, 3, ignore_eos=True)
    server.save(3, "chat.bin")
    server.erase_all()
    server.restore(2, "chat.bin")
    chat = server.ask([*first.history, 9], 1, -1)
    assert (chat.timings["cache_n"], chat.id_slot) == (len(first.history), 2)


def test_a_chat_under_way_ends_before_a_restore_replaces_it(server: Served, pool: ThreadPoolExecutor) -> None:
    server.ask(prompt_of(server, 300), 1, 1)
    server.save(1, "other.bin")
    alone = server.ask(prompt_of(server, 30, skip=3), 120, 2, ignore_eos=True)
    server.erase(2)
    chat = pool.submit(post, server, "/completion", body_of(alone.prompt, 120, 2, ignore_eos=True))
    assert until(lambda: 2 in server.busy(), 20)
    restored = transfer(server, 2, "restore", "other.bin")
    assert restored.json()["n_restored"] == 300
    assert chat.result(60).json()["content"] == alone.text
    assert server.get("/slots")[2]["n_tokens"] == 300


def test_clients_that_leave_during_transfers_leave_slots_and_files_whole(
    server: Served, folder: Path
) -> None:
    held: dict[int, Answer] = {}
    for slot, n in ((0, 60), (1, 1900)):
        held[slot] = server.ask(prompt_of(server, n, skip=slot), 2, slot, ignore_eos=True)
        server.save(slot, f"{slot}.bin")
    rng = random.Random(4)
    for i in range(40):
        action, slot = rng.choice(("save", "restore")), i % 2
        name = "left.bin" if action == "save" else f"{slot}.bin"
        with suppress(httpx.TimeoutException):
            httpx.post(
                f"{server.base_url}/slots/{slot}",
                params={"action": action},
                json={"filename": name},
                timeout=httpx.Timeout(10, read=rng.uniform(0.0001, 0.004)),
            )
    for slot, answer in held.items():
        got = server.ask([*answer.history, 9], 1, slot)
        assert got.timings["cache_n"] == len(answer.history)
        assert transfer(server, slot, "save", "last.bin").json()["n_saved"] == len(answer.history) + 1
    if (folder / "left.bin").exists():
        assert verified(folder / "left.bin") in {len(answer.history) for answer in held.values()}


def test_an_orderly_end_waits_for_nothing_and_leaves_whole_files(
    start_server: Start, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    server = start_server(flags("self", slot_dir=tmp_path))
    server.ask(prompt_of(server, 1900), 1)
    server.save(0, "a.bin")

    def saves() -> None:
        while transfer(server, 0, "save", "a.bin").status_code == 200:
            pass

    working = pool.submit(ignoring(saves))
    time.sleep(0.1)
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 10
    working.result(10)
    assert verified(tmp_path / "a.bin") == 1900
    assert leftovers(tmp_path) == []


def ignoring(work: Callable[[], Any]) -> Callable[[], None]:
    """`work` until the connection breaks."""

    def run() -> None:
        try:
            work()
        except httpx.TransportError:
            return

    return run
