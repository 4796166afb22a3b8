"""What tests of slot files ask of a server: refusals, and whether a slot still is what it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.e2e.served import Answer, Served


def refused(server: Served, slot: int, action: str, name: str, status: int) -> Mapping[str, Any]:
    """The error of a save or restore that has to fail with `status`."""
    response = server.http.post(f"/slots/{slot}", params={"action": action}, json={"filename": name})
    assert response.status_code == status, response.text
    error: Mapping[str, Any] = response.json()["error"]
    assert error["code"] == status
    return error


def assert_unchanged(server: Served, slot: int, held: Answer) -> None:
    """The slot still holds what it held after `held`: a straight follow-up processes one token."""
    got = server.ask([*held.history, held.tokens[-1]], 1, slot, ignore_eos=True)
    assert (got.timings["cache_n"], got.timings["prompt_n"]) == (len(held.history), 1)


def leftovers(folder: Path) -> list[str]:
    """Temporary files of saves."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
