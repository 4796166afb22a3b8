"""Few server processes for many tests: each is started once, and has to end in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.served import Served, flags

Start = Callable[..., Served]


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a server with the given flags; one that a test has not stopped is stopped at the end."""
    running: list[Served] = []
    logs = tmp_path_factory.mktemp("logs")

    def start(argv: Sequence[str]) -> Served:
        running.append(Served(argv, logs / f"server-{len(running)}.log"))
        return running[-1]

    yield start
    faults = [server.stop_quietly() for server in running if not server.stopped]
    assert not any(faults), "\n".join(faults)


@pytest.fixture(scope="session")
def slot_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home") / "slots"


@pytest.fixture(scope="session")
def real(start_server: Start, slot_dir: Path) -> Served:
    """SmolLM2 with its drafter, one slot."""
    slot_dir.mkdir(exist_ok=True)
    return start_server(flags("real", slot_dir=slot_dir))


@pytest.fixture(scope="session")
def plain(start_server: Start) -> Served:
    """SmolLM2 without drafting, and without a directory for slots."""
    return start_server(flags("real", "--spec-type", "none"))


@pytest.fixture(scope="session")
def double(start_server: Start, slot_dir: Path) -> Served:
    """The drafter as its own target, two slots in streams."""
    slot_dir.mkdir(exist_ok=True)
    return start_server(flags("self", slots=2, slot_dir=slot_dir))


@pytest.fixture(autouse=True)
def _empty_slots(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests share servers, never what their slots hold."""
    yield
    for name in ("real", "plain", "double"):
        if name in request.fixturenames:
            request.getfixturevalue(name).erase_all()
