"""Weights are copied into huge pages only where that is faster and memory is plenty."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from spec_server import load_mode, machine
from spec_server.options import LoadMode
from spec_server.runtime import huge_pages
from spec_server.runtime.model import LOAD_MODES
from spec_server.settings import Settings

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def machine_of(monkeypatch: pytest.MonkeyPatch) -> object:
    """Pretends to another machine: none of these can be had here at will."""

    def pretend(available: int, has_pages: bool = True, has_gpu: bool = False) -> None:
        monkeypatch.setattr(machine, "available_bytes", lambda: available)
        monkeypatch.setattr(huge_pages, "are_to_be_had", lambda: has_pages)
        monkeypatch.setattr(load_mode, "goes_to_gpu", lambda n_layers: has_gpu and n_layers != 0)

    return pretend


def a_file(folder: Path, name: str, n_bytes: int) -> str:
    path = folder / name
    path.write_bytes(b"x" * n_bytes)
    return str(path)


@pytest.mark.parametrize(
    ("given", "available", "has_pages", "has_gpu", "mode"),
    [
        ({}, 2000, True, False, "none"),
        ({}, 1999, True, False, "auto"),
        ({}, 2000, False, False, "auto"),
        ({}, 2000, True, True, "auto"),
        ({"gpu_layers": 0}, 2000, True, True, "none"),
        ({"load_mode": "mmap"}, 2000, True, False, "mmap"),
        ({"load_mode": "none"}, 1, True, False, "none"),
    ],
)
def test_the_choice(
    tmp_path: Path,
    machine_of: object,
    given: dict[str, object],
    available: int,
    has_pages: bool,
    has_gpu: bool,
    mode: str,
) -> None:
    machine_of(available, has_pages, has_gpu)  # type: ignore[operator]
    settings = Settings(model=a_file(tmp_path, "m.gguf", 1000), **given)  # type: ignore[arg-type]
    assert load_mode.load_mode(settings) == mode


@pytest.mark.parametrize(
    ("spec_type", "available", "mode"),
    [("draft-simple", 2200, "none"), ("draft-simple", 2199, "auto"), ("ngram-simple", 2000, "none")],
)
def test_a_draft_model_counts_where_it_is_loaded(
    tmp_path: Path, machine_of: object, spec_type: str, available: int, mode: str
) -> None:
    machine_of(available)  # type: ignore[operator]
    settings = Settings(
        model=a_file(tmp_path, "m.gguf", 1000),
        model_draft=a_file(tmp_path, "d.gguf", 100),
        spec_type=(spec_type,),
    )
    assert load_mode.load_mode(settings) == mode


def test_every_word_of_the_setting_is_known_to_the_runtime() -> None:
    assert get_args(LoadMode) == tuple(LOAD_MODES)


def test_a_draft_model_on_the_gpu_stays_with_llama(tmp_path: Path, machine_of: object) -> None:
    machine_of(9999, has_gpu=True)  # type: ignore[operator]
    draft = a_file(tmp_path, "d.gguf", 100)
    settings = Settings(model=a_file(tmp_path, "m.gguf", 1000), gpu_layers=0, model_draft=draft)
    assert load_mode.load_mode(settings) == "auto"


def test_all_parts_of_a_split_file_count(tmp_path: Path) -> None:
    first = a_file(tmp_path, "m-00001-of-00002.gguf", 10)
    a_file(tmp_path, "m-00002-of-00002.gguf", 5)
    a_file(tmp_path, "m-Old-00002-of-00002.gguf", 100)
    assert load_mode.size_of(first) == 15


def a_group(folder: Path, names: tuple[str, str], limit: str, used: int, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


def test_what_a_control_group_leaves(tmp_path: Path) -> None:
    """Its own limit and that of the group around it; files in memory can be had back, but not those of a tmpfs."""
    names = "memory.max", "memory.current"
    a_group(tmp_path / "a/b", names, "max", 0, "file 0\n")
    a_group(tmp_path / "a", names, "1000", 600, "anon 300\nfile 300\nshmem 200\n")
    own = tmp_path / "cgroup"
    own.write_bytes(b"1:name=caf\xe9:/y\n0::/a/b\n")
    assert list(machine._left_in_groups(tmp_path, own)) == [500]


def test_what_a_control_group_of_the_older_version_leaves(tmp_path: Path) -> None:
    """In a container the path is the host's, and the group lies at the root."""
    names = "memory.limit_in_bytes", "memory.usage_in_bytes"
    a_group(tmp_path / "memory", names, "1000", 600, "cache 1\ntotal_cache 300\ntotal_shmem 200\n")
    own = tmp_path / "cgroup"
    own.write_text("5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/docker/x\n")
    assert list(machine._left_in_groups(tmp_path, own)) == [500]


@pytest.mark.parametrize("text", ["", "3:cpu:/x\n", "0::/none\n"])
def test_no_control_group(tmp_path: Path, text: str) -> None:
    own = tmp_path / "cgroup"
    own.write_text(text)
    assert list(machine._left_in_groups(tmp_path, own)) == []
    assert list(machine._left_in_groups(tmp_path, tmp_path / "missing")) == []
