"""Whatever bytes a slot file has: the server lives, answers, and its slots are what the answer says they are.

200 files by default; `-m slow` tries FUZZ_FILES, 5,000 unless the environment says otherwise. FUZZ_SEED picks others.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Start
from tests.e2e.mutations import Parts, mutate, take_apart
from tests.e2e.served import Answer, Served, flags
from tests.e2e.texts import prompt_of

PAIRS = ("self", "hybrid", "window")
SEED = int(os.environ.get("FUZZ_SEED", "1"))
N_FILES = 200
N_FILES_SLOW = int(os.environ.get("FUZZ_FILES", "5000"))
SLOT = 1


@dataclass(frozen=True)
class Talk:
    """A fresh prompt, its answer, the prompt that goes on from there, and its answer."""

    fresh: Answer
    more: Answer


class Fuzzed:
    """A server, the files to damage, and what it says when nothing is damaged."""

    def __init__(self, server: Served, folder: Path, pair: str) -> None:
        self.server, self.folder, self.pair = server, folder, pair
        self.files = self._make_files()
        # no token in common with the files or each other: nothing of an earlier slot can be reused
        self.talks = [self._talk(3000 + 11 * i) for i in range(2)]
        self.outcomes: Counter[str] = Counter()

    def _make_files(self) -> list[Parts]:
        text = prompt_of(self.server, 400)
        files = []
        for name, n in (("long.bin", 330), ("short.bin", 40)):
            self.server.erase(SLOT)
            self.server.ask(text[:n], 6, SLOT, ignore_eos=True)
            self.server.save(SLOT, name)
            files.append(take_apart(self.folder / name))
        return files

    def _talk(self, first: int) -> Talk:
        self.server.erase(SLOT)
        prompt = [first, *prompt_of(self.server, 20, skip=first % 50)]
        fresh = self.server.ask(prompt, 5, SLOT, ignore_eos=True)
        more = self.server.ask([*fresh.history, first], 4, SLOT, ignore_eos=True)
        assert more.timings["cache_n"] == len(fresh.history)
        return Talk(fresh, more)

    def run(self, n_files: int) -> None:
        rng = random.Random(SEED)
        self._ask(self.talks[-1].fresh)
        for i in range(n_files):
            what, data = mutate(rng, rng.choice(self.files))
            path = self.folder / "damaged.bin"
            path.write_bytes(data)
            try:
                self._one(self.talks[i % 2 - 1], self.talks[i % 2])
            except (AssertionError, httpx.HTTPError) as error:
                kept = self.folder / f"failed-{i}.bin"
                path.rename(kept)
                raise AssertionError(f"file {i}, {what}, kept as {kept}: {error!r}") from error

    def _one(self, before: Talk, after: Talk) -> None:
        """The slot holds before.fresh: restore, look, then a prompt that shares nothing with it."""
        listed = self.server.http.get("/slot-files/damaged.bin")
        assert listed.status_code == 200, listed.text
        response = self.server.http.post(
            f"/slots/{SLOT}", params={"action": "restore"}, json={"filename": "damaged.bin"}
        )
        assert response.status_code in (200, 400), response.text
        slot = self.server.get("/slots")[SLOT]
        if response.status_code == 200:
            body = response.json()
            assert slot["n_tokens"] == body["n_restored"] == body["n_reusable"]
            assert len(slot["checkpoints"]) == body["n_ckpt_restored"]
            self.outcomes["restored" if body["draft"]["restored"] else "without draft"] += 1
        else:
            error = response.json()["error"]
            assert error["slot"] in ("unchanged", "empty")
            self.outcomes[error["slot"]] += 1
            if error["slot"] == "unchanged":
                assert self._ask(before.more).timings["cache_n"] == len(before.fresh.history)
            else:
                assert (slot["n_tokens"], slot["checkpoints"]) == (0, [])
        self._ask(after.fresh)

    def _ask(self, expected: Answer) -> Answer:
        got = self.server.ask(expected.prompt, len(expected.tokens), SLOT, ignore_eos=True)
        assert got.tokens == expected.tokens
        return got


@pytest.fixture(scope="module", params=PAIRS)
def fuzzed(
    request: pytest.FixtureRequest, start_server: Start, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fuzzed]:
    folder = tmp_path_factory.mktemp("fuzzed")
    server = start_server(flags(request.param, slots=2, ctx=512, slot_dir=folder))
    yield Fuzzed(server, folder, request.param)
    server.stop()


def share(n_files: int, pair: str) -> int:
    """Most of them where there are checkpoints and two parts of memory, and where a vocabulary is small."""
    return n_files // 5 if pair == "self" else 2 * n_files // 5


def test_damaged_files_harm_nobody(fuzzed: Fuzzed) -> None:
    fuzzed.run(share(N_FILES, fuzzed.pair))
    assert fuzzed.outcomes["unchanged"] >= 10
    assert fuzzed.outcomes["restored"] + fuzzed.outcomes["without draft"] >= 5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_damaged_files_harm_nobody(fuzzed: Fuzzed) -> None:
    fuzzed.run(share(N_FILES_SLOW, fuzzed.pair))
    assert fuzzed.outcomes["unchanged"] >= share(N_FILES_SLOW, fuzzed.pair) // 10
