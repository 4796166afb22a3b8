"""What tests of several folders ask for by name; nothing here runs unasked."""

from __future__ import annotations

import os

import pytest

from spec_server.settings import ENV_PREFIX


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable that a setting could come from."""
    for name in list(os.environ):
        if name.startswith((ENV_PREFIX, "LLAMA_")):
            monkeypatch.delenv(name)
