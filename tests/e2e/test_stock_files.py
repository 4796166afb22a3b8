"""Files go to and from programs that know llama.cpp only: its own calls, in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Start
from tests.e2e.served import PAIRS, Served, differences, flags
from tests.e2e.texts import conversations, prompt_of, straight

CHILD = Path(__file__).with_name("stock_child.py")
PAIR_NAMES = ["self", "hybrid", "window", pytest.param("real", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=PAIR_NAMES)
def pair(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(pair: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"stock-{pair}")


@pytest.fixture(scope="module")
def single(pair: str, folder: Path, start_server: Start) -> Iterator[Served]:
    server = start_server(flags(pair, slot_dir=folder))
    yield server
    server.stop()


def batches(pair: str, prompt: list[int]) -> list[list[int]]:
    """As the server decodes it: where memory needs checkpoints, one is taken 4 tokens before the end."""
    return [prompt[:-4], prompt[-4:]] if pair in ("hybrid", "window") else [prompt]


def stock(
    pair: str, command: str, path: Path, last: str | Path, tokens: list[list[int]] | None = None
) -> dict[str, Any]:
    argv = [sys.executable, str(CHILD), command, str(PAIRS[pair][0]), str(path), str(last)]
    done = subprocess.run(argv, input=json.dumps(tokens), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_our_payload_is_what_llama_writes_byte_for_byte(pair: str, single: Served, folder: Path) -> None:
    """The prompt was decoded twice, here and there, in the same batches."""
    prompt = prompt_of(single, 90)
    single.erase(0)
    [token] = single.ask(prompt, 1).tokens
    single.save(0, "ours.bin")
    made = stock(pair, "make", folder / "theirs.bin", "packed", batches(pair, prompt))
    theirs = (folder / "theirs.bin").read_bytes()
    ours = (folder / "ours.bin").read_bytes()
    assert made["bytes"] == len(theirs)
    assert made["next"] == token
    assert len(ours) > len(theirs)
    assert ours[: len(theirs)] == theirs


def test_llama_takes_our_whole_file_and_writes_its_payload_again(
    pair: str, single: Served, folder: Path
) -> None:
    """After an answer with drafts taken and refused, and with everything that follows the payload in the file."""
    first = single.ask(single.chat_tokens(conversations(4)[3]), 48, ignore_eos=True)
    saved = single.save(0, "whole.bin")
    assert saved["draft"]["saved"] is True
    loaded = stock(pair, "load", folder / "whole.bin", folder / "copy.bin")
    assert tuple(loaded["tokens"]) == first.history
    copy = (folder / "copy.bin").read_bytes()
    whole = (folder / "whole.bin").read_bytes()
    assert len(copy) < len(whole)
    assert whole[: len(copy)] == copy


@pytest.mark.parametrize("form", ["packed", "plain"])
def test_a_stock_file_restores(pair: str, single: Served, folder: Path, form: str) -> None:
    prompt = prompt_of(single, 120, skip=4)
    made = stock(pair, "make", folder / f"{form}.bin", form, batches(pair, prompt))
    single.erase(0)
    restored = single.restore(0, f"{form}.bin")
    assert (restored["n_restored"], restored["n_read"]) == (120, made["bytes"])
    assert restored["checksum"] == "absent"
    assert restored["draft"]["restored"] is False
    assert restored["draft"]["reason"]
    answer = single.ask([*prompt, made["next"]], 32, ignore_eos=True)
    assert (answer.timings["cache_n"], answer.timings["prompt_n"]) == (120, 1)
    assert answer.timings["draft_prompt_n"] == 121
    single.erase(0)
    live = single.ask(prompt, 1, ignore_eos=True)
    again = single.ask([*prompt, *live.tokens], 32, ignore_eos=True)
    assert answer.text == again.text


def test_our_payload_alone_is_a_stock_file(pair: str, single: Served, folder: Path) -> None:
    """Cut off behind the payload, as a stock server leaves it when it saves what it restored."""
    single.erase(0)
    first = single.ask(single.chat_tokens(conversations(4)[3]), 48, ignore_eos=True)
    single.save(0, "whole.bin")
    live = single.ask(straight(single, first), 48, ignore_eos=True)
    stock(pair, "load", folder / "whole.bin", folder / "payload.bin")
    restored = single.restore(0, "payload.bin")
    assert restored["n_restored"] == len(first.history)
    assert restored["n_ckpt_restored"] == 0
    answer = single.ask(live.prompt, 48, ignore_eos=True)
    found = differences(live, answer)
    assert answer.timings["cache_n"] == len(first.history)
    assert "text" not in found
    assert answer.timings["draft_prompt_n"] == len(live.prompt)
