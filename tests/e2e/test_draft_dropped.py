"""A draft block that does not fit is dropped and named; the target's half restores, and the text stays the same."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from eval.models import DRAFTER, target
from tests.e2e.conftest import Start
from tests.e2e.served import Answer, Served, differences, flags
from tests.e2e.texts import conversations, straight

N = 48


@dataclass(frozen=True)
class Scene:
    folder: Path
    first: Answer
    live: Answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dropped")


@pytest.fixture(scope="module")
def server(folder: Path, start_server: Start) -> Iterator[Served]:
    server = start_server(flags("self", slots=2, slot_dir=folder))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def scene(server: Served, folder: Path) -> Scene:
    first = server.ask(server.chat_tokens(conversations(8)[7]), N, 1, ignore_eos=True)
    server.save(1, "whole.bin")
    return Scene(folder, first, server.ask(straight(server, first), N, 1, ignore_eos=True))


def restored_elsewhere(
    start_server: Start, scene: Scene, argv: list[str]
) -> tuple[dict[str, object], Answer]:
    other = start_server(argv)
    draft = other.restore(0, "whole.bin")["draft"]
    answer = other.ask(scene.live.prompt, N, 0, ignore_eos=True)
    other.stop()
    return draft, answer


def assert_same_text(scene: Scene, answer: Answer) -> None:
    assert answer.timings["cache_n"] == scene.live.timings["cache_n"] == len(scene.first.history)
    assert answer.text == scene.live.text


def test_without_a_drafter_the_draft_block_is_left_out(scene: Scene, start_server: Start) -> None:
    draft, answer = restored_elsewhere(
        start_server, scene, flags("self", "--spec-type", "none", slots=2, slot_dir=scene.folder)
    )
    assert draft["restored"] is False
    assert draft["reason"]
    assert answer.timings["draft_n"] == 0
    assert_same_text(scene, answer)


def test_another_draft_model_drops_the_block_and_reads_the_prompt_itself(
    scene: Scene, start_server: Start
) -> None:
    argv = [*flags("self", slots=2, slot_dir=scene.folder), "-md", str(target())]
    draft, answer = restored_elsewhere(start_server, scene, argv)
    assert draft["restored"] is False
    assert "draft model" in str(draft["reason"])
    assert answer.timings["draft_n"] > 0
    assert answer.timings["draft_prompt_n"] == len(scene.live.prompt)
    assert_same_text(scene, answer)


@pytest.mark.parametrize(
    ("more", "word"), [(("-ctkd", "q8_0"), "type_k"), (("-ctvd", "q8_0", "-fa", "on"), "type_v")]
)
def test_another_type_of_the_draft_cache_drops_the_block_by_name(
    scene: Scene, start_server: Start, more: tuple[str, ...], word: str
) -> None:
    argv = flags("self", *more, slots=2, slot_dir=scene.folder)
    draft, answer = restored_elsewhere(start_server, scene, argv)
    assert draft["restored"] is False
    assert word in str(draft["reason"])
    assert_same_text(scene, answer)


def test_without_a_rebuild_a_dropped_draft_shows(scene: Scene, start_server: Start) -> None:
    """What a restore without its draft half looks like when nothing makes up for it: other drafts, same text."""
    argv = flags("self", "--draft-rebuild", "off", "-ctkd", "q8_0", slots=2, slot_dir=scene.folder)
    _, answer = restored_elsewhere(start_server, scene, argv)
    assert answer.timings["draft_prompt_n"] == 0
    assert "rounds" in differences(scene.live, answer)
    assert scene.live.acceptance >= 0.98 > answer.acceptance
    assert_same_text(scene, answer)


def test_a_file_stripped_of_its_draft_block_restores(server: Served, scene: Scene) -> None:
    shutil.copy(scene.folder / "whole.bin", scene.folder / "stripped.bin")
    command = [
        sys.executable,
        "-m",
        "persistence.cli",
        "strip",
        "--draft",
        str(scene.folder / "stripped.bin"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    whole, stripped = (scene.folder / name for name in ("whole.bin", "stripped.bin"))
    assert stripped.stat().st_size < whole.stat().st_size
    restored = server.restore(0, "stripped.bin")
    assert restored["n_read"] == stripped.stat().st_size
    assert restored["checksum"] == "verified"
    assert restored["draft"]["restored"] is False
    assert restored["draft"]["reason"]
    answer = server.ask(scene.live.prompt, N, 0, ignore_eos=True)
    assert answer.timings["draft_prompt_n"] == len(scene.live.prompt)
    assert_same_text(scene, answer)
    # Once it is read again, the text so far drafts as well as ever.
    assert answer.acceptance > 0.9


def test_the_whole_file_needs_no_draft_prompt(server: Served, scene: Scene) -> None:
    server.restore(0, "whole.bin")
    assert differences(scene.live, server.ask(scene.live.prompt, N, 0, ignore_eos=True)) == {}


@pytest.mark.slow
def test_a_big_target_without_its_draft_block_gives_the_same_text(
    real: Served, plain: Served, slot_dir: Path, start_server: Start
) -> None:
    first = real.ask(real.chat_tokens(conversations(2)[1]), N)
    real.save(0, "big.bin")
    live = real.ask(straight(real, first), N)
    without = start_server(flags("real", "--spec-type", "none", slot_dir=slot_dir))
    restored: Mapping[str, object] = without.restore(0, "big.bin")["draft"]
    assert restored["restored"] is False
    answer = without.ask(live.prompt, N)
    without.stop()
    assert answer.timings["cache_n"] == live.timings["cache_n"]
    assert answer.text == live.text
    assert DRAFTER.name in real.get("/props")["speculative"]["draft_model"]
