"""Models are loaded once; every context that a test opens is closed behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spec_server.runtime.model import Model
from tests.runtime.drive import DRAFT, HYBRID, WINDOWED, Driver


@pytest.fixture(scope="session")
def models() -> Iterator[dict[str, Model]]:
    """One model of each kind of memory: full attention, hybrid (with its MTP head), sliding window."""
    loaded = {"full": Model(DRAFT), "hybrid": Model(HYBRID, load_mtp=True), "windowed": Model(WINDOWED)}
    yield loaded
    for model in loaded.values():
        model.close()


@pytest.fixture
def drive(models: dict[str, Model]) -> Iterator[Callable[..., Driver]]:
    """drive(kind, n_seq_max, **settings) opens a context."""
    opened: list[Driver] = []

    def open_one(kind: str, n_seq_max: int = 1, **settings: Any) -> Driver:
        opened.append(Driver(models[kind], n_seq_max, **settings))
        return opened[-1]

    yield open_one
    for driver in opened:
        driver.close()
