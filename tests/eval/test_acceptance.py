"""The whole table against fakes: a sound server, servers with one fault each, and one that is not ours."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

import pytest

from eval import sessions
from eval.__main__ import main, split_arguments
from eval.acceptance import server_argv
from eval.drafters import DRAFTERS, named
from eval.models import CHAT_PROMPTS
from eval.scenarios import FOLLOW_UP, Conversation, load

FAKE = [sys.executable, str(Path(__file__).with_name("fake_server.py"))]
N = 3


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Runs `python -m eval acceptance` in this process; the rows by name."""
    monkeypatch.setattr("eval.acceptance.strip_command", lambda: [*FAKE, "strip"])

    def measure(*arguments: str) -> dict[str, dict]:
        file = tmp_path / "result.json"
        options = ["-n", str(N), "--max-tokens", "16", "--json", str(file), "--model", "none.gguf"]
        assert main(["acceptance", *options, *arguments]) == 0
        return {row["name"]: row for row in json.loads(file.read_text())["tables"][0]["rows"]}

    return measure


def equal(row: dict) -> tuple[int, int]:
    return row["summary"]["n_equal_counts"], row["summary"]["n_equal_texts"]


def test_a_sound_server_restores_all_and_the_dropped_draft_shows(measure):
    rows = measure("--server-bin", shlex.join(FAKE))
    assert list(rows) == [
        "live",
        "save, erase, restore",
        "save, restart, restore",
        "restore, draft dropped",
        "erase, no restore",
    ]
    assert not any(row["skipped"] or row["note"] for row in rows.values())
    assert equal(rows["save, erase, restore"]) == equal(rows["save, restart, restore"]) == (N, N)
    assert equal(rows["restore, draft dropped"]) == (0, N)
    assert rows["restore, draft dropped"]["summary"]["acceptance_rate"] < 0.5
    assert equal(rows["erase, no restore"]) == (0, N)
    assert rows["erase, no restore"]["summary"]["cache_n"] == 0


def test_a_server_that_loses_the_draft_state_is_found_out(measure):
    rows = measure("--server-bin", shlex.join(FAKE), "--", "--forgets-draft")
    assert equal(rows["save, erase, restore"]) == (0, N)
    assert equal(rows["save, restart, restore"]) == (0, N)


def test_a_server_that_restores_nothing_is_found_out(measure):
    rows = measure("--server-bin", shlex.join(FAKE), "--", "--forgets-slot")
    assert equal(rows["save, erase, restore"]) == (0, N)
    assert rows["save, erase, restore"]["summary"]["cache_n"] == 0


def test_a_stock_server_has_no_draft_block_to_drop(measure):
    rows = measure("--server-bin", shlex.join(FAKE), "--", "--stock")
    assert rows["restore, draft dropped"]["skipped"] == "this server's slot files have no draft block"
    assert equal(rows["save, erase, restore"]) == (0, N)


def test_a_server_at_a_url_is_neither_restarted_nor_robbed_of_its_files(measure, start_fake, tmp_path):
    fake = start_fake(slot_save_path=tmp_path)
    rows = measure("--url", fake.url, "--id-slot", "1")
    assert "--url" in rows["save, restart, restore"]["skipped"]
    assert "--url" in rows["restore, draft dropped"]["skipped"]
    assert equal(rows["save, erase, restore"]) == (N, N)
    assert not fake.slots[0].words
    names = {path.name for path in tmp_path.glob("*.bin")}
    assert len(names) == N


def test_the_live_row_was_never_saved(measure, start_fake, tmp_path):
    fake = start_fake(slot_save_path=tmp_path)
    measure("--url", fake.url)
    actions = [request["path"].partition("action=")[2] or "chat" for request in fake.requests]
    assert actions[: 3 * N] == ["erase", "chat", "chat"] * N
    assert actions[3 * N : 9 * N] == ["erase", "chat", "save", "erase", "restore", "chat"] * N


def test_turn_two_sends_the_answer_back_as_it_came():
    conversation = Conversation(0, ({"role": "user", "content": "hello"},))
    assert conversation.second(" odd  answer\n") == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": " odd  answer\n"},
        {"role": "user", "content": FOLLOW_UP},
    ]


def test_the_packaged_prompts_all_end_with_the_user():
    conversations = load(CHAT_PROMPTS, 200)
    assert {one.messages[-1]["role"] for one in conversations} == {"user"}
    with pytest.raises(ValueError, match="200 conversations, 201 were asked for"):
        load(CHAT_PROMPTS, 201)


def test_a_failure_is_one_line_and_an_exit_status(capsys):
    arguments = ["--model", "none.gguf", "--server-bin", shlex.join(FAKE), "-n", "1"]
    assert main(["acceptance", *arguments, "--", "--dies"]) == 1
    assert "no such model" in capsys.readouterr().err


def test_the_servers_own_arguments_stand_behind_the_dashes():
    assert split_arguments(["acceptance", "-n", "5", "--", "-t", "2", "--", "x"]) == (
        ["acceptance", "-n", "5"],
        ["-t", "2", "--", "x"],
    )
    assert split_arguments(["acceptance"]) == (["acceptance"], [])


def test_a_flag_that_the_caller_names_replaces_ours():
    args = argparse.Namespace(server_bin="/opt/llama-server", model="m.gguf", draft="d.gguf")
    argv = server_argv(args, "draft-simple", ["--spec-type", "none", "-t", "2"], Path("slots"))
    assert argv[:7] == ["/opt/llama-server", "-m", "m.gguf", "-md", "d.gguf", "--slot-save-path", "slots"]
    assert argv.count("--spec-type") == 1
    assert argv[-4:] == ["--spec-type", "none", "-t", "2"]


def test_every_drafter_has_its_own_flags_and_target():
    args = argparse.Namespace(server_bin=None, model=None, draft="d.gguf")
    argv = server_argv(args, "draft-mtp,ngram-mod", [], Path("slots"))
    assert argv[argv.index("-m", 3) + 1].endswith("tiny-qwen35-mtp.gguf")
    assert argv[argv.index("--spec-type") + 1] == "draft-mtp,ngram-mod"
    assert argv[argv.index("--spec-ngram-mod-n-match") + 1] == "3"
    assert "-md" not in argv


def test_a_table_for_every_drafter(tmp_path, monkeypatch):
    monkeypatch.setattr("eval.acceptance.strip_command", lambda: [*FAKE, "strip"])
    file = tmp_path / "result.json"
    options = ["-n", "1", "--max-tokens", "8", "--json", str(file), "--model", "none.gguf"]
    drafters = ["--drafter", "draft-simple", "--drafter", "ngram-mod"]
    assert main(["acceptance", *options, *drafters, "--server-bin", shlex.join(FAKE)]) == 0
    tables = json.loads(file.read_text())["tables"]
    assert [table["setup"]["drafter"] for table in tables] == ["draft-simple", "ngram-mod"]
    assert tables[1]["title"].startswith("ngram-mod: 1 conversations")


def test_all_names_every_drafter_and_an_unknown_one_is_refused(capsys):
    assert named("all") == list(DRAFTERS)
    assert main(["acceptance", "-n", "1", "--drafter", "magic"]) == 1
    assert "no drafter 'magic'" in capsys.readouterr().err


def test_only_our_server_is_given_flags_of_its_own():
    ours = argparse.Namespace(server_bin=None, model="m.gguf", draft="d.gguf")
    theirs = argparse.Namespace(server_bin="llama-server", model="m.gguf", draft="d.gguf")
    assert server_argv(ours, "draft-simple", [], Path("slots"))[-4:] == [
        "--spec-adaptive",
        "off",
        "--threads-adaptive",
        "off",
    ]
    assert "--spec-adaptive" not in server_argv(theirs, "draft-simple", [], Path("slots"))


def test_the_strip_command_is_ours():
    assert sessions.strip_command()[-1] == "strip"
