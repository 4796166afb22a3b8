"""Names, owners, directories and the list of files."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from persistence.errors import (
    FooterDamaged,
    Forbidden,
    InvalidName,
    NoSpace,
    NotAFile,
    NotFound,
    SlotFileError,
)
from persistence.files import SystemFiles
from persistence.names import check_name
from persistence.snapshot import DraftBlock
from persistence.store import DEFAULT_OWNER, DirectoryStore
from tests.persistence.build import STATE_HEAD, attention_state, checkpoint, save, stock_file

BAD_NAMES: list[object] = [
    "",
    ".",
    "..",
    "...",
    "../x",
    "a/b",
    "a\\b",
    "/etc/x",
    "x\0y",
    "x\ny",
    "x\x7fy",
    "x\u2028y",
    "\ud800",
    " x",
    ".x",
    "x.",
    "x ",
    "a" * 256,
    "é" * 128,
    5,
    None,
    b"x",
    True,
]


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "parent" / "slots")


def tree(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_anything_but_one_plain_file_name_is_refused(store: DirectoryStore, name: object) -> None:
    before = tree(store.root.parent)
    for attempt in (
        lambda: store.create(DEFAULT_OWNER, name),
        lambda: store.open(DEFAULT_OWNER, name),
        lambda: store.describe(DEFAULT_OWNER, name),
        lambda: store.remove(DEFAULT_OWNER, name),
    ):
        with pytest.raises(InvalidName):
            attempt()
    assert tree(store.root.parent) == before


@pytest.mark.parametrize("owner", [name for name in BAD_NAMES if isinstance(name, str)], ids=repr)
def test_an_owner_is_one_plain_name_too(store: DirectoryStore, owner: str) -> None:
    with pytest.raises(InvalidName):
        store.create(owner, "a.bin")
    with pytest.raises(InvalidName):
        store.list(owner)


@pytest.mark.parametrize(
    "name", ["chat-1_A.bin", "a", "a b.bin", "a..b", "über.bin", "会話", "a" * 255, "-rf"]
)
def test_a_plain_name_is_taken_and_listed(store: DirectoryStore, name: str) -> None:
    assert check_name(name) == name
    save(store, name)
    assert [file.name for file in store.list(DEFAULT_OWNER)] == [name]


def test_a_missing_root_is_created_with_mode_0700(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    DirectoryStore(root)
    assert root.stat().st_mode & 0o777 == 0o700
    assert root.parent.stat().st_mode & 0o777 == 0o700


def test_an_existing_root_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    DirectoryStore(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SlotFileError):
        DirectoryStore(tmp_path / "file")
    with pytest.raises(NotFound):
        DirectoryStore(tmp_path / "file" / "below")


def test_owners_do_not_see_each_other(store: DirectoryStore) -> None:
    save(store, "a.bin", (1,))
    save(store, "a.bin", (2, 2), owner="alice")
    save(store, "b.bin", (3, 3, 3), owner="bob")
    assert [(f.name, f.n_tokens) for f in store.list(DEFAULT_OWNER)] == [("a.bin", 1)]
    assert [(f.name, f.n_tokens) for f in store.list("alice")] == [("a.bin", 2)]
    assert store.list("carol") == []
    with pytest.raises(NotFound):
        store.open("alice", "b.bin")
    store.remove("alice", "a.bin")
    assert [f.name for f in store.list(DEFAULT_OWNER)] == ["a.bin"]


def test_an_owners_directory_cannot_collide_with_a_file(store: DirectoryStore) -> None:
    save(store, "alice", (1,))
    save(store, "a.bin", (2,), owner="alice")
    assert [f.name for f in store.list(DEFAULT_OWNER)] == ["alice"]


def test_a_listing_says_what_the_footers_say(store: DirectoryStore) -> None:
    draft = DraftBlock(b"{}", b"ctx", b"spec")
    saved = save(store, "full.bin", (1, 2), STATE_HEAD + b"s", [checkpoint(1)], draft)
    (store.root / "stock.bin").write_bytes(stock_file([7, 8, 9], attention_state([3])))
    (store.root / "junk.bin").write_bytes(b"junk")
    (store.root / "cut.bin").write_bytes((store.root / "full.bin").read_bytes()[:-1])
    (store.root / "directory").mkdir()
    (store.root / "link.bin").symlink_to(store.root / "full.bin")

    files = {file.name: file for file in store.list(DEFAULT_OWNER)}

    assert list(files) == ["cut.bin", "full.bin", "junk.bin", "stock.bin"]
    full = files["full.bin"]
    assert (full.n_bytes, full.n_tokens, full.n_checkpoints) == (saved.n_written, 2, 1)
    assert full.draft_bytes == saved.draft_bytes
    assert full.facts is not None
    assert full.facts.target.name == "target.gguf"
    assert full.error is None
    assert (files["stock.bin"].facts, files["stock.bin"].n_tokens) == (None, 3)
    assert isinstance(files["cut.bin"].error, FooterDamaged)
    assert files["junk.bin"].error is not None


def test_a_listing_reads_each_file_once_until_it_changes(tmp_path: Path) -> None:
    opened: list[str] = []

    class Counting(SystemFiles):
        def open(self, path: Path) -> int:
            opened.append(path.name)
            return super().open(path)

    store = DirectoryStore(tmp_path, Counting())
    save(store, "a.bin", (1,))
    save(store, "b.bin", (1,))
    store.list(DEFAULT_OWNER)
    store.list(DEFAULT_OWNER)
    assert sorted(opened) == ["a.bin", "b.bin"]
    save(store, "a.bin", (1, 2))
    assert [file.n_tokens for file in store.list(DEFAULT_OWNER)] == [2, 1]
    assert sorted(opened) == ["a.bin", "a.bin", "b.bin"]


def test_the_store_forgets_files_that_are_gone(store: DirectoryStore) -> None:
    for n in range(5):
        save(store, f"{n}.bin")
    assert len(store.list(DEFAULT_OWNER)) == len(store._catalog._known) == 5
    for n in range(4):
        (store.root / f"{n}.bin").unlink()
    assert len(store.list(DEFAULT_OWNER)) == len(store._catalog._known) == 1
    assert store._saves._held == set()


def test_remove_gives_the_size_and_a_second_one_finds_nothing(store: DirectoryStore) -> None:
    saved = save(store, "a.bin")
    assert store.remove(DEFAULT_OWNER, "a.bin") == saved.n_written
    assert store.list(DEFAULT_OWNER) == []
    for attempt in (store.remove, store.open, store.describe):
        with pytest.raises(NotFound, match=r"a\.bin"):
            attempt(DEFAULT_OWNER, "a.bin")


@pytest.mark.parametrize("kind", ["directory", "link out", "link in", "dangling link", "pipe"])
def test_a_name_that_is_no_regular_file_is_refused(store: DirectoryStore, tmp_path: Path, kind: str) -> None:
    path = store.root / "x.bin"
    outside = tmp_path / "outside.bin"
    outside.write_bytes(stock_file([1], attention_state([1])))
    save(store, "inside.bin")
    match kind:
        case "directory":
            path.mkdir()
        case "link out":
            path.symlink_to(outside)
        case "link in":
            path.symlink_to("inside.bin")
        case "dangling link":
            path.symlink_to(tmp_path / "nothing")
        case "pipe":
            os.mkfifo(path)
    before = outside.read_bytes()
    for attempt in (store.create, store.open, store.describe, store.remove):
        with pytest.raises(NotAFile):
            attempt(DEFAULT_OWNER, "x.bin")
    assert outside.read_bytes() == before
    assert not (tmp_path / "nothing").exists()
    assert [file.name for file in store.list(DEFAULT_OWNER)] == ["inside.bin"]


def test_a_root_that_vanishes_is_reported_and_not_made_anew(store: DirectoryStore) -> None:
    store.root.rmdir()
    for owner in (DEFAULT_OWNER, "alice"):
        with pytest.raises(NotFound):
            store.create(owner, "a.bin")
        with pytest.raises(NotFound):
            store.list(owner)
    assert not store.root.exists()


def test_a_root_that_vanishes_during_a_save_is_reported(store: DirectoryStore) -> None:
    with store.create(DEFAULT_OWNER, "a.bin") as writer:
        writer.payload([1], STATE_HEAD)
        for path in store.root.iterdir():
            path.unlink()
        store.root.rmdir()
        from tests.persistence.build import facts

        with pytest.raises(NotFound):
            writer.commit(facts(1))


class ReadOnly(SystemFiles):
    """A fake of a directory without write permission: root, who may run the tests, is refused nothing."""

    def __init__(self, number: int) -> None:
        self.number = number

    def create(self, path: Path) -> int:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_root_that_cannot_be_written_is_refused_at_once(tmp_path: Path, number: int) -> None:
    with pytest.raises(Forbidden):
        DirectoryStore(tmp_path, ReadOnly(number))


def test_a_root_that_turns_read_only_refuses_saves_and_goes_on_reading(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    save(store, "a.bin")
    store._files = ReadOnly(errno.EROFS)
    with pytest.raises(Forbidden):
        save(store, "a.bin", (9,))
    assert [file.n_tokens for file in store.list(DEFAULT_OWNER)] == [3]


@contextmanager
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 4 KiB, as on a full disk; what pytest writes to is one of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_beyond_the_size_limit_is_no_space(store: DirectoryStore) -> None:
    save(store, "a.bin")
    with pytest.raises(NoSpace, match=r"a\.bin"), small_files():
        save(store, "a.bin", (9,), STATE_HEAD + bytes(5000))
    assert [file.n_tokens for file in store.list(DEFAULT_OWNER)] == [3]
    assert os.listdir(store.root) == ["a.bin"]


def mount_small_disk(directory: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_a_full_disk_is_no_space_and_keeps_the_old_file(tmp_path: Path) -> None:
    if not mount_small_disk(tmp_path):
        pytest.skip("no tmpfs can be mounted here; the size limit above takes its place")
    try:
        store = DirectoryStore(tmp_path)
        save(store, "a.bin", (1, 2))
        with pytest.raises(NoSpace):
            save(store, "a.bin", (9,), STATE_HEAD + bytes(1 << 20))
        assert os.listdir(tmp_path) == ["a.bin"]
        with store.open(DEFAULT_OWNER, "a.bin") as file:
            assert list(file.tokens) == [1, 2]
            assert file.verify() == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_read_only_disk_is_forbidden(tmp_path: Path) -> None:
    if not mount_small_disk(tmp_path):
        pytest.skip("no tmpfs can be mounted here; a fake above takes its place")
    try:
        store = DirectoryStore(tmp_path)
        save(store, "a.bin", (1, 2))
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with pytest.raises(Forbidden):
            save(store, "a.bin", (9,))
        with pytest.raises(Forbidden):
            store.remove(DEFAULT_OWNER, "a.bin")
        with pytest.raises(Forbidden):
            DirectoryStore(tmp_path)
        with store.open(DEFAULT_OWNER, "a.bin") as file:
            assert file.verify() == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_two_saves_to_one_name_are_serialised(store: DirectoryStore) -> None:
    order: list[str] = []
    first = store.create(DEFAULT_OWNER, "a.bin")

    def second() -> None:
        save(store, "a.bin", (2, 2))
        order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    save(store, "other.bin")
    time.sleep(0.05)
    assert order == [], "the second waits; another name does not"
    first.payload([1], STATE_HEAD)
    order.append("first")
    first.abort()
    thread.join(5)
    assert order == ["first", "second"]
    assert store.describe(DEFAULT_OWNER, "a.bin").n_tokens == 2


def test_stale_temporary_files_go_at_start_and_live_ones_stay(store: DirectoryStore) -> None:
    save(store, "a.bin", owner="alice")
    places: Sequence[Path] = (store.root, store.root / ".owners" / "alice")
    for place in places:
        (place / ".draftkeep-0123456789abcdef.tmp").write_bytes(b"half")
        (place / ".other").write_bytes(b"not ours")
    with store.create(DEFAULT_OWNER, "live.bin") as writer:
        DirectoryStore(store.root)
        left = tree(store.root)
        assert len([name for name in left if name.endswith(".tmp")]) == 1
        assert [name for name in left if name.endswith(".other")] == [".other", ".owners/alice/.other"]
        assert "live.bin" not in left
        writer.payload([1], STATE_HEAD)
    assert not any(name.endswith(".tmp") for name in tree(store.root))


def test_temporary_files_are_never_listed(store: DirectoryStore) -> None:
    with store.create(DEFAULT_OWNER, "a.bin"):
        assert len(os.listdir(store.root)) == 1
        assert store.list(DEFAULT_OWNER) == []


def test_a_reader_keeps_its_file_while_it_is_replaced(store: DirectoryStore) -> None:
    save(store, "a.bin", (1, 2), STATE_HEAD + b"old")
    with store.open(DEFAULT_OWNER, "a.bin") as file:
        save(store, "a.bin", (3,), STATE_HEAD + b"newer")
        assert bytes(file.read_target()[8:]) == b"old"
        assert file.verify() == []


def test_importing_the_store_loads_neither_llama_nor_numpy() -> None:
    code = (
        "import sys, persistence.store, persistence.cli;"
        "print([m for m in ('llama_cpp', 'numpy', 'spec_server', 'draft') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "[]\n"


def test_a_file_system_without_locks_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    (tmp_path / ".draftkeep-0123456789abcdef.tmp").write_bytes(b"half")
    store = DirectoryStore(tmp_path)
    save(store, "a.bin")
    assert os.listdir(tmp_path) == ["a.bin"]


def test_an_owners_directory_that_cannot_be_made_is_an_error_of_ours(store: DirectoryStore) -> None:
    (store.root / ".owners").write_bytes(b"in the way")
    with pytest.raises(SlotFileError):
        store.create("alice", "a.bin")
    save(store, "a.bin")


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_a_bad_name_is_refused_before_the_file_system_sees_it(name: object) -> None:
    with pytest.raises(InvalidName):
        check_name(name)
