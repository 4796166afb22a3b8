"""Whenever power, the process or a call fails: the old file or the new one, whole, and nothing left over."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from persistence.errors import Forbidden, NoSpace, SlotFileError, StorageFailed
from persistence.reader import SlotFile
from persistence.snapshot import DraftBlock
from persistence.store import DEFAULT_OWNER, DirectoryStore
from tests.persistence.build import STATE_HEAD, checkpoint, facts, save
from tests.persistence.memory_files import MemoryFiles, PowerFailure, Wreck

ROOT = Path("/slots")
PATH = ROOT / "chat.bin"
OLD = (1, 2, 3)
NEW = (4, 5, 6, 7)
CHANGING_CALLS = ("create", "write", "fsync", "rename", "fsync_directory")


def save_new(store: DirectoryStore) -> None:
    save(
        store, PATH.name, NEW, STATE_HEAD + b"new state", [checkpoint(2)], DraftBlock(b"{}", b"ctx", b"spec")
    )


def disk_with_old_file() -> tuple[MemoryFiles, DirectoryStore]:
    files = MemoryFiles()
    store = DirectoryStore(ROOT, files)
    save(store, PATH.name, OLD, STATE_HEAD + b"old state")
    files.calls.clear()
    return files, store


def tokens_on(files: MemoryFiles) -> tuple[int, ...]:
    """Read the file completely, as verified; whose tokens it has."""
    with SlotFile.open(PATH, files) as file:
        assert file.checksum == "verified"
        assert file.verify() == []
        tokens = tuple(file.tokens)
        state = bytes(file.read_target()[8:])
    assert state == {OLD: b"old state", NEW: b"new state"}[tokens]
    return tokens


def calls_of_a_save() -> list[str]:
    files, store = disk_with_old_file()
    save_new(store)
    return list(files.calls)


CALLS = calls_of_a_save()


def test_a_save_syncs_the_file_before_its_name_and_the_name_after() -> None:
    assert set(CALLS) == set(CHANGING_CALLS)
    assert CALLS[0] == "create"
    assert CALLS[-3:] == ["fsync", "rename", "fsync_directory"]


@pytest.mark.crash
@pytest.mark.parametrize("keep_data", [0.0, 0.5, 1.0])
def test_power_failure_before_any_call_leaves_the_old_file_or_the_new_one(keep_data: float) -> None:
    seen = set()
    for stop in range(len(CALLS) + 1):
        for n_operations in range(3):
            files, store = disk_with_old_file()

            def fail(n: int, verb: str, stop: int = stop) -> None:
                if n >= stop:
                    raise PowerFailure

            files.before_call = fail
            if stop < len(CALLS):
                with pytest.raises(PowerFailure):
                    save_new(store)
            else:
                save_new(store)
            after = files.after_power_failure(Wreck(keep_data, n_operations))
            DirectoryStore(ROOT, after)
            found = tokens_on(after)
            seen.add(found)
            assert list(after.names(ROOT)) == [PATH.name], f"left over after call {stop}"
            if stop == len(CALLS):
                assert found == NEW, "a save that was reported is there after a power failure"
    assert seen == {OLD, NEW}


@pytest.mark.crash
@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, NoSpace),
        (errno.EDQUOT, NoSpace),
        (errno.EFBIG, NoSpace),
        (errno.EACCES, Forbidden),
        (errno.EROFS, Forbidden),
        (errno.EIO, StorageFailed),
    ],
)
def test_a_failing_call_is_an_error_of_ours_and_the_old_file_stays(
    number: int, error: type[SlotFileError]
) -> None:
    for stop, verb in enumerate(CALLS):
        files, store = disk_with_old_file()

        def fail(n: int, verb: str, stop: int = stop) -> None:
            if n == stop:
                raise OSError(number, os.strerror(number))

        files.before_call = fail
        with pytest.raises(error, match=r"chat\.bin"):
            save_new(store)
        # Only the last call comes after the rename.
        assert tokens_on(files) == (NEW if verb == "fsync_directory" else OLD), f"call {stop}, {verb}"
        assert list(files.names(ROOT)) == [PATH.name]
        assert files.descriptors == {}
        files.before_call = lambda n, verb: None
        save_new(store)
        assert tokens_on(files) == NEW, "the name is free for the next save"


@pytest.mark.crash
def test_an_error_in_the_callers_own_loading_aborts_the_save() -> None:
    files, store = disk_with_old_file()

    def broken():  # type: ignore[no-untyped-def]
        yield checkpoint(1)
        raise RuntimeError("cannot load")

    with store.create(DEFAULT_OWNER, PATH.name) as writer:
        writer.payload(NEW, STATE_HEAD)
        with pytest.raises(RuntimeError, match="cannot load"):
            writer.checkpoints(2, broken())
        with pytest.raises(ValueError, match="finished"):
            writer.commit(facts(len(NEW)))
    assert list(files.names(ROOT)) == [PATH.name]
    assert tokens_on(files) == OLD


@pytest.mark.crash
def test_a_writer_left_without_commit_removes_its_file() -> None:
    files, store = disk_with_old_file()
    with store.create(DEFAULT_OWNER, PATH.name) as writer:
        writer.payload(NEW, STATE_HEAD)
        assert len(files.names(ROOT)) == 2
    assert list(files.names(ROOT)) == [PATH.name]
    assert files.descriptors == {}


SAVER = """
import sys
from pathlib import Path
from persistence.store import DirectoryStore
from tests.persistence.build import STATE_HEAD, save
store = DirectoryStore(Path(sys.argv[1]))
print("ready", flush=True)
for n in range(10**9):
    save(store, "chat.bin", [n] * 5, STATE_HEAD + n.to_bytes(4, "little") * 50_000)
"""


def kill_during_saves(directory: Path, n_kills: int) -> None:
    checkout = Path(__file__).parents[2]
    last = -1
    for _ in range(n_kills):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(directory)], cwd=checkout, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(random.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if not (directory / "chat.bin").exists():
            assert last == -1
            continue
        with SlotFile.open(directory / "chat.bin") as file:
            assert file.verify() == []
            last = file.tokens[0]
            assert list(file.tokens) == [last] * 5
            assert bytes(file.read_target()[8:12]) == last.to_bytes(4, "little")
    DirectoryStore(directory)
    assert os.listdir(directory) == ["chat.bin"], "temporary files of killed processes are gone"


@pytest.mark.crash
def test_sigkill_during_saves_leaves_whole_files(tmp_path: Path) -> None:
    kill_during_saves(tmp_path, 5)


@pytest.mark.crash
@pytest.mark.slow
def test_sigkill_during_many_saves_leaves_whole_files(tmp_path: Path) -> None:
    kill_during_saves(tmp_path, 100)


@pytest.mark.crash
def test_a_file_shorter_than_what_was_written_is_never_renamed() -> None:
    files, store = disk_with_old_file()

    def lose(n: int, verb: str) -> None:
        # A disk that claims to have taken a byte that it has not.
        if verb == "fsync":
            node = next(iter(files.descriptors.values()))
            del node.data[-1:]

    files.before_call = lose
    with pytest.raises(StorageFailed, match="written"):
        save_new(store)
    assert tokens_on(files) == OLD
    assert list(files.names(ROOT)) == [PATH.name]
