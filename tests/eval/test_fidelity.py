"""The command against our server, sound and with a rule that is wrong on purpose."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from eval.__main__ import main
from eval.fidelity.arms import ARMS

pytestmark = [pytest.mark.slow, pytest.mark.http, pytest.mark.model, pytest.mark.timeout(900)]
WRONG = shlex.join([sys.executable, str(Path(__file__).with_name("wrong_server.py"))])


def test_a_sound_server_passes(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ["-n", "120", "--n-prompts", "2", "--max-tokens", "16", "--json", str(file)]
    assert main(["fidelity", *arguments, "--", "-t", "1"]) == 0
    result = json.loads(file.read_text())
    assert {row["arm"] for row in result["sampled"]} == {arm.name for arm in ARMS}
    assert all(row["comparison"]["n_cells"] > 1 for row in result["sampled"])
    assert all(row["partings"] == [] for row in result["greedy"] if row["model"] == "tiny")


def test_a_wrong_rule_is_found_out_over_http(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-n", "300", "--n-prompts", "0", "--arm", "bad draft model", "--arm", "draft-mtp, seeds"]
    assert main(["fidelity", *arguments, "--server-bin", WRONG, "--", "-t", "1"]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "changes the text" in line]
    assert len(failed) >= 2
    # Requests that name a seed are verified by another rule, which is sound here.
    assert not any("seeds" in line for line in failed)


def test_an_unknown_arm_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fidelity", "--arm", "psychic"]) == 1
    assert "no arm 'psychic'" in capsys.readouterr().err
