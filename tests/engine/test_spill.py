"""Checkpoints in files cost no memory that cannot be given back, and leave nothing behind however the process ends."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draft.none import NoDrafter
from persistence.reader import SlotFile
from persistence.snapshot import Checkpoint, FileFacts, ModelIdentity, SequenceState
from persistence.store import DEFAULT_OWNER, DirectoryStore
from spec_server.engine import spill as spill_module
from spec_server.engine.checkpoints import CheckpointKeeper, CheckpointOptions
from spec_server.engine.report import checkpoint_counters, slot_facts
from spec_server.engine.slot import Slot
from spec_server.engine.spill import FileSpill, HeapSpill, is_in_memory, make_spill
from spec_server.engine.task import Task
from spec_server.runtime.llama_context import LlamaContext
from tests.engine.harness import (
    HYBRID,
    ROOT,
    WINDOW,
    Setup,
    core_of,
    filler,
    make_core,
    model_of,
    request,
    run,
)

MIB = 1 << 20
BIG = 16 * MIB


def state_of(n_bytes: int, fill: int) -> SequenceState:
    return SequenceState(bytes([fill]) * n_bytes, bytes([fill + 1]) * 10, b"spec")


def memory(field: str) -> int:
    """Bytes, of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field}")


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- what a spill holds


@pytest.mark.parametrize("make", [lambda _: HeapSpill(), FileSpill], ids=["memory", "files"])
def test_a_kept_state_is_the_same(make: type[FileSpill], tmp_path: Path) -> None:
    spill = make(tmp_path)
    given = [state_of(100 + i, i) for i in range(5)]
    kept = [spill.keep(s) for s in given]
    for before, after in zip(given, kept, strict=True):
        assert (bytes(after.target), bytes(after.draft), bytes(after.spec)) == (
            before.target,
            before.draft,
            before.spec,
        )
        assert is_in_memory(after) == spill.in_memory
        assert after.n_bytes == before.n_bytes


def test_a_file_is_never_seen_in_the_directory_and_goes_with_its_last_user(tmp_path: Path) -> None:
    spill = FileSpill(tmp_path)
    gc.collect()
    before = n_descriptors()
    kept = [spill.keep(state_of(1000, i)) for i in range(8)]
    assert os.listdir(tmp_path) == []
    copy = SequenceState(kept[0].target)  # shares the file
    assert n_descriptors() == before + 8
    del kept
    gc.collect()
    assert n_descriptors() == before + 1
    assert bytes(copy.target) == bytes(1000)
    del copy
    gc.collect()
    assert n_descriptors() == before


def test_a_mapped_state_cannot_be_written_over(tmp_path: Path) -> None:
    kept = FileSpill(tmp_path).keep(state_of(100, 1))
    assert memoryview(kept.target).readonly


def test_without_room_a_state_stays_in_memory_and_is_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The buffer that it was captured into is used again for the next one."""
    spill = FileSpill(tmp_path)

    def full(fd: int, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(spill_module, "_write_all", full)
    buffer = spill.buffer(64)
    buffer[:] = b"a" * 64
    kept = spill.keep(SequenceState(buffer))
    spill.buffer(64)[:] = b"b" * 64
    assert bytes(kept.target) == b"a" * 64
    assert is_in_memory(kept)
    assert "no space left" in caplog.text


def test_captures_share_one_buffer(tmp_path: Path) -> None:
    spill = FileSpill(tmp_path)
    assert spill.buffer(100).obj is spill.buffer(50).obj
    heap = HeapSpill()
    assert heap.buffer(100).obj is not heap.buffer(100).obj


def test_a_place_that_holds_no_files_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        make_spill(tmp_path / "file")
    assert make_spill(None).in_memory
    assert not make_spill(tmp_path / "a" / "b").in_memory
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_where_files_cannot_be_unlinked_while_open_states_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spill_module, "CAN_UNLINK_OPEN_FILES", False)
    assert make_spill(tmp_path).in_memory
    assert len(caplog.records) == 1


# -- in an engine


@pytest.mark.model
@pytest.mark.parametrize("path", [HYBRID, WINDOW], ids=["hybrid", "window"])
def test_an_engine_with_files_says_and_counts_what_one_in_memory_does(path: Path, tmp_path: Path) -> None:
    options = CheckpointOptions(min_step=128)
    setup = Setup(path, n_ubatch=64, checkpoints=options)
    model = model_of(path)
    a, b = filler(model, 400, 1), [*filler(model, 300, 1).tokens, *filler(model, 60, 2).tokens]
    seen = []
    for s in (setup, setup.but(spill=tmp_path)):
        with core_of(s) as core:
            run(core, request(a, 8))
            states = [bytes(c.state.target) for c in core.slots[0].checkpoints]
            turn = run(core, request(b, 16))[0]
            seen.append((states, turn.counts, turn.tokens))
            facts = slot_facts(core, core.slots[0])
            values = checkpoint_counters(core)
    assert seen[0] == seen[1]
    told = facts["checkpoints"]
    assert isinstance(told, list)
    assert {c["in"] for c in told} == {"file"}
    total = sum(c["n_bytes"] for c in told)
    assert (facts["checkpoint_bytes_memory"], facts["checkpoint_bytes_files"]) == (0, total)
    assert (values["checkpoint_bytes_memory"], values["checkpoint_bytes_files"]) == (0, total)
    assert os.listdir(tmp_path) == []


@pytest.mark.model
def test_the_memory_budget_does_not_count_files(tmp_path: Path) -> None:
    options = CheckpointOptions(min_step=64, ram_bytes=1000)
    with core_of(Setup(HYBRID, n_ubatch=64, checkpoints=options, spill=tmp_path)) as core:
        run(core, request(filler(core.model, 300, 1), 1))
        assert [c.n_tokens for c in core.slots[0].checkpoints] == [64, 128, 192, 256, 296]


@pytest.mark.model
def test_closing_frees_the_files(tmp_path: Path) -> None:
    gc.collect()
    before = n_descriptors()
    core = make_core(Setup(HYBRID, n_ubatch=64, checkpoints=CheckpointOptions(min_step=64), spill=tmp_path))
    run(core, request(filler(core.model, 300, 1), 1))
    assert n_descriptors() > before
    core.rollback.clear(core.slots[0])
    gc.collect()
    assert n_descriptors() <= before + 1
    core.close()


# -- memory, with states that are large


class LargeStates:
    """As much of a target as taking checkpoints needs."""

    needs_checkpoints = True
    n_ctx_seq = 4096

    def state_size(self, seq_id: int, *, partial: bool) -> int:
        return BIG

    def read_state(self, seq_id: int, out: memoryview, *, partial: bool) -> memoryview:
        out[:] = os.urandom(64) * (BIG // 64)
        return out

    def pos_range(self, seq_id: int) -> tuple[int, int]:
        return 0, 0


def keeper_with(spill: FileSpill | HeapSpill) -> tuple[CheckpointKeeper, Slot]:
    slot = Slot(0)
    target: LlamaContext = LargeStates()  # type: ignore[assignment]
    options = CheckpointOptions(n_max=32, min_step=8, ram_bytes=1 << 40)
    return CheckpointKeeper(target, NoDrafter(), [slot], options, spill), slot


def take(keeper: CheckpointKeeper, slot: Slot, n: int) -> None:
    asked = Task.__new__(Task)
    asked.request = request([1] * 4000)
    asked.prompt = [1] * 4000  # type: ignore[assignment]
    for _ in range(n):
        slot.tokens.extend([1] * 8)
        keeper.after_chunk(slot, asked)


def grown(spill: FileSpill | HeapSpill, n: int) -> int:
    """Memory that n large checkpoints take. In a fresh process: an old one's heap has holes that they fit into."""
    keeper, slot = keeper_with(spill)
    before = memory("RssAnon")
    take(keeper, slot, n)
    assert sum(c.state.n_bytes for c in slot.checkpoints) == n * BIG
    return memory("RssAnon") - before


def save_and_restore(directory: Path) -> int:
    """Memory that is left in use by it; AssertionError where more is at any time."""
    store = DirectoryStore(directory / "slots")
    keeper, slot = keeper_with(FileSpill(directory))
    take(keeper, slot, 12)
    before = memory("RssAnon")
    writer = store.create(DEFAULT_OWNER, "a.bin")
    writer.payload([1] * 400, b"x" * 64)
    writer.checkpoints(12, watched(slot.checkpoints, before))
    writer.commit(FileFacts(ModelIdentity("m", ""), None, {}, 400, "test"))
    saved = [bytes(c.state.target[:64]) for c in slot.checkpoints]
    slot.checkpoints.clear()
    with SlotFile.open(directory / "slots" / "a.bin") as file:
        kept = keeper.collect(watched(file.checkpoints(), before))
    assert [bytes(c.state.target[:64]) for c in kept] == saved
    assert all(not is_in_memory(c.state) for c in kept)
    return memory("RssAnon") - before


def in_a_fresh_process(call: str, directory: Path) -> int:
    code = f"import sys; from tests.engine.test_spill import *; d = Path(sys.argv[1]); print({call})"
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


def test_32_large_checkpoints_in_files_cost_less_than_32_mib_of_memory(tmp_path: Path) -> None:
    assert in_a_fresh_process("grown(FileSpill(d), 32)", tmp_path) < 32 * MIB
    assert in_a_fresh_process("grown(HeapSpill(), 6)", tmp_path) > 5 * BIG  # so the measure measures


def test_saving_streams_from_the_files_and_restoring_moves_them_out_one_by_one(tmp_path: Path) -> None:
    assert in_a_fresh_process("save_and_restore(d)", tmp_path) < 2 * BIG


def watched(checkpoints: Iterator[Checkpoint] | list[Checkpoint], before: int) -> Iterator[Checkpoint]:
    """Fails where more than two states' worth of memory is in use at once."""
    for checkpoint in checkpoints:
        yield checkpoint
        assert memory("RssAnon") - before <= 2 * BIG + 4 * MIB


# -- the end of a process

SCRIPT = """
import sys, time
from pathlib import Path
from spec_server.engine.spill import make_spill
from persistence.snapshot import SequenceState
spill = make_spill(Path(sys.argv[1]))
held = [spill.keep(SequenceState(b"x" * (8 << 20))) for _ in range(16)]
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.crash
def test_nothing_is_left_behind_by_a_process_that_was_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        assert os.listdir(tmp_path) == []
        held = free_bytes(tmp_path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
    # 128 MiB come back; others on the same disk may take some meanwhile
    deadline = time.monotonic() + 20
    while free_bytes(tmp_path) - held < 64 * MIB and time.monotonic() < deadline:
        time.sleep(0.1)
    assert free_bytes(tmp_path) - held >= 64 * MIB


def free_bytes(path: Path) -> int:
    facts = os.statvfs(path)
    return facts.f_bfree * facts.f_frsize
