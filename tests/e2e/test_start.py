"""From the first moment to the last: what a server says while it loads, of its drafter, and when it cannot start."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from eval.models import DRAFTER, target
from eval.server import ServerProcess, free_port
from tests.e2e.conftest import Start
from tests.e2e.served import HYBRID, PAIRS, WINDOW, Served, flags

QUESTION = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}


# -- loading


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A process that was started right now, and its address."""
    port = free_port()
    argv = [sys.executable, "-m", "spec_server", *flags("real"), "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    yield f"http://127.0.0.1:{port}", process
    process.terminate()
    assert process.wait(10) == 0


def test_health_is_200_only_when_a_request_can_be_served(
    starting: tuple[str, subprocess.Popen[bytes]],
) -> None:
    url, process = starting
    refused: list[httpx.Response] = []
    deadline = time.monotonic() + 60
    with httpx.Client(base_url=url, timeout=30) as http:
        while time.monotonic() < deadline:
            assert process.poll() is None
            try:
                chat = http.post("/v1/chat/completions", json=QUESTION)
                health = http.get("/health")
            except httpx.TransportError:
                continue
            if health.status_code == 200:
                break
            refused += [chat, health]
        answer = http.post("/v1/chat/completions", json=QUESTION)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert len(refused) >= 2, "the server was never seen loading"
    for response in refused[1:]:
        assert response.status_code == 503
        error = response.json()["error"]
        assert (error["code"], error["type"]) == (503, "unavailable_error")
        assert "oading" in error["message"]
        assert int(response.headers["retry-after"]) >= 1


def test_a_server_that_is_stopped_while_it_loads_ends_in_order(tmp_path: Path) -> None:
    port = free_port()
    argv = [sys.executable, "-m", "spec_server", *flags("real"), "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health")
            break
        except httpx.TransportError:
            continue
    process.terminate()
    assert process.wait(15) == 0
    assert b"Traceback" not in (tmp_path / "log").read_bytes()


def test_a_server_that_is_stopped_while_it_tokenises_does_not_wait_for_that(start_server: Start) -> None:
    server = start_server(["-m", str(WINDOW), "-np", "1", "-c", "256", "-t", "1"])
    statuses: list[int] = []

    def ask() -> None:
        text = "<|im_start|>" * 4_000_000  # half a minute's work
        statuses.append(
            httpx.post(f"{server.base_url}/tokenize", json={"content": text}, timeout=60).status_code
        )

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(3)
    assert not statuses, "over too soon to show anything"
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < 4
    asking.join()
    assert statuses == [503]
    assert "shutting down" in server.log


# -- what it says of its drafter


def test_props_say_what_drafts_and_how_far_it_looks(real: Served) -> None:
    facts = real.get("/props")["speculative"]
    assert facts["enabled"] is True
    assert facts["draft_model"] == DRAFTER.name
    assert facts["n_ctx"] == real.get("/props")["n_ctx"] == 2048
    assert facts["n_max"] == 3
    assert f"{target().name}: 1 slot of 2048 tokens, drafting draft-simple" in real.log
    assert real.post("/v1/chat/completions", QUESTION)["timings"]["draft_n"] > 0


def test_props_say_that_nothing_drafts_and_why(plain: Served) -> None:
    facts = plain.get("/props")["speculative"]
    assert facts["enabled"] is False
    assert facts["reason"]
    assert "drafting none" in plain.log
    assert plain.post("/v1/chat/completions", QUESTION)["timings"]["draft_n"] == 0


def test_a_draft_model_without_a_type_drafts(real: Served) -> None:
    """Given no --spec-type; a server that loads the file and never drafts would be a silent loss."""
    assert "--spec-type" not in flags("real")
    assert real.get("/props")["speculative"]["type"] == "draft-simple"


def test_slot_draft_is_told_where_slots_can_be_saved(real: Served, plain: Served) -> None:
    assert real.get("/props")["slot_draft"] is True
    assert plain.get("/props")["slot_draft"] is False


def test_a_draft_context_of_its_own_size_is_told_and_still_drafts_beyond_it(start_server: Start) -> None:
    server = start_server(flags("self", "-cd", "256"))
    assert server.get("/props")["speculative"]["n_ctx"] == 256
    answer = server.ask(server.tokens("one two three four five " * 80), 64, ignore_eos=True)
    assert len(answer.prompt) > 300
    assert answer.timings["draft_n"] > 0
    server.stop()


def test_layers_for_an_accelerator_that_is_not_there_are_told(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "spec_server", *flags("self"), "-ngl", "99"]
    with ServerProcess(argv, log_path=tmp_path / "log"):
        pass
    told = [line for line in (tmp_path / "log").read_text().splitlines() if "-ngl 99" in line]
    assert len(told) == 1
    assert "no accelerator" in told[0]


# -- drafters that do not fit


def permuted(folder: Path) -> Path:
    """The drafter with the names of two of its tokens exchanged: as many tokens, another meaning."""
    data = bytearray(DRAFTER.read_bytes())
    places = []
    for word in ("\u0120house", "\u0120water"):
        name = struct.pack("<Q", len(word.encode())) + word.encode()
        places.append((data.index(name), name))
    (first, house), (second, water) = places
    data[first : first + len(house)], data[second : second + len(water)] = water, house
    path = folder / "permuted.gguf"
    path.write_bytes(data)
    return path


def run_until_it_ends(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spec_server", *argv, "--port", str(free_port())],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_drafter_of_another_vocabulary_is_refused_at_the_start(tmp_path: Path) -> None:
    for model, draft, words in (
        (DRAFTER, HYBRID, ("vocabulary", "49152", "4096")),
        (DRAFTER, permuted(tmp_path), ("vocabulary", " house", " water")),
    ):
        ended = run_until_it_ends([*flags("self"), "-m", str(model), "-md", str(draft)])
        assert ended.returncode == 1
        assert "Traceback" not in ended.stderr
        [line] = [line for line in ended.stderr.splitlines() if "cannot start" in line]
        for word in words:
            assert word in line


@pytest.mark.parametrize("flag", ["-m", "-md"])
@pytest.mark.parametrize("kind", ["missing", "no model", "cut off"])
def test_a_file_that_is_no_model_ends_the_start_with_its_name(tmp_path: Path, flag: str, kind: str) -> None:
    path = tmp_path / "model.gguf"
    if kind == "no model":
        path.write_text("no model at all")
    if kind == "cut off":
        path.write_bytes(DRAFTER.read_bytes()[: 3 << 20])
    ended = run_until_it_ends([*flags("self"), flag, str(path)])
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert str(path) in ended.stderr
    if kind != "cut off":  # seen before any model is read
        assert f"--model{'-draft' * (flag == '-md')}: " in ended.stderr
        assert "slots of" not in ended.stderr


def test_a_slot_directory_that_is_none_ends_the_start_with_its_flag(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    ended = run_until_it_ends([*flags("self"), "--slot-save-path", str(path)])
    assert ended.returncode == 1
    [line] = [line for line in ended.stderr.splitlines() if "cannot start" in line]
    assert "--slot-save-path: " in line
    assert str(path) in line


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--spec-draft-nmax", "3"], "--spec-draft-n-max"),
        (["--spec-draft-n-max", "-2"], "--spec-draft-n-max"),
        (["--spec-type", "magic"], "magic"),
        (["-np", "0"], "--parallel"),
        (["-c", "many"], "--ctx-size"),
        (["-c", "7", "-np", "8", "-kvu"], "--ctx-size"),
    ],
)
def test_a_flag_that_is_wrong_ends_the_start_in_one_line(argv: list[str], word: str) -> None:
    ended = run_until_it_ends(["-m", str(PAIRS["self"][0]), *argv])
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert word in line


def test_the_port_that_is_taken_is_said(double: Served) -> None:
    port = double.base_url.rpartition(":")[2]
    ended = subprocess.run(
        # No such model: a taken port is said before one is looked for.
        [sys.executable, "-m", "spec_server", "-m", "/nowhere/model.gguf", "--port", port],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    [line] = ended.stderr.splitlines()
    assert f"cannot start: --port {port} on 127.0.0.1" in line


def test_a_template_that_cannot_be_compiled_ends_the_start() -> None:
    ended = run_until_it_ends(["-m", "/nowhere/model.gguf", "--chat-template", "{{ messages"])
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert "--chat-template: " in line
