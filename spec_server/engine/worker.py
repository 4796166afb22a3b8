"""The one engine thread and its async face: a mailbox in, events out; nothing else here knows threads and loops."""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from spec_server.engine.base import (
    EraseResult,
    Event,
    Finished,
    GenerateRequest,
    ModelInfo,
    RestoreResult,
    SaveResult,
    SlotFileEntry,
)
from spec_server.engine.core import EngineCore
from spec_server.engine.errors import (
    ContextExceeded,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    SlotNotFound,
    Unavailable,
)
from spec_server.engine.locks import SlotLocks
from spec_server.engine.outbox import Events, Outbox
from spec_server.engine.report import counters, slot_facts
from spec_server.engine.sample import DEFAULT_RULE, Rule, bans_everything, make_sampler
from spec_server.engine.stream import TextStream
from spec_server.engine.task import Task
from spec_server.engine.transfer import Transfer
from spec_server.runtime.errors import TooManyTokens

log = logging.getLogger(__name__)
T = TypeVar("T")

_SWITCH_INTERVAL_S = 0.0005  # the engine thread must not wait 5 ms for the GIL after each decode


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """queue_limit 0: no bound. debug: check the step invariant after every step. rule: which drafts stand."""

    queue_limit: int = 0
    debug: bool = False
    rule: Rule = DEFAULT_RULE


def engine_thread() -> ThreadPoolExecutor:
    """The one thread that calls llama, from the first decode on.

    OpenMP keeps a team of workers for every thread that ever computed; with two teams there are more workers than
    cores, and then it lets all of them sleep at every barrier (measured: 60 tokens/s instead of 120 on two cores).
    """
    return ThreadPoolExecutor(1, thread_name_prefix="engine")


class EngineWorker:
    """Engine over one EngineCore; see the Engine protocol."""

    def __init__(
        self,
        core: EngineCore,
        transfer: Transfer,
        model: ModelInfo,
        facts: Mapping[str, object],
        options: WorkerOptions,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        """`thread` is the engine thread that built the core; without one the worker makes its own."""
        self.model = model
        self.n_slots = len(core.slots)
        self._core = core
        self._transfer = transfer
        self._facts = facts
        self._options = options
        self._locks = SlotLocks(core)
        self._mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(self._loop)
        self._stopping = False
        self._transfers: set[asyncio.Future[Any]] = set()
        self._thread = thread or engine_thread()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._ended = self._thread.submit(self._run)

    # -- async face

    def status(self) -> tuple[bool, str]:
        return (not self._stopping, "shutting down" if self._stopping else "")

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool, is_prompt: bool = False
    ) -> list[int]:
        n_ctx = self.model.n_ctx_seq
        try:
            return self._core.model.tokenize(text, add_special, parse_special, n_ctx if is_prompt else None)
        except TooManyTokens as e:
            message = f"the prompt has at least {e.n_tokens} tokens, the context of a slot is {n_ctx}"
            raise ContextExceeded(message, n_prompt_tokens=e.n_tokens, n_ctx=n_ctx) from None

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self._core.model.detokenize(list(tokens), special=True).decode("utf-8", "replace")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        self._check(request)
        events = Events()
        model = self._core.model
        banned = (*model.suppressed, *(model.eog if request.ignore_eos else ()))
        if bans_everything(request.sampling, self.model.n_vocab, banned):
            raise InvalidRequest("logit_bias: no token is left that may come out", param="logit_bias")
        task = Task(
            request=request,
            prompt=np.asarray(request.prompt, dtype=np.int32),
            sampler=make_sampler(request.sampling, self.model.n_vocab, self._options.rule, banned),
            text=TextStream(request.stop),
            emit=lambda _, event: self._outbox.put(events, event),
        )
        self._post(lambda: self._core.submit(task))
        try:
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            task.cancelled = True
            self._post(_nothing)

    async def save(self, id_slot: int, filename: str, owner: str) -> SaveResult:
        return await self._on_slot(id_slot, lambda: self._transfer.save(id_slot, filename, owner, self._call))

    async def restore(self, id_slot: int, filename: str, owner: str) -> RestoreResult:
        return await self._on_slot(
            id_slot, lambda: self._transfer.restore(id_slot, filename, owner, self._call)
        )

    async def erase(self, id_slot: int) -> EraseResult:
        return await self._on_slot(id_slot, lambda: self._call(lambda: self._transfer.erase(id_slot)))

    async def _on_slot(self, id_slot: int, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """`work` while nothing else has the slot, to its end even where the caller goes away: the buffer that it
        reads into and the slot that it half filled must not be given to the next one before."""

        async def hold() -> T:
            async with self._locks.held(id_slot, self._call):
                return await work()

        task = asyncio.ensure_future(hold())
        self._transfers.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._transfers.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked has it, or has gone away

    async def slot_files(self, owner: str) -> list[SlotFileEntry]:
        return await self._transfer.list_files(owner)

    async def slot_file(self, filename: str, owner: str) -> SlotFileEntry:
        return await self._transfer.file(filename, owner)

    async def remove_slot_file(self, filename: str, owner: str) -> None:
        await self._transfer.remove_file(filename, owner)

    def props(self) -> Mapping[str, object]:
        return self._facts

    def slots(self) -> list[Mapping[str, object]]:
        return [slot_facts(self._core, slot) for slot in self._core.slots]

    def counters(self) -> Mapping[str, float]:
        return counters(self._core)

    async def close(self) -> None:
        """End every request with Unavailable, stop the thread, free the contexts."""
        if self._stopping:
            return
        self._stopping = True
        self._post(_nothing)
        await asyncio.wrap_future(self._ended)
        self._thread.shutdown()
        if self._transfers:  # each finds out at its next call, and cleans up
            await asyncio.wait(self._transfers)
        await self._transfer.close()
        self._core.close()

    def _check(self, request: GenerateRequest) -> None:
        """Everything that can be refused without the engine thread."""
        if self._stopping:
            raise Unavailable("the server is shutting down")
        n_prompt, n_ctx = len(request.prompt), self.model.n_ctx_seq
        if request.id_slot >= 0:
            try:
                self._core.slot(request.id_slot)
            except SlotNotFound as e:
                raise SlotNotFound(str(e), param="id_slot") from None
        if not n_prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if n_prompt >= n_ctx:
            raise ContextExceeded(
                f"the prompt has {n_prompt} tokens, the context of a slot is {n_ctx}",
                n_prompt_tokens=n_prompt,
                n_ctx=n_ctx,
            )
        if min(request.prompt) < 0 or max(request.prompt) >= self.model.n_vocab:
            raise InvalidRequest(f"a token id lies outside 0..{self.model.n_vocab - 1}", param="prompt")
        drafters = ("none", *self._core.drafter.name.split(","))
        if request.speculative.type not in (None, *drafters):
            raise InvalidRequest(
                f"no drafter is called {request.speculative.type}; here are {', '.join(dict.fromkeys(drafters))}",
                param="speculative.type",
            )
        if 0 < self._options.queue_limit <= len(self._core.line):
            raise Overloaded(f"{self._options.queue_limit} requests are waiting already")

    # -- the engine thread

    async def _call(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine thread between two steps."""
        future: asyncio.Future[T] = self._loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def run() -> None:
            try:
                result, error = work(), None
            except Exception as e:  # handed to the caller, traceback and all
                result, error = None, e
            self._loop.call_soon_threadsafe(settle, result, error)

        if self._stopping:
            raise Unavailable("the server is shutting down")
        self._post(run)
        return await future

    def _post(self, work: Callable[[], None]) -> None:
        self._mailbox.put(work)

    def _run(self) -> None:
        busy = False
        while not self._stopping:
            try:
                busy = self._turn(busy)
            except Exception:
                log.exception("a step failed; every request in progress ends and its slot is emptied")
                self._end_all(GenerationFailed("an internal error ended the request"))
                self._outbox.hand_over()
                busy = False
        self._end_all(Unavailable("the server is shutting down"))
        self._drain()
        self._outbox.hand_over()

    def _turn(self, busy: bool) -> bool:
        """Listen, step, speak; returns whether there may be more to do at once."""
        core = self._core
        if not busy:
            self._mailbox.get()()
        self._drain()
        if core.reads_prompts:  # such a step takes long
            self._say()
        busy = core.has_work
        if busy:
            busy = core.step()
            if self._options.debug:
                core.check_invariants()
        if core.finisher.awaits_transfer:
            core.finisher.awaits_transfer = busy = False
        if not busy or self._outbox.is_due:
            self._say()
        return busy

    def _say(self) -> None:
        self._core.say()
        self._outbox.hand_over()

    def _drain(self) -> None:
        while not self._mailbox.empty():
            self._mailbox.get()()

    def _end_all(self, error: Unavailable | GenerationFailed) -> None:
        for slot in self._core.slots:
            if slot.task is not None:
                self._core.finisher.give_up(slot, error)
        for task in self._core.line.clear():
            task.emit(task, error)


def _nothing() -> None:
    pass
