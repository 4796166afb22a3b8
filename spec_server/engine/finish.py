"""Where a generation ends: end tokens, stop strings, limits, failure, cancellation; and what it leaves behind."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from spec_server.engine.base import Delta
from spec_server.engine.errors import ContextExceeded, EngineError
from spec_server.engine.slot import Slot, SlotState
from spec_server.engine.task import Task

if TYPE_CHECKING:
    from spec_server.engine.core import EngineCore

log = logging.getLogger(__name__)

StopType = Literal["", "eos", "word", "limit", "context"]


@dataclass(slots=True)
class Delivered:
    """Of a round's tokens the first n_kept + 1 count; the last of them is in no context. `stop_type`: why it ends."""

    n_kept: int
    stop_type: StopType


class Finisher:
    """Cuts accepted blocks before they are counted, and takes tasks off their slots."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._clock = 0
        self.awaits_transfer = (
            False  # steps are in vain until something else happens; whoever steps takes it back
        )

    def deliver(self, slot: Slot, task: Task, tokens: Sequence[int]) -> Delivered:
        """Count the round's tokens in order, up to the first that ends the generation."""
        model = self._core.model
        for i, token in enumerate(tokens):
            task.n_predicted += 1
            if model.is_eog(token) and not task.request.ignore_eos:
                return Delivered(i, "eos")
            if task.text.may_stop and task.text.push(model.piece(token)):
                return Delivered(i, "word")
            if 0 <= task.request.max_tokens <= task.n_predicted:
                return Delivered(i, "limit")
        return Delivered(len(tokens) - 1, "")

    def say(self, task: Task, stop_type: str = "") -> None:
        """Stream the tokens that nobody heard of yet and their text; the last of both where there is a stop type."""
        tokens, text = task.unsaid, task.text
        if not text.may_stop:  # else they were looked at one by one
            for token in tokens[:-1] if stop_type == "eos" else tokens:
                text.push(self._core.model.piece(token))
        if stop_type and stop_type != "word":
            text.flush()
        said = text.take()
        if said or tokens:
            task.emit(task, Delta(said, tuple(tokens)))
        task.unsaid = []

    def end(self, slot: Slot, task: Task, stop_type: str, tokens: list[int]) -> None:
        """Send the last text and the end, count the request, free the slot."""
        task.unsaid += tokens
        self.say(task, stop_type)
        draft_prompt_n = self._core.drafter.prompt_tokens(slot.id)
        kind: Literal["eos", "word", "limit"] = (
            "eos" if stop_type == "eos" else "word" if stop_type == "word" else "limit"
        )
        finished = task.finished(slot.id, kind, stop_type == "context", draft_prompt_n)
        self._core.stats.finish(finished.timings)
        self.release(slot)
        task.emit(task, finished)

    def fail(self, slot: Slot, error: EngineError) -> None:
        """A decode went wrong: nothing of the slot can be trusted any more."""
        task = slot.task
        self._core.rollback.clear(slot)
        self.release(slot)
        if task is not None:
            self.say(task)
            task.emit(task, error)

    def give_up(self, slot: Slot, error: EngineError) -> None:
        """The same where even emptying the slot went wrong: its next request begins with that."""
        task = slot.task
        try:
            self.fail(slot, error)
        except Exception:  # whoever waits has to hear of it
            log.exception("slot %d cannot be emptied", slot.id)
            slot.tokens.truncate(0)
            slot.checkpoints.clear()
            self._free(slot)
            if task is not None:
                task.emit(task, error)

    def release(self, slot: Slot) -> None:
        """Off the slot; what was decoded so far stays for the next request."""
        self._core.rollback.catch_up(slot)
        self._core.speculation.end_request(slot)
        self._free(slot)

    def _free(self, slot: Slot) -> None:
        """For the next request, or for whoever reserved it."""
        self._core.line.go_on()
        self._clock += 1
        slot.last_used = self._clock
        slot.task, slot.state = None, SlotState.IDLE
        if slot.id in self._core.reservations:
            self.hand_over(slot)

    def hand_over(self, slot: Slot) -> None:
        """The slot is idle and reserved: keep requests off it and say so to whoever waits."""
        slot.state = SlotState.TRANSFER
        self._core.reservations[slot.id]()

    def make_room(self, active: Sequence[Slot]) -> None:
        """The shared cells are all in use, and the next step tries again.

        In order: an idle slot is emptied, the one used least recently; the newest prompt waits until a request has
        ended; all wait while a slot that holds cells is being saved or restored, since it will be idle then; the
        longest answer ends here; a prompt that is alone and does not fit is refused.
        """
        idle = [s for s in self._core.slots if s.state is SlotState.IDLE and len(s.tokens)]
        if idle:
            self._core.rollback.clear(min(idle, key=lambda s: s.last_used))
            self._core.stats.events["slots_emptied_for_room_total"] += 1
            return
        reading = [s for s in active if s.state is SlotState.PREFILL]
        if reading and len(active) > 1:
            self._postpone(max(reading, key=lambda s: s.task.started if s.task else 0.0))
            return
        if any(s.state is SlotState.TRANSFER and self._core.target.n_tokens(s.id) for s in self._core.slots):
            self.awaits_transfer = True
            return
        decoding = [s for s in active if s.state is SlotState.DECODE]
        if decoding:
            slot = max(decoding, key=lambda s: len(s.tokens))
            assert slot.task is not None
            self.end(slot, slot.task, "context", [])
            return
        slot = max(active, key=lambda s: len(s.tokens))
        assert slot.task is not None
        n_prompt, n_ctx = len(slot.task.prompt), self._core.target.n_ctx
        self.fail(
            slot,
            ContextExceeded("no room in the shared context", n_prompt_tokens=n_prompt, n_ctx=n_ctx),
        )

    def _postpone(self, slot: Slot) -> None:
        """Back to the head of the line; what was read of the prompt is given up."""
        task = slot.task
        assert task is not None
        self._core.rollback.clear(slot)
        self.release(slot)
        self._core.line.put_back(task)
        self._core.stats.events["requests_postponed_for_room_total"] += 1
