"""The spec-slots command, as a pipe and a person see it."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from persistence import cli, report
from persistence.catalog import Catalog
from persistence.cli import app
from persistence.files import SystemFiles
from persistence.reader import SlotFile
from persistence.store import DirectoryStore
from tests.persistence.build import (
    FULL_CHECKPOINTS,
    FULL_DRAFT,
    FULL_TOKENS,
    attention_state,
    draft_bytes,
    facts,
    full_file,
    same,
    save,
    stock_file,
)


@pytest.fixture
def full(tmp_path: Path) -> Path:
    return full_file(tmp_path)


def run(*arguments: object, status: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_ls_is_tab_separated_in_a_pipe(full: Path) -> None:
    (full.parent / "stock.bin").write_bytes(stock_file([1, 2, 3], attention_state([3])))
    lines = [line.split("\t") for line in run("ls", full.parent).stdout.splitlines()]
    assert lines[0] == ["name", "model", "draft", "tokens", "checkpoints", "size", "age", "verified"]
    assert lines[1][:6] == ["full.bin", "target.gguf", "draft.gguf", "4", "2", str(full.stat().st_size)]
    assert lines[2][:5] == ["stock.bin", "unknown", "none", "3", "0"]
    assert lines[1][7] == "not checked"


def test_ls_tells_a_draft_without_a_name_from_none(tmp_path: Path) -> None:
    tail = draft_bytes(b"{}", b"ctx", b"spec")
    (tmp_path / "a.bin").write_bytes(stock_file(FULL_TOKENS, attention_state([4]), tail=tail))
    (tmp_path / "b.bin").write_bytes(stock_file(FULL_TOKENS, attention_state([4])))
    run("migrate", tmp_path / "a.bin")
    lines = [line.split("\t") for line in run("ls", tmp_path).stdout.splitlines()[1:]]
    assert [line[1:3] for line in lines] == [["unknown", "unnamed"], ["unknown", "none"]]


def test_ls_verifies_when_asked(full: Path) -> None:
    (full.parent / "stock.bin").write_bytes(stock_file([1, 2, 3], attention_state([3])))
    bad = full.parent / "bad.bin"
    bad.write_bytes(full.read_bytes())
    flip(bad, 60)
    (full.parent / "junk.bin").write_bytes(b"junk")
    lines = [line.split("\t") for line in run("ls", "--verify", full.parent).stdout.splitlines()[1:]]
    assert {line[0]: line[7] for line in lines} == {
        "full.bin": "yes",
        "stock.bin": "no checksums",
        "bad.bin": "damaged: target",
        "junk.bin": "not a slot file: it begins with b'junk', not with b'qsgg'",
    }


def test_ls_changes_nothing(full: Path) -> None:
    (full.parent / ".draftkeep-0000000000000000.tmp").write_bytes(b"another server's")
    before = sorted(os.listdir(full.parent))
    run("ls", full.parent)
    assert sorted(os.listdir(full.parent)) == before


def test_ls_as_json(full: Path) -> None:
    (row,) = json.loads(run("ls", "--json", "--verify", full.parent).stdout)
    assert row["name"] == "full.bin"
    assert row["bytes"] == full.stat().st_size
    assert (row["n_tokens"], row["n_checkpoints"], row["verified"], row["error"]) == (4, 2, "yes", None)


def test_ls_of_a_missing_directory_says_so(tmp_path: Path) -> None:
    assert "No such file or directory" in run("ls", tmp_path / "none", status=2).stderr


def test_inspect_as_json(full: Path) -> None:
    value = json.loads(run("inspect", "--json", full).stdout)
    assert value["n_tokens"] == len(FULL_TOKENS)
    assert value["model"] == {"name": "target.gguf", "digest": "00112233445566778899aabbccddeeff"}
    assert [section["kind"] for section in value["sections"]] == ["tokens", "target", "checkpoints", "draft"]
    assert sum(section["bytes"] for section in value["sections"]) < value["bytes"] == full.stat().st_size
    assert [c["n_tokens"] for c in value["checkpoints"]] == [c.n_tokens for c in FULL_CHECKPOINTS]
    assert value["draft"]["fit"] == FULL_DRAFT.fit.decode()
    assert "tokens" not in value


def test_inspect_as_text(full: Path) -> None:
    text = run("inspect", full, "--tokens").stdout
    assert "setting type_k\tf16" in text
    assert "model\ttarget.gguf (00112233445566778899aabbccddeeff)" in text
    assert "5 300 70000 8" in text


def test_inspect_of_a_stock_file(tmp_path: Path) -> None:
    path = tmp_path / "stock.bin"
    path.write_bytes(stock_file([1, 2, 3], attention_state([3])))
    text = run("inspect", path).stdout
    assert "checksums\tnone" in text
    assert "None" not in text
    assert "no footer" in text


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf(kind: str, pieces: list[str]) -> bytes:
    values = [
        string("general.file_type") + struct.pack("<II", 4, 1),
        string("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 2) + bytes(8),
        string("tokenizer.ggml.merges") + struct.pack("<IIQ", 9, 8, 1) + string("a b"),
        string("tokenizer.ggml.model") + struct.pack("<I", 8) + string(kind),
        string("tokenizer.ggml.tokens")
        + struct.pack("<IIQ", 9, 8, len(pieces))
        + b"".join(map(string, pieces)),
    ]
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(values)) + b"".join(values)


@pytest.mark.parametrize(
    ("kind", "pieces", "text"),
    [
        ("gpt2", ["<s>", "Hello", "Ġworld", "Ã", "©"], "<s>Hello worldé<9?>"),
        ("llama", ["<s>", "Hello", "▁world", "<0xC3>", "<0xA9>"], "<s>Hello worldé<9?>"),
    ],
)
def test_inspect_turns_tokens_into_text_without_llama(
    tmp_path: Path, kind: str, pieces: list[str], text: str
) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf(kind, pieces))
    save(DirectoryStore(tmp_path), "a.bin", [0, 1, 2, 3, 4, 9])
    out = run("inspect", tmp_path / "a.bin", "--tokens", "--model", tmp_path / "m.gguf").stdout
    assert out.endswith(f"{text}\n")
    value = json.loads(run("inspect", tmp_path / "a.bin", "--model", tmp_path / "m.gguf", "--json").stdout)
    assert value["tokens"] == text


def test_inspect_with_a_broken_model_says_so(full: Path, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    whole = gguf("gpt2", ["a", "b"])
    for n in range(0, len(whole), 7):
        model.write_bytes(whole[:n])
        assert "m.gguf" in run("inspect", full, "--tokens", "--model", model, status=2).stderr
    model.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0))
    assert "no vocabulary" in run("inspect", full, "--model", model, status=2).stderr


def test_verify_tells_by_its_status(full: Path) -> None:
    assert run("verify", full).stdout == f"{full}: verified\n"
    stock = full.parent / "stock.bin"
    stock.write_bytes(stock_file([1, 2, 3], attention_state([3])))
    assert "no checksums, as in the files of a stock llama-server" in run("verify", stock, status=1).stdout
    flip(full, 60)
    out = run("verify", full, full.parent / "none", stock, status=1).stdout
    assert f"{full}: damaged: target: wrong checksum\n" in out
    assert f"{full.parent / 'none'}: No such file or directory\n" in out


def test_verify_calls_only_slot_files_damaged(full: Path) -> None:
    junk = full.parent / "junk.bin"
    junk.write_bytes(b"junk")
    assert run("verify", junk, status=1).stdout.startswith(f"{junk}: not a slot file: ")
    full.write_bytes(full.read_bytes()[:-30])
    assert run("verify", full, status=1).stdout.startswith(f"{full}: damaged: footer: ")


def test_a_link_on_the_command_line_is_followed(full: Path) -> None:
    link = full.parent / "link.bin"
    link.symlink_to(full.name)
    run("verify", link)


@pytest.mark.parametrize(
    ("flags", "n_checkpoints", "has_draft"),
    [(["--draft"], 2, False), (["--checkpoints"], 0, True), (["--draft", "--checkpoints"], 0, False)],
)
def test_strip_writes_a_smaller_valid_file(
    full: Path, flags: list[str], n_checkpoints: int, has_draft: bool
) -> None:
    out = full.parent / "small.bin"
    before = full.read_bytes()
    run("strip", full, *flags, "-o", out)
    assert full.read_bytes() == before
    assert out.stat().st_size < len(before)
    with SlotFile.open(out) as file:
        assert file.verify() == []
        assert list(file.tokens) == list(FULL_TOKENS)
        assert bytes(file.read_target()[8:]) == attention_state([4])
        assert len(list(file.checkpoints())) == n_checkpoints
        assert (file.draft() is not None) == has_draft
        assert file.facts is not None
        assert file.facts.target == facts(0).target
        assert file.facts.draft == (facts(0).draft if has_draft else None)
    [shown] = [
        line.split()
        for line in run("inspect", out).output.splitlines()
        if line.split()[:2] == ["draft", "model"]
    ]
    assert (shown[2:] == ["none"]) != has_draft


def test_strip_works_in_place_and_leaves_no_temporary_file(full: Path) -> None:
    run("strip", full, "--draft")
    assert os.listdir(full.parent) == ["full.bin"]
    run("verify", full)


def test_strip_asks_what_to_leave_out(full: Path) -> None:
    assert "--draft" in run("strip", full, status=2).stderr


def test_strip_refuses_a_damaged_state_and_keeps_the_file(full: Path) -> None:
    flip(full, 60)
    before = full.read_bytes()
    assert "target state is damaged" in run("strip", full, "--draft", status=2).stderr
    assert full.read_bytes() == before
    assert os.listdir(full.parent) == ["full.bin"]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_migrate_gives_a_stock_file_the_newest_form(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "old.bin"
    tail = draft_bytes(b"{}", b"ctx", b"spec")
    state = attention_state([4])
    path.write_bytes(stock_file(FULL_TOKENS, state, packed=packed, checkpoints=FULL_CHECKPOINTS, tail=tail))
    run("migrate", path)
    with SlotFile.open(path) as file:
        assert (file.checksum, file.verify()) == ("verified", [])
        assert tuple(file.tokens) == FULL_TOKENS
        assert bytes(file.read_target()[8:]) == state
        assert all(same(a, b) for a, b in zip(file.checkpoints(), FULL_CHECKPOINTS, strict=True))
        assert file.draft() is not None
        assert file.facts is not None
        assert file.facts.target.digest == ""
    before = path.read_bytes()
    assert "newest form" in run("migrate", path).stdout
    assert path.read_bytes() == before


def test_migrate_names_what_it_leaves_behind(tmp_path: Path) -> None:
    path = tmp_path / "cut.bin"
    path.write_bytes(stock_file(FULL_TOKENS, attention_state([4]), checkpoints=FULL_CHECKPOINTS)[:-1])
    result = run("migrate", path, "-o", tmp_path / "new.bin")
    assert "left out: checkpoints 1 (truncated)" in result.stderr
    with SlotFile.open(tmp_path / "new.bin") as file:
        assert [c.n_tokens for c in file.checkpoints()] == [1]
        assert file.verify() == []


def test_a_terminal_gets_tables_and_no_control_characters_from_files(full: Path) -> None:
    evil = full.parent / "evil.bin"
    save(DirectoryStore(full.parent), "evil.bin", file_facts=facts(3, type_k="\x1b[31mred\x07"))
    console = Console(force_terminal=True, width=120, color_system=None, record=True, file=io.StringIO())
    with SlotFile.open(evil) as file:
        report.print_inspection(console, "evil.bin", report.inspected(file))
        report.print_listing(console, Catalog(SystemFiles()).list(full.parent), {}, now=1750090000.0)
        text = console.export_text()
    assert "\x07" not in text
    assert "�[31mred�" in text
    assert "┃" in text
    assert "1 d" in text


def test_a_big_file_on_a_terminal_gets_a_progress_bar(
    full: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "BIG_BYTES", 1)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    shown: list[float] = []
    monkeypatch.setattr(cli.Progress, "advance", lambda self, task, n: shown.append(n))
    assert cli._damage(full) == []
    assert sum(shown) == full.stat().st_size


def test_the_command_runs_as_a_module(full: Path) -> None:
    command = [sys.executable, "-m", "persistence.cli", "verify", str(full)]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, f"{full}: verified\n")


def test_strip_leaves_a_damaged_checkpoint_behind(full: Path) -> None:
    flip(full, full.read_bytes().index(b"first"))
    run("strip", full, "--draft")
    with SlotFile.open(full) as file:
        assert [c.n_tokens for c in file.checkpoints()] == [FULL_CHECKPOINTS[1].n_tokens]
        assert file.verify() == []
