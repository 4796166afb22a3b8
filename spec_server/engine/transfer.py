"""Slot to file and back. The engine thread only copies; hashing, reading and writing happen on the writer thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from draft.base import DraftState, DraftStateError
from persistence.catalog import StoredFile
from persistence.format import STATE_HEAD_BYTES, state_offset
from persistence.reader import SlotFile
from persistence.snapshot import Checkpoint, DraftBlock, FileFacts, ModelIdentity
from persistence.store import SlotStore
from persistence.writer import Saved
from spec_server import __version__
from spec_server.engine.base import DraftReport, EraseResult, RestoreResult, SaveResult, SlotFileEntry
from spec_server.engine.core import EngineCore
from spec_server.engine.errors import EngineError, FileRefused
from spec_server.engine.fitting import TargetFit, misfit
from spec_server.engine.loading import Loaded, Loader
from spec_server.engine.locks import Call
from spec_server.engine.scratch import Scratch
from spec_server.engine.slot import Slot, TokenList
from spec_server.engine.storage import engine_errors
from spec_server.engine.tally import Tally, n_left_out
from spec_server.runtime.errors import StateError

T = TypeVar("T")

_IDLE_S = 30.0  # after that the shared buffer goes back to the system


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What a save will write, taken on the engine thread; the slot is held, so it stays true."""

    tokens: list[int]
    target_size: int
    draft_size: int
    n_draft: int
    fit: bytes
    checkpoints: tuple[Checkpoint, ...]


class Transfer:
    """One transfer at a time: they share a buffer as large as the largest section."""

    def __init__(
        self, core: EngineCore, store: SlotStore, fit: TargetFit, draft_identity: ModelIdentity | None
    ) -> None:
        self._core = core
        self._store = store
        self._fit = fit
        self._draft_identity = draft_identity
        self._scratch = Scratch()
        self._tally = Tally(core.stats.events)
        self._loader = Loader(core.target, core.checkpoints, fit, self._scratch)
        self._one = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """The shared buffer for one transfer; given back when none follows."""
        async with self._one:
            if self._idle is not None:
                self._idle.cancel()
            try:
                yield
            finally:
                loop = asyncio.get_running_loop()
                self._idle = loop.call_later(_IDLE_S, self._thread.submit, self._scratch.release)

    # -- save

    async def save(self, id_slot: int, filename: str, owner: str, call: Call) -> SaveResult:
        """The caller holds the slot."""
        started = time.perf_counter()
        slot = self._core.slot(id_slot)
        held = _Held(call)
        try:
            async with self._turn():
                plan: SavePlan = await held.call(lambda: self._plan(slot))
                with engine_errors():
                    saved, sync_ms = await self._write(slot, plan, filename, owner, held)
        except EngineError as e:
            self._tally.failed("save", e)
            raise
        elapsed = time.perf_counter() - started
        self._tally.done("save", saved.n_written, elapsed)
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
            hold_ms=held.longest_ms,
            sync_ms=sync_ms,
        )

    def _plan(self, slot: Slot) -> SavePlan:
        core = self._core
        core.drafter.settle(slot.id, slot.tokens.view())
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

    async def _write(
        self, slot: Slot, plan: SavePlan, filename: str, owner: str, held: _Held
    ) -> tuple[Saved, float]:
        """Section by section through one buffer: copied on the engine thread, hashed and written on the other."""
        core = self._core
        residue = state_offset(len(plan.tokens)) - STATE_HEAD_BYTES
        buffer = await self._io(lambda: self._scratch.view(max(plan.target_size, plan.draft_size), residue))
        writer = await self._io(lambda: self._store.create(owner, filename))
        try:
            state: Any = b""
            if plan.tokens:
                state = await held.call(lambda: core.target.read_state(slot.id, buffer, partial=False))
            await self._io(lambda: writer.payload(plan.tokens, state))
            await self._io(lambda: writer.checkpoints(len(plan.checkpoints), plan.checkpoints))
            if plan.fit:
                draft: DraftState = await held.call(
                    lambda: core.drafter.capture(slot.id, buffer, partial=False)
                )
                await self._io(lambda: writer.draft(plan.fit, draft.context, draft.spec))
            facts = self._facts(len(plan.tokens), bool(plan.fit))
            before = time.perf_counter()
            saved = await self._io(lambda: writer.commit(facts))
            return saved, (time.perf_counter() - before) * 1e3
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
        held = _Held(call)
        try:
            async with self._turn():
                with engine_errors():
                    file = await self._io(lambda: self._store.open(owner, filename))
                    try:
                        loaded = await self._io(lambda: self._loader.load(file))
                        await held.call(lambda: self._apply(slot, loaded, owner))
                        draft = await self._restore_draft(slot, file, held)
                    finally:
                        await self._io(file.close)
                await held.call(lambda: self._adopt(slot, loaded, draft))
        except EngineError as e:
            self._tally.failed("restore", e)
            raise
        elapsed = time.perf_counter() - started
        self._tally.done("restore", file.n_read, elapsed)
        self._tally.dropped(file, loaded, draft, len(slot.checkpoints))
        n = len(loaded.tokens)
        return RestoreResult(
            id_slot=id_slot,
            filename=filename,
            n_restored=n,
            n_read=file.n_read,
            restore_ms=elapsed * 1e3,
            n_ckpt_restored=len(slot.checkpoints),
            n_ckpt_dropped=file.n_checkpoints - len(slot.checkpoints),
            target_bytes=max(0, file.target_bytes - len(self._core.target.state_head())),
            draft=draft,
            checksum=file.checksum,
            n_reusable=n,
            notes=(*file.notes, *self._checkpoint_notes(file, loaded, len(slot.checkpoints))),
            hold_ms=held.longest_ms,
        )

    def _checkpoint_notes(self, file: SlotFile, loaded: Loaded, n_kept: int) -> list[str]:
        """Why some of the file's checkpoints are not in the slot: damage, then this server's limits."""
        damaged = [d for d in file.dropped if d.section == "checkpoints"]
        notes = [f"checkpoint {d.index}: {d.reason}" for d in damaged]
        notes += [f"checkpoint at {n_tokens} tokens: {reason}" for n_tokens, reason in loaded.unsound]
        if n := n_left_out(file, loaded, n_kept):
            notes.append(f"{n} checkpoints left out: {self._core.checkpoints.limit()}")
        return notes

    def _apply(self, slot: Slot, loaded: Loaded, owner: str) -> None:
        """On the engine thread: the target is replaced and the rest of the slot empty, or all of it is."""
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
            return
        core.drafter.truncate(slot.id, 0)
        slot.checkpoints.clear()
        slot.tokens = TokenList()
        try:
            core.target.write_state(slot.id, loaded.target, n, partial=False, spare=loaded.spare)
        except StateError as e:
            raise FileRefused(f"llama refuses the state: {e}", field="target", slot="empty") from e
        slot.tokens.extend(loaded.tokens)
        slot.owner = owner

    async def _restore_draft(self, slot: Slot, file: SlotFile, held: _Held) -> DraftReport:
        """Read behind the target's back: the buffer is free only then, and no draft costs the target anything."""
        if not len(slot.tokens) or not file.draft_bytes:
            return DraftReport(False, 0, 0, self._lost("the file holds no draft block"))
        block = await self._io(lambda: file.draft(self._scratch.view(file.draft_bytes)))
        if block is None:
            reason = next((d.reason for d in file.dropped if d.section == "draft"), "")
            return DraftReport(False, 0, file.draft_bytes, self._lost(reason))
        report: DraftReport = await held.call(lambda: self._apply_draft(slot, block, file.draft_bytes))
        return report

    def _apply_draft(self, slot: Slot, block: DraftBlock, n_bytes: int) -> DraftReport:
        """The draft block where it fits; else the drafter of this slot stays empty."""
        drafter = self._core.drafter
        reason = drafter.unfit(block.fit, len(slot.tokens), len(block.context), len(block.spec))
        if reason:
            return DraftReport(False, 0, n_bytes, self._lost(reason))
        state = DraftState(block.context, block.spec)
        try:
            left_out = drafter.apply(slot.id, state, slot.tokens.view(), partial=False)
        except DraftStateError as e:
            return DraftReport(False, 0, n_bytes, self._lost(f"the draft state does not fit: {e}"))
        return DraftReport(True, drafter.n_tokens(slot.id), n_bytes, left_out)

    def _lost(self, reason: str) -> str:
        """Why the draft state is not there, and that it stays away where the drafter cannot make it again."""
        cannot = self._core.drafter.cannot_rebuild
        return f"{reason}; not rebuilt: {cannot}" if cannot else reason

    def _adopt(self, slot: Slot, loaded: Loaded, draft: DraftReport) -> None:
        if len(slot.tokens):
            self._core.checkpoints.adopt(slot, loaded.checkpoints, with_draft=draft.restored)

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
            n_tokens=file.n_tokens,
            n_checkpoints=file.n_checkpoints,
            has_draft=file.draft_bytes > 0,
            n_bytes=file.n_bytes,
            modified=file.modified,
            reason=str(file.error) if file.error else misfit(self._fit, facts),
        )

    # -- the writer thread

    async def _io(self, work: Callable[[], T]) -> T:
        """Run on the writer thread; not given up when the caller goes away, so that a save ends whole or absent."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        await asyncio.to_thread(self._thread.shutdown)


class _Held:
    """Calls to the engine thread; `longest_ms` is how long it was kept from its steps at most."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.longest_ms = 0.0

    async def call(self, work: Callable[[], T]) -> T:
        def timed() -> T:
            started = time.perf_counter()
            try:
                return work()
            finally:
                self.longest_ms = max(self.longest_ms, (time.perf_counter() - started) * 1e3)

        result: T = await self._call(timed)
        return result
