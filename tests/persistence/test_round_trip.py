"""Whatever is written comes back, byte for byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from persistence.files import SystemFiles
from persistence.format import state_offset
from persistence.reader import SlotFile
from persistence.snapshot import FileFacts, ModelIdentity
from persistence.store import DEFAULT_OWNER, DirectoryStore
from tests.persistence.build import (
    STATE_HEAD,
    checkpoint,
    checkpoint_lists,
    drafts,
    facts,
    same,
    save,
    scalars,
    states,
    token_lists,
)

FILES_FOOTER_LIMIT = 4096


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "slots")


@pytest.mark.property
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sections_come_back(store: DirectoryStore, data: st.DataObject) -> None:
    tokens = data.draw(token_lists)
    state = data.draw(states)
    checkpoints = data.draw(checkpoint_lists(len(tokens)))
    draft = data.draw(drafts)
    written = FileFacts(
        target=ModelIdentity(data.draw(st.text(max_size=8)), "00" * 16),
        draft=data.draw(st.none() | st.just(ModelIdentity("d", "11" * 16))),
        settings=data.draw(st.dictionaries(st.text(max_size=6), scalars, max_size=3)),
        n_tokens=len(tokens),
        writer="w",
        created=1.5,
        extra=data.draw(st.dictionaries(st.text(max_size=6), scalars, max_size=2)),
    )

    saved = save(store, "a.bin", tokens, state, checkpoints, draft, file_facts=written)

    assert saved.n_written == (store.root / "a.bin").stat().st_size
    parts = (saved.tokens_bytes, saved.target_bytes, saved.checkpoints_bytes, saved.draft_bytes)
    assert sum(parts) + saved.footer_bytes == saved.n_written
    with store.open(DEFAULT_OWNER, "a.bin") as file:
        assert file.n_read == saved.n_written
        assert file.checksum == "verified"
        assert list(file.tokens) == tokens
        assert bytes(file.read_target())[8:] == state[8:]
        found = list(file.checkpoints())
        assert len(found) == len(checkpoints) == saved.n_checkpoints == file.n_checkpoints
        assert all(same(a, b) for a, b in zip(found, checkpoints, strict=True))
        block = file.draft()
        assert (block is None) == (draft is None)
        if block is not None and draft is not None:
            assert (block.fit, bytes(block.context), bytes(block.spec)) == (
                draft.fit,
                draft.context,
                draft.spec,
            )
        assert file.facts == written
        assert file.dropped == []
        assert file.notes == []
        assert file.verify() == []


def test_empty_slot_comes_back_as_no_tokens(store: DirectoryStore) -> None:
    assert save(store, "empty.bin", (), b"").n_tokens == 0
    with store.open(DEFAULT_OWNER, "empty.bin") as file:
        assert len(file.tokens) == 0
        assert file.target_bytes == 0
        assert bytes(file.read_target()) == b""


def test_the_state_lies_behind_eight_spare_bytes_of_the_callers_buffer(store: DirectoryStore) -> None:
    save(store, "a.bin", state=STATE_HEAD + b"state")
    buffer = bytearray(b"\xff" * 20)
    with store.open(DEFAULT_OWNER, "a.bin") as file:
        view = file.read_target(buffer)
        assert view.obj is buffer
    assert buffer == b"\0" * 8 + b"state" + b"\xff" * 7


def test_a_buffer_too_small_for_the_state_is_refused(store: DirectoryStore) -> None:
    save(store, "a.bin", state=STATE_HEAD + b"state")
    with store.open(DEFAULT_OWNER, "a.bin") as file, pytest.raises(ValueError, match="12 bytes"):
        file.read_target(bytearray(12))


def test_the_state_head_never_reaches_the_disk(store: DirectoryStore) -> None:
    saved = save(store, "a.bin", state=STATE_HEAD + b"state")
    assert STATE_HEAD[:4] not in (store.root / "a.bin").read_bytes()
    assert saved.target_bytes == 5
    assert (store.root / "a.bin").read_bytes()[state_offset(3) :].startswith(b"state")


def test_numpy_tokens_and_memoryviews_are_taken(store: DirectoryStore) -> None:
    tokens = np.arange(5, dtype=np.int32)
    state = memoryview(bytearray(STATE_HEAD + b"xyz"))
    with store.create(DEFAULT_OWNER, "n.bin") as writer:
        writer.payload(tokens, state)
        writer.commit(facts(5))
    with store.open(DEFAULT_OWNER, "n.bin") as file:
        assert np.array_equal(np.frombuffer(file.tokens, np.int32), tokens)
        assert bytes(file.read_target()[8:]) == b"xyz"


def test_checkpoints_are_loaded_one_by_one(store: DirectoryStore) -> None:
    save(store, "c.bin", checkpoints=[checkpoint(1), checkpoint(2), checkpoint(3)])
    reads: list[int] = []

    class Counting(SystemFiles):
        def read(self, fd: int, out: memoryview, offset: int) -> int:
            reads.append(offset)
            return super().read(fd, out, offset)

    with SlotFile.open(store.root / "c.bin", Counting()) as file:
        reads.clear()
        checkpoints = file.checkpoints()
        assert reads == []
        next(checkpoints)
        assert len(reads) == 1
        assert len(list(checkpoints)) == 2


def test_the_footer_stays_small(store: DirectoryStore) -> None:
    for n in (0, 1, 100):
        checkpoints = [checkpoint(1, b"x" * 50)] * n
        assert save(store, "f.bin", checkpoints=checkpoints).footer_bytes < FILES_FOOTER_LIMIT + 48 * n


def test_a_file_keeps_the_mode_0600(store: DirectoryStore) -> None:
    save(store, "m.bin")
    assert (store.root / "m.bin").stat().st_mode & 0o777 == 0o600
    assert store.root.stat().st_mode & 0o777 == 0o700


def test_a_save_without_a_time_is_stamped(store: DirectoryStore) -> None:
    from dataclasses import replace

    save(store, "t.bin", file_facts=replace(facts(3), created=0.0))
    with store.open(DEFAULT_OWNER, "t.bin") as file:
        assert file.facts is not None
        assert abs(file.facts.created - (store.root / "t.bin").stat().st_mtime) < 60
