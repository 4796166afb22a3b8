"""A file's checkpoints where memory needs them: all come back, all but the bad ones, or as many as a slot may hold."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from persistence.format import Kind
from tests.e2e.conftest import Start
from tests.e2e.mutations import Parts, take_apart
from tests.e2e.served import HYBRID, Answer, Served, flags
from tests.e2e.texts import prompt_of


@pytest.fixture(scope="module")
def hybrid_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@dataclass(frozen=True)
class Taken:
    """A hybrid conversation with checkpoints on its way, and how it goes on from half of it."""

    prompt: list[int]
    back: Answer
    parts: Parts


@pytest.fixture(scope="module")
def hybrid(start_server: Start, hybrid_dir: Path) -> Iterator[Served]:
    server = start_server(flags("hybrid", "-cms", "64", slot_dir=hybrid_dir))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def taken(hybrid: Served, hybrid_dir: Path) -> Taken:
    prompt = prompt_of(hybrid, 800)
    for end in range(100, 801, 100):
        hybrid.ask(prompt[:end], 1, 0)
    saved = hybrid.save(0, "many.bin")
    assert saved["n_ckpt_saved"] >= 6
    back = hybrid.ask([*prompt[:420], *prompt[:9]], 8, 0, ignore_eos=True)
    assert 300 < back.timings["cache_n"] <= 420
    return Taken(prompt, back, take_apart(hybrid_dir / "many.bin"))


def test_all_checkpoints_come_back(hybrid: Served, taken: Taken) -> None:
    hybrid.erase(0)
    restored = hybrid.restore(0, "many.bin")
    n = len(taken.parts.records)
    assert (restored["n_ckpt_restored"], restored["n_ckpt_dropped"], restored["notes"]) == (n, 0, [])
    again = hybrid.ask(taken.back.prompt, 8, 0, ignore_eos=True)
    assert again.timings["cache_n"] == taken.back.timings["cache_n"]
    assert again.tokens == taken.back.tokens


def test_without_the_restore_all_is_processed(hybrid: Served, taken: Taken) -> None:
    hybrid.erase(0)
    assert hybrid.ask(taken.back.prompt, 8, 0, ignore_eos=True).timings["cache_n"] == 0


@pytest.mark.parametrize(
    ("damage", "note"),
    [
        (lambda record: record[:24] + bytes([record[24] ^ 1]) + record[25:], "build"),
        (lambda record: struct.pack("<q", 5000) + record[8:], "position"),
        (lambda record: record[:16] + struct.pack("<Q", 1 << 60) + record[24:], "framing"),
        (
            lambda record: (
                record[:24] + record[24:][: len(record) // 2] + b"\xff" * 8 + record[len(record) // 2 + 32 :]
            ),
            "",
        ),
    ],
    ids=["magic", "position", "length", "values"],
)
def test_a_checkpoint_that_is_bad_costs_no_other(
    hybrid: Served, hybrid_dir: Path, taken: Taken, damage: Callable[[bytes], bytes], note: str
) -> None:
    records = list(taken.parts.records)
    bad = random.Random(1).randrange(len(records) - 2)
    records[bad] = damage(records[bad])
    (hybrid_dir / "bad.bin").write_bytes(replace(taken.parts, records=tuple(records)).seal())
    restored = hybrid.restore(0, "bad.bin")
    assert (restored["n_ckpt_restored"], restored["n_ckpt_dropped"]) == (len(records) - 1, 1)
    assert [n for n in restored["notes"] if "checkpoint" in n and note in n]
    assert hybrid.ask([*taken.prompt, 5], 1, 0).timings["cache_n"] == len(taken.prompt)


def test_a_checkpoint_with_a_flipped_bit_is_left_out(hybrid: Served, hybrid_dir: Path, taken: Taken) -> None:
    data = bytearray(taken.parts.seal())
    before = sum(len(section) for kind, section in taken.parts.sections if kind <= Kind.CHECKPOINTS)
    data[before + 5000] ^= 1
    (hybrid_dir / "bad.bin").write_bytes(data)
    restored = hybrid.restore(0, "bad.bin")
    assert restored["n_ckpt_dropped"] == 1
    assert restored["notes"] == ["checkpoint 0: checksum"]


def test_checkpoints_beyond_the_limit_are_thinned_out_and_named(
    hybrid: Served, hybrid_dir: Path, taken: Taken, start_server: Start
) -> None:
    few = start_server(flags("hybrid", "--ctx-checkpoints", "3", slot_dir=hybrid_dir))
    restored = few.restore(0, "many.bin")
    n = len(taken.parts.records)
    assert (restored["n_ckpt_restored"], restored["n_ckpt_dropped"]) == (3, n - 3)
    assert [note for note in restored["notes"] if f"{n - 3} checkpoints left out" in note and "3" in note]
    assert len(few.get("/slots")[0]["checkpoints"]) == 3
    again = few.ask(taken.back.prompt, 8, 0, ignore_eos=True)
    assert 0 < again.timings["cache_n"] <= 420
    assert again.tokens == taken.back.tokens
    few.stop()


def test_props_say_what_can_be_kept(double: Served, hybrid: Served, plain: Served) -> None:
    facts = [server.get("/props") for server in (double, hybrid, plain)]
    assert [f["slot_draft"] for f in facts] == [True, True, False]
    assert [f["slot_checkpoints"] for f in facts] == [False, True, False]
    assert [f["persistence"]["enabled"] for f in facts] == [True, True, False]
    assert facts[0]["persistence"]["sections"] == ["target", "draft"]
    assert facts[1]["persistence"]["sections"] == ["target", "checkpoints", "draft"]
    assert "--slot-save-path" in facts[2]["persistence"]["reason"]
    assert HYBRID.name in hybrid.get("/props")["model_path"]
