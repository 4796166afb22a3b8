"""Bad input gets a clear error and loses nothing: the slot still reuses its tokens, the directory is as it was."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Start
from tests.e2e.served import HYBRID, Answer, Served, flags
from tests.e2e.texts import prompt_of

SLOT = 1


@pytest.fixture
def held(double: Served) -> Answer:
    """A conversation that slot 1 holds and that no bad request may touch."""
    return double.ask(prompt_of(double, 60), 8, SLOT, ignore_eos=True)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for root in (folder.parent, folder)
        for path in root.iterdir()
    }


def assert_error(response: httpx.Response, status: int, *words: str) -> Mapping[str, object]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error: dict[str, object] = response.json()["error"]
    assert error["code"] == status
    assert isinstance(error["type"], str)
    assert error["type"]
    for word in words:
        assert word in str(error["message"]), error
    return error


def assert_unharmed(server: Served, held: Answer) -> None:
    """The next turn processes nothing but what is new."""
    longer = [*held.prompt, *held.tokens, held.tokens[0]]
    assert server.ask(longer, 1, SLOT).timings["cache_n"] == len(held.history)
    assert server.http.get("/health").status_code == 200


# -- file names

BAD_NAMES = [
    "",
    ".",
    "..",
    "...",
    "../x",
    "a/b",
    "a\\b",
    "/etc/x",
    "./a",
    "a/",
    "x\u0000y",
    "x\ny",
    " x",
    "x ",
    "x.",
    ".hidden",
    "n" * 300,
    5,
    1.5,
    True,
    None,
    ["a.bin"],
    {"name": "a.bin"},
]


@pytest.mark.parametrize("action", ["save", "restore"])
@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name)[:12])
def test_only_one_plain_file_name_inside_the_directory_is_taken(
    double: Served, slot_dir: Path, held: Answer, action: str, name: object
) -> None:
    before = listing(slot_dir)
    response = double.http.post(f"/slots/{SLOT}", params={"action": action}, json={"filename": name})
    assert_error(response, 400, "file")
    assert listing(slot_dir) == before
    assert_unharmed(double, held)


@pytest.mark.parametrize("name", ["chat-1_A.bin", "ünïcödé 1.bin", "a..b", "-x", "n" * 255])
def test_a_plain_file_name_is_taken(double: Served, slot_dir: Path, held: Answer, name: str) -> None:
    saved = double.save(SLOT, name)
    assert (slot_dir / name).stat().st_size == saved["n_written"]
    (slot_dir / name).unlink()
    assert_unharmed(double, held)


# -- the slot routes


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/slots/0?action=save", b"", 400, ("body",)),
        ("/slots/0?action=save", b"{", 400, ("JSON",)),
        ("/slots/0?action=save", b"[1]", 400, ("object",)),
        ("/slots/0?action=save", b'"a.bin"', 400, ("object",)),
        ("/slots/0?action=save", b"\xff\xfe", 400, ("JSON",)),
        ("/slots/0?action=save", b"{}", 400, ("filename",)),
        ("/slots/0?action=save", b'{"filename": 5}', 400, ("filename",)),
        ("/slots/0?action=save", b'{"file": "a.bin"}', 400, ("filename",)),
        ("/slots/0?action=restore", b"", 400, ("body",)),
        ("/slots/0?action=restore", b"{}", 400, ("filename",)),
        ("/slots/0?action=foo", b'{"filename": "a.bin"}', 400, ("action", "foo")),
        ("/slots/0?action=", b'{"filename": "a.bin"}', 400, ("action",)),
        ("/slots/0", b'{"filename": "a.bin"}', 400, ("action",)),
        ("/slots/99?action=save", b'{"filename": "a.bin"}', 404, ("slot 99",)),
        ("/slots/2?action=save", b'{"filename": "a.bin"}', 404, ("slot 2",)),
        ("/slots/99?action=restore", b'{"filename": "a.bin"}', 404, ("slot 99",)),
        ("/slots/99?action=erase", b"{}", 404, ("slot 99",)),
        ("/slots/-1?action=erase", b"{}", 404, ("slot -1",)),
        ("/slots/abc?action=erase", b"{}", 400, ("id_slot", "abc")),
        ("/slots/99999999999999999999?action=erase", b"{}", 404, ("slot",)),
        ("/slots/1?action=restore", b'{"filename": "nope.bin"}', 404, ("nope.bin",)),
    ],
)
def test_a_bad_call_of_a_slot_route_says_what_is_wrong(
    double: Served, slot_dir: Path, held: Answer, path: str, body: bytes, status: int, words: tuple[str, ...]
) -> None:
    before = listing(slot_dir)
    assert_error(double.http.post(path, content=body), status, *words)
    assert listing(slot_dir) == before
    assert_unharmed(double, held)


@pytest.mark.parametrize("action", ["save", "restore"])
def test_without_a_directory_nothing_is_saved_or_restored(plain: Served, action: str) -> None:
    held = plain.ask(prompt_of(plain, 20), 4)
    response = plain.http.post("/slots/0", params={"action": action}, json={"filename": "a.bin"})
    assert_error(response, 501, "--slot-save-path")
    longer = [*held.prompt, *held.tokens, 5]
    assert plain.ask(longer, 1).timings["cache_n"] == len(held.history)


# -- files


@pytest.fixture
def whole(double: Served, slot_dir: Path, held: Answer) -> Path:
    double.ask(prompt_of(double, 30, skip=9), 4, 0)
    double.save(0, "whole.bin")
    return slot_dir / "whole.bin"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.4, 0.999])
def test_a_truncated_file_is_refused_and_the_slot_stays(
    double: Served, slot_dir: Path, whole: Path, held: Answer, share: float
) -> None:
    data = whole.read_bytes()
    (slot_dir / "cut.bin").write_bytes(data[: int(share * len(data))])
    response = double.http.post(f"/slots/{SLOT}?action=restore", json={"filename": "cut.bin"})
    assert assert_error(response, 400)["slot"] == "unchanged"
    assert_unharmed(double, held)
    assert double.restore(SLOT, "whole.bin")["n_restored"] == 33


def test_a_file_cut_off_in_its_draft_block_restores_its_target_and_says_so(
    double: Served, slot_dir: Path, whole: Path
) -> None:
    """No footer is left, so nothing of it is verified, and the answer says that too."""
    double.restore(0, "whole.bin")
    live = double.ask([*prompt_of(double, 30, skip=9), *([500] * 5)], 24, 0, ignore_eos=True)
    (slot_dir / "cut.bin").write_bytes(whole.read_bytes()[: int(0.8 * whole.stat().st_size)])
    restored = double.restore(SLOT, "cut.bin")
    assert (restored["n_restored"], restored["checksum"]) == (33, "absent")
    assert (restored["draft"]["restored"], restored["draft"]["reason"]) == (False, "truncated")
    again = double.ask(live.prompt, 24, SLOT, ignore_eos=True)
    assert again.timings["cache_n"] == live.timings["cache_n"]
    assert again.timings["draft_prompt_n"] > 0
    assert again.text == live.text


def test_a_file_of_another_model_is_refused_and_the_slot_stays(
    double: Served, slot_dir: Path, held: Answer, start_server: Start
) -> None:
    other = start_server(flags("hybrid", slot_dir=slot_dir))
    other.ask(prompt_of(other, 30), 4)
    other.save(0, "other.bin")
    other.stop()
    response = double.http.post(f"/slots/{SLOT}?action=restore", json={"filename": "other.bin"})
    error = assert_error(response, 400, "model")
    assert error["slot"] == "unchanged"
    assert HYBRID.name in json.dumps(error)
    assert_unharmed(double, held)


def test_a_file_that_is_no_slot_file_is_refused(double: Served, slot_dir: Path, held: Answer) -> None:
    (slot_dir / "text.bin").write_text("no slot file\n" * 100)
    response = double.http.post(f"/slots/{SLOT}?action=restore", json={"filename": "text.bin"})
    assert assert_error(response, 400)["slot"] == "unchanged"
    assert_unharmed(double, held)


# -- prompts and limits


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_a_prompt_longer_than_the_context_gets_both_numbers(
    double: Served, held: Answer, path: str, stream: bool
) -> None:
    n_ctx = double.get("/props")["n_ctx"]
    if path == "/v1/chat/completions":
        text = "word " * (n_ctx + 50)
        n_prompt = len(double.chat_tokens([{"role": "user", "content": text}]))
        body: dict[str, object] = {"messages": [{"role": "user", "content": text}]}
    else:
        n_prompt = n_ctx + 50
        body = {"prompt": [500] * n_prompt}
    body |= {"stream": stream, "id_slot": SLOT, "max_tokens": 4}
    error = assert_error(double.http.post(path, json=body), 400, str(n_prompt), str(n_ctx))
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (n_prompt, n_ctx)
    assert_unharmed(double, held)


def test_a_prompt_of_very_many_special_tokens_is_refused_in_little_time(double: Served, held: Answer) -> None:
    n_ctx = double.get("/props")["n_ctx"]
    started = time.monotonic()
    body = {"messages": [{"role": "user", "content": "a"}] * 40_000}
    error = assert_error(double.http.post("/v1/chat/completions", json=body), 400, "at least", str(n_ctx))
    assert error["type"] == "exceed_context_size_error"
    assert n_ctx < int(str(error["n_prompt_tokens"])) < 40_000 * 6
    text = "<|im_start|>user\na<|im_end|>\n" * 40_000
    assert len(double.tokens(text)) == 40_000 * 6
    assert time.monotonic() - started < 20  # by the square of their number it takes ten times that
    assert_unharmed(double, held)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -2),
        ("max_tokens", "many"),
        ("max_tokens", 2.5),
        ("n_predict", -5),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 2),
        ("id_slot", 99),
        ("id_slot", -2),
        ("seed", "x"),
        ("stop", 5),
        ("logit_bias", {"abc": 1}),
    ],
)
def test_a_bad_value_is_refused_by_name(
    double: Served, held: Answer, path: str, stream: bool, field: str, value: object
) -> None:
    body: dict[str, object] = {"id_slot": SLOT, "stream": stream, field: value}
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": "Hi"}]
    else:
        body["prompt"] = "Hi"
    response = double.http.post(path, json=body)
    status = 404 if value == 99 else 400
    assert_error(response, status, "slot 99" if value == 99 else field)
    assert_unharmed(double, held)


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"not json", b"[]", b"5", b"\xff"])
def test_a_body_that_is_no_json_object_is_refused(
    double: Served, held: Answer, path: str, body: bytes
) -> None:
    assert_error(double.http.post(path, content=body), 400, "body")
    assert_unharmed(double, held)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": "Hi"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"content": "Hi"}]},
        {"messages": [5]},
    ],
)
def test_messages_that_are_none_are_refused(double: Served, held: Answer, body: dict[str, object]) -> None:
    assert_error(double.http.post("/v1/chat/completions", json={"id_slot": SLOT, **body}), 400, "messages")
    assert_unharmed(double, held)


@pytest.mark.parametrize("prompt", [[], [-1], [10**9], [1.5], [[1], [2]], {"a": 1}, None])
def test_a_prompt_that_is_none_is_refused(double: Served, held: Answer, prompt: object) -> None:
    body = {"id_slot": SLOT, "prompt": prompt}
    assert_error(double.http.post("/completion", json=body), 400, "prompt")
    assert_unharmed(double, held)


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_0_processes_the_prompt_and_generates_nothing(double: Served, stream: bool) -> None:
    prompt = prompt_of(double, 50)
    body = {"prompt": prompt, "n_predict": 0, "id_slot": SLOT, "stream": stream}
    response = double.http.post("/completion", json=body)
    assert response.status_code == 200
    last = response.text.strip().rpartition("data: ")[2]
    answer = json.loads(last)
    assert (answer["content"], answer["stop_type"], answer["tokens_predicted"]) == ("", "limit", 0)
    assert answer["timings"]["prompt_n"] == 50
    assert double.ask([*prompt, 5], 1, SLOT).timings["cache_n"] == 50


def test_max_tokens_minus_1_goes_on_to_the_context_s_end(double: Served) -> None:
    n_ctx = double.get("/props")["n_ctx"]
    prompt = prompt_of(double, n_ctx - 20)
    answer = double.ask(prompt, -1, SLOT, ignore_eos=True)
    assert len(answer.tokens) == 21
    assert answer.stop_type == "limit"
