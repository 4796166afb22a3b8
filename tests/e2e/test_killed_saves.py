"""A server that is killed at any moment of a save leaves the old file or the new one under the name, whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from eval.server import free_port
from persistence.files import SystemFiles
from persistence.reader import SlotFile
from tests.e2e.conftest import Start
from tests.e2e.served import Answer, flags
from tests.e2e.slot_files import leftovers
from tests.e2e.texts import prompt_of

pytestmark = pytest.mark.crash
ZYGOTE = Path(__file__).with_name("zygote.py")
LENGTHS = {"small.bin": 30, "big.bin": 1900}
PAIR = "hybrid"  # small vocabularies start quickly, and its files have every section
SEED = 3


class Victims:
    """Servers on one directory, one after the other."""

    def __init__(self, argv: list[str], log: Path) -> None:
        self._argv, self._log = argv, log
        self._zygote: subprocess.Popen[str] | None = None
        self.pid = 0
        self.http = httpx.Client()

    def __enter__(self) -> Victims:
        with self._log.open("ab") as log:
            self._zygote = subprocess.Popen(
                [sys.executable, str(ZYGOTE), *self._argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "GOMP_SPINCOUNT": "300", "PYTHONPATH": "."},
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        assert self._zygote is not None
        self._zygote.communicate(timeout=30)

    def start(self) -> None:
        assert self._zygote is not None
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        port = free_port()
        self._zygote.stdin.write(f"{port}\n")
        self._zygote.stdin.flush()
        self.pid = int(self._zygote.stdout.readline())
        self.http.close()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise AssertionError(f"not ready: {self._log.read_text()[-2000:]}")

    @contextmanager
    def running(self) -> Iterator[None]:
        """The next server; killed at the end, whatever happens."""
        self.start()
        try:
            yield
        finally:
            self.kill()

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.pid = 0

    def post(self, slot: int, action: str, name: str) -> httpx.Response:
        return self.http.post(f"/slots/{slot}", params={"action": action}, json={"filename": name})


class Saver:
    """Saves slot 0 (small) and slot 1 (big) in turn under one name, until the server is gone."""

    def __init__(self, victims: Victims, on_disk: str) -> None:
        self._victims = victims
        self.may_be = {on_disk}  # what the name may stand for
        self.n_done = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while True:
                for slot, name in enumerate(LENGTHS):
                    self.may_be.add(name)
                    response = self._victims.post(slot, "save", "a.bin")
                    assert response.status_code == 200, response.text
                    self.may_be = {name}
                    self.n_done += 1
        except httpx.TransportError:
            return

    def until_killed_after(self, seconds: float) -> None:
        self._thread.start()
        time.sleep(seconds)
        self._victims.kill()
        self._thread.join(30)
        assert not self._thread.is_alive()


def tokens_of(path: Path) -> int:
    """Of a file that is whole to its last byte."""
    with SlotFile.open(path, SystemFiles()) as file:
        assert file.verify() == []
        return len(file.tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, start_server: Start) -> tuple[Path, dict[str, Answer]]:
    """A directory with a small and a big conversation, and how each goes on."""
    folder = tmp_path_factory.mktemp("killed")
    server = start_server(flags(PAIR, slot_dir=folder))
    goes_on = {}
    for name, n in LENGTHS.items():
        server.erase(0)
        first = server.ask(prompt_of(server, n), 1, ignore_eos=True)
        server.save(0, name)
        goes_on[name] = server.ask([*first.prompt, 7], 4, ignore_eos=True)
    server.stop()
    return folder, goes_on


def run(folder: Path, goes_on: dict[str, Answer], log: Path, n_kills: int) -> None:
    rng = random.Random(SEED)
    n_torn = n_done = 0
    on_disk = "small.bin"
    shutil.copy(folder / on_disk, folder / "a.bin")
    with Victims(flags(PAIR, slots=2, slot_dir=folder), log) as victims:
        for _ in range(n_kills):
            with victims.running():
                assert leftovers(folder) == []
                check_restore(victims, goes_on, on_disk)
                for slot, name in enumerate(LENGTHS):
                    assert victims.post(slot, "restore", name).status_code == 200
                saver = Saver(victims, on_disk)
                saver.until_killed_after(rng.uniform(0.0, 0.12))
            n_torn += bool(leftovers(folder))
            n_done += saver.n_done
            n_tokens = tokens_of(folder / "a.bin")
            on_disk = next(name for name, n in LENGTHS.items() if n == n_tokens)
            assert on_disk in saver.may_be
        with victims.running():
            assert leftovers(folder) == []
            check_restore(victims, goes_on, on_disk)
    # else the moments were chosen badly, and nothing is proved
    assert n_torn >= max(1, n_kills // 10)
    assert n_done >= n_kills // 2


def check_restore(victims: Victims, goes_on: dict[str, Answer], on_disk: str) -> None:
    restored = victims.post(0, "restore", "a.bin")
    assert restored.status_code == 200, restored.text
    body = restored.json()
    assert (body["n_restored"], body["checksum"]) == (LENGTHS[on_disk], "verified")
    expected = goes_on[on_disk]
    answer = victims.http.post(
        "/completion",
        json={"prompt": list(expected.prompt), "n_predict": 4, "id_slot": 0, "temperature": 0.0}
        | {"ignore_eos": True, "return_tokens": True},
    ).json()
    assert answer["timings"]["cache_n"] == LENGTHS[on_disk]
    assert tuple(answer["tokens"]) == expected.tokens


def test_a_killed_save_leaves_the_old_file_or_the_new_one(
    folder: tuple[Path, dict[str, Answer]], tmp_path: Path
) -> None:
    run(*folder, tmp_path / "log", 20)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_killed_saves_leave_the_old_file_or_the_new_one(
    folder: tuple[Path, dict[str, Answer]], tmp_path: Path
) -> None:
    run(*folder, tmp_path / "log", 200)
