"""Slot to file and back. The engine thread only copies; hashing, reading and writing happen on the writer thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from draft.base import DraftState, DraftStateError
from persistence.reader import SlotFile
from persistence.snapshot import Checkpoint, DraftBlock, FileFacts, ModelIdentity
from persistence.store import SlotStore, StoredFile
from persistence.writer import Saved
from spec_server import __version__
from spec_server.engine.base import DraftReport, EraseResult, RestoreResult, SaveResult, SlotFileEntry
from spec_server.engine.core import EngineCore
from spec_server.engine.errors import EngineError, FileRefused
from spec_server.engine.fitting import TargetFit, check_fit, misfit
from spec_server.engine.locks import Call
from spec_server.engine.slot import Slot, TokenList
from spec_server.engine.storage import engine_errors
from spec_server.runtime.errors import StateError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What a save will write, taken on the engine thread; the slot is held, so it stays true."""

    tokens: list[int]
    target_size: int
    draft_size: int
    n_draft: int
    fit: bytes
    checkpoints: tuple[Checkpoint, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified file in memory, ready to be applied."""

    tokens: np.ndarray  # [n] int32
    target: memoryview
    checkpoints: list[Checkpoint]
    draft: DraftBlock | None
    draft_reason: str


class Transfer:
    """One transfer at a time: they share a buffer as large as the largest section."""

    def __init__(
        self, core: EngineCore, store: SlotStore, fit: TargetFit, draft_identity: ModelIdentity | None
    ) -> None:
        self._core = core
        self._store = store
        self._fit = fit
        self._draft_identity = draft_identity
        self._buffer = bytearray()
        self._one = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")

    # -- save

    async def save(self, id_slot: int, filename: str, owner: str, call: Call) -> SaveResult:
        """The caller holds the slot."""
        started = time.perf_counter()
        slot = self._core.slot(id_slot)
        async with self._one:
            plan: SavePlan = await call(lambda: self._plan(slot))
            with engine_errors():
                saved = await self._write(slot, plan, filename, owner, call)
        elapsed = time.perf_counter() - started
        self._count("slot_saves", saved.n_written, elapsed)
        has_draft = saved.draft_bytes > 0
        return SaveResult(
            id_slot=id_slot,
            filename=filename,
            n_saved=len(plan.tokens),
            n_written=saved.n_written,
            save_ms=elapsed * 1e3,
            n_ckpt_saved=saved.n_checkpoints,
            target_bytes=saved.target_bytes,
            draft=DraftReport(
                has_draft, plan.n_draft, saved.draft_bytes, "" if has_draft else "the drafter holds nothing"
            ),
        )

    def _plan(self, slot: Slot) -> SavePlan:
        core = self._core
        n_draft = core.drafter.n_tokens(slot.id)
        fit = core.drafter.fit(slot.id) if n_draft else b""
        return SavePlan(
            tokens=slot.tokens.view().tolist(),
            target_size=core.target.state_size(slot.id, partial=False) if len(slot.tokens) else 0,
            draft_size=core.drafter.state_size(slot.id, partial=False) if fit else 0,
            n_draft=n_draft,
            fit=fit,
            checkpoints=tuple(slot.checkpoints),
        )

    async def _write(self, slot: Slot, plan: SavePlan, filename: str, owner: str, call: Call) -> Saved:
        """Section by section through one buffer: copied on the engine thread, hashed and written on the other."""
        core = self._core
        buffer = await self._io(lambda: self._buffer_of(max(plan.target_size, plan.draft_size)))
        writer = await self._io(lambda: self._store.create(owner, filename))
        try:
            state: Any = b""
            if plan.tokens:
                state = await call(lambda: core.target.read_state(slot.id, buffer, partial=False))
            await self._io(lambda: writer.payload(plan.tokens, state))
            await self._io(lambda: writer.checkpoints(len(plan.checkpoints), plan.checkpoints))
            if plan.fit:
                draft: DraftState = await call(lambda: core.drafter.capture(slot.id, buffer, partial=False))
                await self._io(lambda: writer.draft(plan.fit, draft.context, draft.spec))
            return await self._io(lambda: writer.commit(self._facts(len(plan.tokens), bool(plan.fit))))
        finally:
            await self._io(writer.abort)

    def _facts(self, n_tokens: int, has_draft: bool) -> FileFacts:
        return FileFacts(
            target=self._fit.identity,
            draft=self._draft_identity if has_draft else None,
            settings=self._fit.settings,
            n_tokens=n_tokens,
            writer=f"spec-server {__version__}",
        )

    # -- restore

    async def restore(self, id_slot: int, filename: str, owner: str, call: Call) -> RestoreResult:
        """The caller holds the slot. Nothing of it is touched before everything that can be checked was."""
        started = time.perf_counter()
        slot = self._core.slot(id_slot)
        try:
            async with self._one:
                with engine_errors():
                    file = await self._io(lambda: self._store.open(owner, filename))
                    try:
                        loaded = await self._io(lambda: self._load(file))
                        draft: DraftReport = await call(lambda: self._apply(slot, loaded, owner))
                    finally:
                        await self._io(file.close)
        except EngineError as e:
            self._core.stats.events[f'slot_restores_total{{outcome="{type(e).__name__}"}}'] += 1
            raise
        elapsed = time.perf_counter() - started
        self._count("slot_restores", file.n_read, elapsed)
        self._count_dropped(file, draft)
        n = len(loaded.tokens)
        return RestoreResult(
            id_slot=id_slot,
            filename=filename,
            n_restored=n,
            n_read=file.n_read,
            restore_ms=elapsed * 1e3,
            n_ckpt_restored=len(slot.checkpoints),
            n_ckpt_dropped=file.n_checkpoints - len(slot.checkpoints),
            target_bytes=file.target_bytes,
            draft=draft,
            checksum=file.checksum,
            n_reusable=n,
            notes=(*file.notes, *self._checkpoint_notes(file, len(slot.checkpoints))),
        )

    def _checkpoint_notes(self, file: SlotFile, n_kept: int) -> list[str]:
        """Why some of the file's checkpoints are not in the slot: damage, then this server's limits."""
        damaged = [d for d in file.dropped if d.section == "checkpoints"]
        notes = [f"checkpoint {d.index}: {d.reason}" for d in damaged]
        n_left_out = file.n_checkpoints - sum(d.index < file.n_checkpoints for d in damaged) - n_kept
        if n_left_out:
            notes.append(f"{n_left_out} checkpoints left out: {self._core.checkpoints.limit()}")
        return notes

    def _load(self, file: SlotFile) -> Loaded:
        """Check the fit by what is known already, then read and verify the sections. On the writer thread."""
        tokens = np.frombuffer(file.tokens, dtype=np.int32) if len(file.tokens) else np.empty(0, np.int32)
        if len(tokens) and int(tokens.min()) < 0:
            raise FileRefused("the file holds tokens that are none", field="tokens", slot="unchanged")
        check_fit(self._fit, file.facts, len(tokens), int(tokens.max(initial=0)))
        target = file.read_target(self._buffer_of(file.target_bytes))
        if len(target):
            head = self._core.target.state_head()
            target[: len(head)] = head
        checkpoints = self._core.checkpoints.collect(file.checkpoints())
        draft = file.draft()
        damaged = next((d.reason for d in file.dropped if d.section == "draft"), "")
        reason = damaged or ("" if draft else "the file holds no draft block")
        return Loaded(tokens, target, checkpoints, draft, reason)

    def _apply(self, slot: Slot, loaded: Loaded, owner: str) -> DraftReport:
        """On the engine thread: all of the slot is replaced, or all of it is empty."""
        core, n = self._core, len(loaded.tokens)
        others = sum(core.target.n_tokens(s.id) for s in core.slots if s is not slot)
        if n > core.target.n_ctx - others:
            raise FileRefused(
                f"no room: the file holds {n} tokens, {core.target.n_ctx - others} cells are free",
                field="n_ctx",
                expected=core.target.n_ctx - others,
                found=n,
                slot="unchanged",
            )
        if n == 0:
            core.rollback.clear(slot)
            return DraftReport(False, 0, 0, loaded.draft_reason)
        core.drafter.truncate(slot.id, 0)
        slot.checkpoints.clear()
        slot.tokens = TokenList()
        try:
            core.target.write_state(slot.id, loaded.target, n, partial=False)
        except StateError as e:
            raise FileRefused(f"llama refuses the state: {e}", field="target", slot="empty") from e
        slot.tokens.extend(loaded.tokens)
        slot.owner = owner
        draft = self._apply_draft(slot, loaded)
        core.checkpoints.adopt(slot, loaded.checkpoints, with_draft=draft.restored)
        return draft

    def _apply_draft(self, slot: Slot, loaded: Loaded) -> DraftReport:
        """The draft block where it fits; else the drafter of this slot stays empty."""
        block, drafter = loaded.draft, self._core.drafter
        if block is None:
            return DraftReport(False, 0, 0, loaded.draft_reason)
        n_bytes = len(block.context) + len(block.spec)
        reason = drafter.unfit(block.fit, len(loaded.tokens), len(block.context), len(block.spec))
        if reason is None:
            try:
                drafter.apply(
                    slot.id, DraftState(block.context, block.spec), slot.tokens.view(), partial=False
                )
            except DraftStateError as e:
                reason = f"llama refuses the draft state: {e}"
        return DraftReport(reason is None, drafter.n_tokens(slot.id), n_bytes, reason or "")

    # -- erase and files

    def erase(self, id_slot: int) -> EraseResult:
        """On the engine thread."""
        slot = self._core.slot(id_slot)
        n = len(slot.tokens)
        self._core.rollback.clear(slot)
        return EraseResult(id_slot, n)

    async def list_files(self, owner: str) -> list[SlotFileEntry]:
        with engine_errors():
            return [self._entry(f) for f in await self._io(lambda: self._store.list(owner))]

    async def file(self, filename: str, owner: str) -> SlotFileEntry:
        with engine_errors():
            return self._entry(await self._io(lambda: self._store.describe(owner, filename)))

    async def remove_file(self, filename: str, owner: str) -> None:
        with engine_errors():
            await self._io(lambda: self._store.remove(owner, filename))

    def _entry(self, file: StoredFile) -> SlotFileEntry:
        facts = file.facts
        return SlotFileEntry(
            name=file.name,
            model=facts.target.name if facts else "",
            draft_model=facts.draft.name if facts and facts.draft else "",
            n_tokens=facts.n_tokens if facts else 0,
            n_checkpoints=file.n_checkpoints,
            has_draft=file.draft_bytes > 0,
            n_bytes=file.n_bytes,
            modified=file.modified,
            reason=str(file.error) if file.error else misfit(self._fit, facts),
        )

    # -- the writer thread, the buffer, the counts

    async def _io(self, work: Callable[[], T]) -> T:
        """Run on the writer thread; not given up when the caller goes away, so that a save ends whole or absent."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))

    def _buffer_of(self, n_bytes: int) -> memoryview:
        if len(self._buffer) < n_bytes:
            self._buffer = bytearray()
            self._buffer = bytearray(n_bytes)
        return memoryview(self._buffer)[:n_bytes]

    def _count(self, what: str, n_bytes: int, seconds: float) -> None:
        events = self._core.stats.events
        events[f"{what}_total" + ('{outcome="restored"}' if what == "slot_restores" else "")] += 1
        events[f"{what}_bytes_total"] += n_bytes
        events[f"{what}_milliseconds_total"] += round(seconds * 1e3)

    def _count_dropped(self, file: SlotFile, draft: DraftReport) -> None:
        reasons = [("draft", draft.reason)] if draft.reason else []
        reasons += [(d.section, d.reason) for d in file.dropped if d.section == "checkpoints"]
        for part, reason in reasons:
            short = reason.split(":")[0].replace('"', "'")
            self._core.stats.events[f'slot_restore_dropped_total{{part="{part}",reason="{short}"}}'] += 1

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
