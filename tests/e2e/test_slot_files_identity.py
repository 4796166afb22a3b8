"""A file belongs to the content of the models and to settings, never to a path, a port, a directory or a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from eval.models import DRAFTER
from spec_server.runtime.gguf import digest
from tests.e2e.conftest import Start
from tests.e2e.served import ALWAYS, HYBRID, WINDOW, Answer, Served
from tests.e2e.slot_files import refused
from tests.e2e.texts import prompt_of

MODELS = (DRAFTER, HYBRID, WINDOW)


def changed_copy(model: Path, place: Path, at: int, change: Callable[[bytes], bytes]) -> Path:
    """Another file with the same header; `at` counts from the end where it is negative."""
    data = bytearray(model.read_bytes())
    at %= len(data)
    data[at : at + 16] = change(bytes(data[at : at + 16]))
    place.write_bytes(data)
    return place


def flipped(block: bytes) -> bytes:
    return bytes(byte ^ 1 for byte in block)


def argv(model: Path, folder: Path, *more: str) -> list[str]:
    return [
        *("-m", str(model), "-md", str(model), "-c", "2048", "--slot-save-path", str(folder)),
        *ALWAYS,
        *more,
    ]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.stem)
def test_the_digest_is_that_of_the_content(model: Path, tmp_path: Path) -> None:
    ours = digest(model)
    shutil.copy(model, tmp_path / "elsewhere.gguf")
    (tmp_path / "link.gguf").symlink_to(model)
    assert digest(tmp_path / "elsewhere.gguf") == ours
    assert digest(tmp_path / "link.gguf") == ours
    assert digest(model) == ours
    other = digest(changed_copy(model, tmp_path / "other.gguf", -3000, flipped))
    assert other != ours
    assert len({digest(path) for path in MODELS}) == len(MODELS)


@pytest.fixture(scope="module")
def saved(start_server: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Answer]:
    """A model of its own place, the directory of a file saved with it, and how that goes on."""
    home = tmp_path_factory.mktemp("identity")
    model = home / "model.gguf"
    shutil.copy(DRAFTER, model)
    (home / "slots").mkdir()
    server = start_server(argv(model, home / "slots"))
    first = server.ask(prompt_of(server, 300), 8, ignore_eos=True)
    server.save(0, "a.bin")
    live = server.ask([*first.history, 5], 16, ignore_eos=True)
    server.stop()
    return model, home / "slots", live


def assert_goes_on(server: Served, live: Answer) -> None:
    restored = server.restore(0, "a.bin")
    assert restored["draft"]["restored"] is True
    answer = server.ask(live.prompt, 16, ignore_eos=True)
    assert answer.counts == live.counts
    assert answer.timings["draft_prompt_n"] <= 1
    assert answer.tokens == live.tokens


def test_the_same_model_elsewhere_takes_the_file(
    saved: tuple[Path, Path, Answer],
    start_server: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Moved, under another name, as a link; from another working directory; each on a port of its own."""
    model, folder, live = saved
    (tmp_path / "moved").mkdir()
    shutil.copy(model, tmp_path / "moved" / "other-name.gguf")
    (tmp_path / "link.gguf").symlink_to(model)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    for path in (Path("moved/other-name.gguf"), tmp_path / "link.gguf"):
        server = start_server(argv(path, folder, "-t", "2", "-b", "256", "-ub", "128"))
        assert_goes_on(server, live)
        [entry] = server.get("/slot-files")["data"]
        assert (entry["fits"], entry["reason"]) == (True, "")
        server.stop()


def test_other_weights_behind_the_same_header_are_another_model(
    saved: tuple[Path, Path, Answer], start_server: Start, tmp_path: Path
) -> None:
    model, folder, _ = saved
    copy = changed_copy(model, tmp_path / model.name, -3000, flipped)
    server = start_server(argv(copy, folder))
    error = refused(server, 0, "restore", "a.bin", 400)
    assert (error["field"], error["slot"]) == ("model", "unchanged")
    assert error["expected"] != error["found"]
    [entry] = server.get("/slot-files")["data"]
    assert entry["fits"] is False
    assert "model" in entry["reason"]
    server.stop()


def test_other_weights_of_the_drafter_cost_the_draft_only(
    saved: tuple[Path, Path, Answer], start_server: Start, tmp_path: Path
) -> None:
    model, folder, live = saved
    copy = changed_copy(model, tmp_path / model.name, -3000, flipped)
    server = start_server([*argv(model, folder), "-md", str(copy)])
    restored = server.restore(0, "a.bin")
    assert restored["draft"]["restored"] is False
    assert "draft model" in restored["draft"]["reason"]
    answer = server.ask(live.prompt, 16, ignore_eos=True)
    assert answer.timings["cache_n"] == live.timings["cache_n"]
    assert answer.tokens == live.tokens
    server.stop()
