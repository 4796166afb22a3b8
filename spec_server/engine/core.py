"""EngineCore.step(): calls the stations in order and decides nothing; knows no thread, loop, socket or file."""

from __future__ import annotations

import time
from collections.abc import Callable

from draft.base import EMPTY_DRAFT, Drafter
from draft.window import LengthPolicy
from spec_server.engine import invariants
from spec_server.engine.admit import WaitingLine
from spec_server.engine.base import Started
from spec_server.engine.checkpoints import CheckpointKeeper, CheckpointOptions
from spec_server.engine.errors import GenerationFailed, SlotNotFound
from spec_server.engine.finish import Finisher
from spec_server.engine.prefill import add_chunks
from spec_server.engine.rollback import Rollback
from spec_server.engine.slot import Slot, SlotState
from spec_server.engine.speculate import DraftDefaults, Round, Speculation
from spec_server.engine.spill import Spill
from spec_server.engine.stats import Stats, StepClock
from spec_server.engine.task import Task
from spec_server.engine.threads import ThreadControl
from spec_server.runtime.batch import Batch, Part
from spec_server.runtime.context import Context
from spec_server.runtime.errors import ContextFull, LlamaError
from spec_server.runtime.model import Model


class EngineCore:
    """All slots and the two contexts. One thread; drive it step by step."""

    def __init__(
        self,
        model: Model,
        target: Context,
        drafter: Drafter,
        defaults: DraftDefaults,
        checkpoints: CheckpointOptions,
        spill: Spill,
        policy: LengthPolicy | None = None,
        threads: ThreadControl | None = None,
    ) -> None:
        self.model = model
        self.target = target
        self.drafter = drafter
        self.slots = [Slot(i) for i in range(target.n_seq_max)]
        self.line = WaitingLine()
        self.stats = Stats()
        self.checkpoints = CheckpointKeeper(target, drafter, self.slots, checkpoints, spill)
        self.rollback = Rollback(target, drafter, self.checkpoints)
        self.speculation = Speculation(target, drafter, defaults, policy)
        self.finisher = Finisher(self)
        self.threads = threads or ThreadControl(1, ())
        self.reservations: dict[int, Callable[[], None]] = {}
        self._batch = Batch(target.n_batch)

    # -- what the outside asks for

    def submit(self, task: Task) -> None:
        self.line.push(task)

    def slot(self, id_slot: int) -> Slot:
        if not 0 <= id_slot < len(self.slots):
            raise SlotNotFound(f"slot {id_slot} does not exist; this server has {len(self.slots)}")
        return self.slots[id_slot]

    def reserve(self, id_slot: int, taken: Callable[[], None]) -> None:
        """Keep requests off the slot as soon as it is idle, then call `taken`."""
        self.reservations[id_slot] = taken
        if self.slot(id_slot).state is SlotState.IDLE:
            self.finisher.hand_over(self.slot(id_slot))

    def unreserve(self, id_slot: int) -> None:
        self.reservations.pop(id_slot, None)
        slot = self.slot(id_slot)
        if slot.state is SlotState.TRANSFER:
            slot.state = SlotState.IDLE

    @property
    def has_work(self) -> bool:
        return any(s.task is not None for s in self.slots) or len(self.line) > 0

    @property
    def reads_prompts(self) -> bool:
        """May the next step have prompt tokens in it?"""
        # Who waits while no slot is idle changes nothing.
        wanted = (SlotState.PREFILL, SlotState.IDLE) if len(self.line) else (SlotState.PREFILL,)
        return any(s.state in wanted for s in self.slots)

    def say(self) -> None:
        """Stream what the steps since the last call gave. A step does not do so by itself: several tokens become
        text as fast as one, and nobody reads that fast."""
        for slot in self.slots:
            if slot.task is not None and slot.task.unsaid:
                self.finisher.say(slot.task)

    def step(self) -> bool:
        """Admit, build one batch, decode it once, verify, accept. False where there was nothing to do."""
        started = StepClock(self.target.decode_ns, self.drafter.decode_ns)
        self._drop_cancelled()
        taken = self.line.take(self.slots)
        for task, slot in taken:  # all at once: whatever fails then, nobody is in neither place
            slot.task, slot.state = task, SlotState.PREFILL
        for task, slot in taken:
            self._start(task, slot)
        decoding = [s for s in self.slots if s.state is SlotState.DECODE]
        self._batch.clear()
        drafts = self.speculation.propose(decoding)
        rounds = self.speculation.add(self._batch, decoding, drafts)
        self.rollback.before_drafts([r.slot for r in rounds if r.part.n_draft])
        chunks = add_chunks(self._batch, self.slots, self.target.n_ubatch, self.checkpoints.border)
        if not self._batch.n_tokens:
            return False
        if not self._decode(rounds, chunks):
            self.speculation.interrupted()
            return True
        if chunks:
            self._after_chunks(
                chunks
            )  # first: going back behind a draft may decode, and rows live until then
        n_gained = self._after_rounds(rounds)
        self._count_step(started, rounds, chunks, n_gained)
        return True

    # -- the stations' glue

    def _start(self, task: Task, slot: Slot) -> None:
        """Rewind the slot to what the task's prompt shares with it."""
        shared = 0
        if slot.owner == task.request.owner and task.request.cache_prompt:
            shared = min(slot.common_prefix(task.prompt), len(task.prompt) - 1)
        kept = self.rollback.to_prefix(slot, shared)
        slot.owner = task.request.owner
        task.n_cache, task.cache_kind, task.n_checkpoint = kept.n_tokens, kept.kind, kept.n_checkpoint
        self.drafter.begin(slot.id, slot.tokens.view())

    def _decode(self, rounds: list[Round], chunks: list[tuple[Slot, Part]]) -> bool:
        """One target decode and the drafter's look at it. False where the step came to nothing."""
        try:
            self.target.decode(self._batch)
        except ContextFull:
            # All of them: one that found no place in this batch may hold the cells that are lacking.
            self.finisher.make_room([s for s in self.slots if s.task is not None])
            return False
        except LlamaError as e:
            for slot in [r.slot for r in rounds] + [s for s, _ in chunks]:
                self.finisher.fail(slot, GenerationFailed(f"the model failed to decode: {e}"))
            return False
        self._batch.parts[: len(rounds)] = [r.part for r in rounds]  # less what only the target lacked
        if chunks or not self.speculation.is_skipped:
            self.drafter.process(self._batch)
        return True

    def _after_rounds(self, rounds: list[Round]) -> int:
        """Verify and cut every slot's block before anything is rewound, then rewind each context once.

        Returns how many tokens count.
        """
        outcomes = []
        for round_ in rounds:
            try:
                tokens = self.speculation.verify(round_)
            except LlamaError as e:
                self.finisher.fail(round_.slot, GenerationFailed(f"no next token: {e}"))
                continue
            outcomes.append((round_, tokens, self.finisher.deliver(round_.slot, round_.task, tokens)))
        self.speculation.accept([(r, d.n_kept, len(tokens) - 1) for r, tokens, d in outcomes])
        for round_, tokens, delivered in outcomes:
            slot, task, n_kept = round_.slot, round_.task, delivered.n_kept
            slot.tokens.extend([task.last_token, *tokens[:n_kept]])
            task.n_decodes += 1
            if not self.rollback.to_tip(slot):
                self.finisher.fail(slot, GenerationFailed("a rejected draft cannot be taken back"))
                continue
            if round_.draft.tokens:
                # A drafted token that ends the generation stood too, though it is in no context.
                n_accepted = min(n_kept + 1, len(tokens) - 1)
                task.count_draft(round_.draft.drafter, len(round_.draft.tokens), n_accepted)
            if task.request.trace:
                task.trace.append(self._trace(round_, n_kept))
            self._advance(slot, task, tokens[n_kept], delivered.stop_type, tokens[: n_kept + 1])
        return sum([d.n_kept + 1 for _, _, d in outcomes])

    def _after_chunks(self, chunks: list[tuple[Slot, Part]]) -> None:
        for slot, part in chunks:
            task = slot.task
            assert task is not None
            slot.tokens.extend(task.prompt[part.pos0 : part.pos0 + part.n_tokens])
            self.checkpoints.after_chunk(slot, task)
            if len(slot.tokens) < len(task.prompt):
                continue
            task.emit(task, Started(slot.id, len(task.prompt), task.n_cache))
            if task.request.max_tokens == 0:
                self.finisher.end(slot, task, "limit", [])
                continue
            rows = self.target.logits(part.out_start, 1)
            try:
                tokens = self.speculation.pick(slot, task, rows, EMPTY_DRAFT, -1)
            except LlamaError as e:
                self.finisher.fail(slot, GenerationFailed(f"no first token: {e}"))
                continue
            task.first_token = time.perf_counter()
            slot.state = SlotState.DECODE
            self._advance(slot, task, tokens[0], self.finisher.deliver(slot, task, tokens).stop_type, tokens)

    def _advance(self, slot: Slot, task: Task, last: int, stop_type: str, tokens: list[int]) -> None:
        """End the task where it ended, else remember the token to go on from, and what counts of this step."""
        if not stop_type and len(slot.tokens) >= self.target.n_ctx_seq:
            stop_type = "context"
        if stop_type:
            self.finisher.end(slot, task, stop_type, tokens)
            return
        task.last_token = last
        task.unsaid += tokens

    def _drop_cancelled(self) -> None:
        self.line.drop_cancelled()
        for slot in self.slots:
            if slot.task is not None and slot.task.cancelled:
                self.finisher.release(slot)

    def _count_step(
        self, started: StepClock, rounds: list[Round], chunks: list[tuple[Slot, Part]], n_gained: int
    ) -> None:
        wall, target = started.wall_ns(), self.target.decode_ns - started.target_ns
        is_quiet = self.speculation.is_quiet and not chunks
        own = wall - target - (0 if is_quiet else self.drafter.decode_ns - started.drafter_ns)
        self.stats.n_steps += 1
        self.stats.n_busy += len(rounds) + len(chunks)
        n_drafted = sum([len(r.draft.tokens) for r in rounds])
        self.stats.overhead_us.append((own / 1e3, len(rounds) + len(chunks), n_drafted))
        if chunks:
            self.speculation.interrupted()
        else:
            self.speculation.end_step(self._batch.n_tokens, target / 1e6, wall / 1e6, n_gained)
            self.threads.after_step(self._batch.n_tokens, target / 1e6, wall / 1e6)

    def _trace(self, round_: Round, n_accepted: int) -> dict[str, object]:
        slot = round_.slot
        return {
            # What a replay needs: equal steps shared a decode, and prompts lie there in the order of their requests.
            "step": self.stats.n_steps,
            "started": round_.task.started,
            "draft": list(round_.draft.tokens),
            "accepted": n_accepted,
            "target_pos": self.target.n_tokens(slot.id) - 1,
            "draft_pos": self.drafter.n_tokens(slot.id) - 1,
        }

    def check_invariants(self) -> None:
        """AssertionError where the step invariant does not hold."""
        invariants.check(self.slots, self.target, self.drafter)

    def close(self) -> None:
        self._batch.close()
        self.drafter.close()
        self.target.close()
