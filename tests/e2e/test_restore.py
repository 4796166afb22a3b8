"""Saving never changes the future: what follows a restore equals what follows on the slot that was never saved.

For a target with its drafter, for one that drafts for itself (an empty, stale or foreign draft cache shows at once),
for hybrid and for sliding-window memory; in the same process and in a new one; with a follow-up that goes straight
on, one that leaves the answer half-way, and the same prompt again; and once without the restore, where the same
comparison has to find differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Start
from tests.e2e.served import Answer, Served, differences, flags
from tests.e2e.texts import FOLLOW_UPS, common, conversations, prompt_of

NEXT = 40  # tokens of the answer that is compared
SLOT = 1  # faults sit outside slot 0
PAIRS = ("real", "self", "hybrid", "window", pytest.param("window-hybrid", marks=pytest.mark.slow))
# A small micro-batch makes the window's cache small as well, so that it loses what lies before the window.
MORE = {"hybrid": ("-ub", "64"), "window": ("-ub", "64"), "window-hybrid": ("-ub", "64")}


@dataclass(frozen=True)
class Scene:
    """A conversation on a live slot, saved after its first turn, and how it went on there."""

    pair: str
    first: Answer
    saved: Mapping[str, Any]
    live: Mapping[str, Answer]
    path: Path


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(pair: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(pair)


@pytest.fixture(scope="module")
def old(pair: str, folder: Path, start_server: Start) -> Iterator[Served]:
    server = start_server(flags(pair, *MORE.get(pair, ()), slots=2, slot_dir=folder))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def scene(pair: str, folder: Path, old: Served) -> Scene:
    # One without near ties: a restored window lies in other cells than a live one, and sums round differently there.
    prompt = prompt_of(old, 711, skip=5) if pair in MORE else old.chat_tokens(conversations(2)[1])
    live = {}
    for name, follow_up in FOLLOW_UPS.items():
        old.erase(SLOT)
        first = old.ask(prompt, 64, SLOT, ignore_eos=True)
        if name == "straight":
            saved = old.save(SLOT, "a.bin")
        live[name] = old.ask(follow_up(old, first), NEXT, SLOT, ignore_eos=True)
    return Scene(pair, first, saved, live, folder / "a.bin")


@pytest.fixture(scope="module")
def new(scene: Scene, start_server: Start) -> Iterator[Served]:
    """Another process, started after the save."""
    server = start_server(flags(scene.pair, *MORE.get(scene.pair, ()), slots=2, slot_dir=scene.path.parent))
    yield server
    server.stop()


def follow(server: Served, scene: Scene, name: str, slot: int) -> Answer:
    return server.ask(scene.live[name].prompt, NEXT, slot, ignore_eos=True)


def test_the_scene_can_show_faults(scene: Scene) -> None:
    """Equal answers prove something only where there were drafts, taken and refused, and a varied text."""
    assert len(set(scene.first.tokens)) >= 8
    counts = scene.live["straight"].counts
    assert counts["draft_n"] >= 20
    assert counts["draft_n_accepted"] >= 8
    if scene.pair == "real":
        assert 0.2 < scene.live["straight"].acceptance < 0.9
    if scene.pair == "self":
        assert scene.live["straight"].acceptance >= 0.98


def test_the_save_tells_the_truth(scene: Scene) -> None:
    assert scene.saved["n_saved"] == len(scene.first.history)
    assert scene.saved["n_written"] == scene.path.stat().st_size
    assert scene.saved["draft"]["saved"] is True
    assert scene.saved["draft"]["n_tokens"] == len(scene.first.history)
    assert scene.saved["draft"]["bytes"] > 0


@pytest.mark.parametrize("name", FOLLOW_UPS)
@pytest.mark.parametrize(("process", "slot"), [("old", SLOT), ("new", 0)])
def test_a_restored_slot_goes_on_as_the_live_one(
    scene: Scene, old: Served, new: Served, process: str, slot: int, name: str
) -> None:
    server = old if process == "old" else new
    server.erase(slot)
    restored = server.restore(slot, "a.bin")
    assert restored["n_restored"] == scene.saved["n_saved"]
    assert restored["n_read"] == scene.saved["n_written"]
    draft = restored["draft"]
    assert (draft["restored"], draft["n_tokens"], draft["reason"]) == (True, len(scene.first.history), "")
    got = follow(server, scene, name, slot)
    if name == "straight":
        assert got.timings["cache_n"] == restored["n_reusable"]
    assert differences(scene.live[name], got) == {}


def test_a_restore_reports_the_bytes_that_the_save_reported(scene: Scene, new: Served) -> None:
    restored = new.restore(SLOT, "a.bin")
    assert restored["target"]["bytes"] == scene.saved["target"]["bytes"]
    assert restored["draft"]["bytes"] == scene.saved["draft"]["bytes"]


@pytest.mark.parametrize("name", FOLLOW_UPS)
def test_without_the_restore_the_comparison_finds_differences(scene: Scene, new: Served, name: str) -> None:
    new.erase(SLOT)
    found = differences(scene.live[name], follow(new, scene, name, SLOT))
    assert found["cache_n"] == (scene.live[name].timings["cache_n"], 0)
    assert "prompt_n" in found


def test_a_restore_over_another_conversation_replaces_all_of_it(scene: Scene, new: Served) -> None:
    """Target, drafter and checkpoints of the conversation that was there before leave nothing behind."""
    new.erase(SLOT)
    new.ask(new.chat_tokens(conversations(3)[2]), 48, SLOT, ignore_eos=True)
    new.restore(SLOT, "a.bin")
    assert differences(scene.live["divergent"], follow(new, scene, "divergent", SLOT)) == {}


def test_a_second_save_of_a_restored_slot_restores_as_well(scene: Scene, new: Served) -> None:
    new.restore(0, "a.bin")
    saved = new.save(0, "b.bin")
    for name in ("n_saved", "n_ckpt_saved", "target", "draft"):
        assert saved[name] == scene.saved[name]
    new.erase(0)
    new.restore(0, "b.bin")
    assert differences(scene.live["straight"], follow(new, scene, "straight", 0)) == {}


def test_the_live_slot_reuses_exactly_what_it_shares(scene: Scene) -> None:
    """Of full attention every shared token; other memory may have to go back to a checkpoint."""
    for name, answer in scene.live.items():
        shared = min(common(scene.first.history, answer.prompt), len(answer.prompt) - 1)
        if name == "straight" or scene.pair in ("real", "self"):
            assert answer.timings["cache_n"] == shared
        else:
            assert 0 < answer.timings["cache_n"] <= shared
