"""A saved slot goes to servers with another number of slots and the other layout of the cache, and comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.conftest import Start
from tests.e2e.served import Answer, Served, differences, flags
from tests.e2e.texts import conversations, divergent, straight

# Name of a layout: number of slots, and how they share the cells.
LAYOUTS: Mapping[str, tuple[int, str]] = {
    "1": (1, "-no-kvu"),
    "2-streams": (2, "-no-kvu"),
    "4-streams": (4, "-no-kvu"),
    "1-unified": (1, "-kvu"),
    "2-unified": (2, "-kvu"),
    "4-unified": (4, "-kvu"),
}
CROSSES = [(source, goal) for source in LAYOUTS for goal in LAYOUTS]


class Layouts:
    """One server per layout, all on one directory; each saves its own conversation from its last slot."""

    def __init__(self, pair: str, names: list[str], folder: Path, start_server: Start) -> None:
        self.n = 24 if pair == "real" else 40
        self.servers: dict[str, Served] = {}
        self.live: dict[str, dict[str, Answer]] = {}
        for name in names:
            slots, switch = LAYOUTS[name]
            self.servers[name] = start_server(flags(pair, switch, slots=slots, slot_dir=folder))
            self.live[name] = self._converse(name, slots - 1)

    def _converse(self, name: str, slot: int) -> dict[str, Answer]:
        server = self.servers[name]
        prompt = server.chat_tokens(conversations(5)[len(self.live) % 5])
        live = {}
        for kind, follow_up in (("straight", straight), ("divergent", divergent)):
            server.erase(slot)
            first = server.ask(prompt, self.n, slot, ignore_eos=True)
            server.save(slot, f"{name}.bin")
            live[kind] = server.ask(follow_up(server, first), self.n, slot, ignore_eos=True)
        server.erase(slot)
        return live

    def check(self, source: str, goal: str) -> None:
        server = self.servers[goal]
        slots = LAYOUTS[goal][0]
        # Slot by slot, as the others of a unified cache have to be empty for equal logits.
        for slot, kind in {(0, "straight"), (slots - 1, "divergent")}:
            live = self.live[source][kind]
            restored = server.restore(slot, f"{source}.bin")
            assert restored["draft"]["restored"], restored
            assert differences(live, server.ask(live.prompt, self.n, slot, ignore_eos=True)) == {}
            server.erase(slot)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory, start_server: Start) -> Iterator[Layouts]:
    layouts = Layouts("self", list(LAYOUTS), tmp_path_factory.mktemp("layouts"), start_server)
    yield layouts
    for server in layouts.servers.values():
        server.stop()


@pytest.mark.parametrize(("source", "goal"), CROSSES)
def test_a_slot_restores_in_another_layout(layouts: Layouts, source: str, goal: str) -> None:
    layouts.check(source, goal)


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["real", "hybrid", "window"])
def test_other_memory_restores_in_another_layout_too(pair: str, tmp_path: Path, start_server: Start) -> None:
    names = ["1", "4-streams", "2-unified"] if pair == "real" else list(LAYOUTS)
    layouts = Layouts(pair, names, tmp_path, start_server)
    for source in names:
        for goal in names:
            layouts.check(source, goal)
    for server in layouts.servers.values():
        server.stop()


def test_with_another_slot_in_use_a_unified_cache_still_takes_the_file(layouts: Layouts) -> None:
    """The cells lie between another slot's there; only the counts and the text are to be equal then."""
    server = layouts.servers["4-unified"]
    live = layouts.live["2-streams"]["straight"]
    server.ask(server.chat_tokens(conversations(9)[8]), 30, 1, ignore_eos=True)
    server.restore(2, "2-streams.bin")
    got = server.ask(live.prompt, layouts.n, 2, ignore_eos=True)
    assert (got.timings["cache_n"], got.timings["prompt_n"]) == (
        live.timings["cache_n"],
        live.timings["prompt_n"],
    )
    assert got.timings["draft_prompt_n"] == 0
    assert got.text == live.text
    server.erase_all()
