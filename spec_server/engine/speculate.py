"""One draft-verify round over all decoding slots: propose before the decode, verify and accept after it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from draft.base import EMPTY_DRAFT, Accepted, Draft, Drafter, DraftRequest
from draft.window import LengthPolicy
from spec_server.engine.slot import Ints, Slot
from spec_server.engine.task import Task
from spec_server.runtime.batch import Batch, Part
from spec_server.runtime.context import Context, Floats

_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class DraftDefaults:
    """The server's --spec-draft-* values that a request may replace; each drafter has its own longest draft."""

    n_min: int = 0
    p_min: float = 0.0


@dataclass(slots=True)
class Round:
    """One slot's part of a decode: its last token and the draft behind it, less what the target lacked. Behind the
    draft may be tokens that only fill the batch; nobody looks at their rows."""

    slot: Slot
    task: Task
    draft: Draft
    part: Part


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round gave: the tokens that count, and how many of the drafted ones stay in the target."""

    tokens: list[int]
    n_accepted: int


class Speculation:
    """Stateless between steps; asks the drafter for all slots at once."""

    def __init__(
        self, target: Context, drafter: Drafter, defaults: DraftDefaults, policy: LengthPolicy | None = None
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._defaults = defaults
        self.policy = policy  # None: fixed lengths
        self.is_skipped = False  # no drafter need be shown this step
        # One batch holds every slot's last token and draft, and one rollback takes a whole draft back.
        self._n_max = min(drafter.n_max, target.n_draft_max, target.n_batch // target.n_seq_max - 1)

    @property
    def is_quiet(self) -> bool:
        """In this step nobody was asked for a draft."""
        return self.policy is not None and self.policy.quiet.is_on

    def propose(self, slots: Sequence[Slot]) -> list[Draft]:
        """One draft per slot, in order; empty where a slot wants none or has no room."""
        policy = self.policy
        drafts = [EMPTY_DRAFT] * len(slots)
        if policy is not None:
            self.is_skipped = policy.quiet.step(len(slots))
            if self.is_skipped:
                return drafts
            policy.begin_step(len(slots))
        if self._n_max <= 0:
            return drafts
        requests = []
        wanting = []
        for i, slot in enumerate(slots):
            if policy is not None and policy.rests(slot.id) and not self._may_be_free(slot, policy):
                continue
            request = self._request(slot)
            if request is not None:
                requests.append(request)
                wanting.append(i)
        if requests:
            started = time.perf_counter_ns()
            for i, draft in zip(wanting, self._drafter.propose(requests), strict=True):
                drafts[i] = draft
            spent = (time.perf_counter_ns() - started) // len(requests)
            for i in wanting:
                task = slots[i].task
                assert task is not None
                task.count_drafting(drafts[i].drafter, spent)
        if policy is not None and slots:
            self._look_ahead(policy, slots, drafts)
        return drafts

    def _look_ahead(self, policy: LengthPolicy, slots: Sequence[Slot], drafts: Sequence[Draft]) -> None:
        """A step without drafts is shown to nobody if every drafter can do without it; where nothing was found for
        long the next ones are quiet then."""
        if any([draft.tokens for draft in drafts]):
            policy.quiet.in_vain()
            return
        if not all([_asks_everybody(slot) for slot in slots]):
            return  # who is not asked would never catch up
        seq_ids = [slot.id for slot in slots]
        n_steps = policy.may_be_quiet(seq_ids)
        self.is_skipped = all([self._drafter.may_skip(slot.id, len(slot.tokens)) for slot in slots])
        if n_steps and self.is_skipped:
            policy.be_quiet(seq_ids, n_steps)

    def _may_be_free(self, slot: Slot, policy: LengthPolicy) -> bool:
        """Could there be a draft that costs nothing, and pays?"""
        assert slot.task is not None
        return not policy.free_rests and self._drafter.may_be_free(
            slot.id, slot.tokens.view(), slot.task.last_token
        )

    def add(self, batch: Batch, slots: Sequence[Slot], drafts: Sequence[Draft]) -> list[Round]:
        """Append each slot's last token and draft to the batch, after what the target lacks (rollback.py)."""
        rounds = []
        n_filled = self._filled(slots, drafts)
        for slot, draft in zip(slots, drafts, strict=True):
            task = slot.task
            assert task is not None
            n_fill = max(0, n_filled - len(draft.tokens))
            tokens = [task.last_token, *draft.tokens, *[task.last_token] * n_fill]
            pos0 = self._target.n_tokens(slot.id)
            n_behind = len(slot.tokens) - pos0
            if n_behind:
                tokens = [*slot.tokens.view()[pos0:].tolist(), *tokens]
            part = batch.add(slot.id, tokens, pos0, output="all", n_draft=len(draft.tokens) + n_fill)
            if n_behind:
                part = without_first(part, n_behind)
            rounds.append(Round(slot, task, draft, part))
        return rounds

    def _filled(self, slots: Sequence[Slot], drafts: Sequence[Draft]) -> int:
        """The length to which the length rule wants all drafts filled up; 0 where a slot has no room for that."""
        if self.policy is None or self.is_quiet or not drafts:
            return 0
        n = self.policy.fill(max([len(draft.tokens) for draft in drafts]))
        if not n:
            return 0
        target = self._target
        n_free = target.n_ctx - sum(target.n_tokens(seq_id) for seq_id in range(target.n_seq_max))
        # What fills is never said, so the end of the answer is no limit: a length that shrinks there is a change too.
        fits = len(slots) * (n + 1) <= n_free and all(
            n <= min(self._n_max - self._n_behind(slot), target.n_ctx_seq - len(slot.tokens) - 1)
            for slot in slots
        )
        return n if fits else 0

    def _n_behind(self, slot: Slot) -> int:
        """Tokens of the slot that the target lacks."""
        return len(slot.tokens) - self._target.n_tokens(slot.id)

    def verify(self, round_: Round) -> list[int]:
        """The round's tokens: accepted ones, then one recovered or bonus token; nothing is rewound yet."""
        part, task = round_.part, round_.task
        rows = self._target.logits(part.out_start, 1 + len(round_.draft.tokens))
        return self.pick(round_.slot, task, rows, round_.draft, task.last_token)

    def pick(self, slot: Slot, task: Task, rows: Floats, draft: Draft, last_token: int) -> list[int]:
        """Tokens for the positions behind `last_token` (behind the prompt where it is negative)."""
        sampler = task.sampler
        history = _history(slot, sampler.n_history, last_token)
        return sampler.pick(rows, draft, len(slot.tokens) + (last_token >= 0), history)

    def accept(self, outcomes: Sequence[tuple[Round, int, int]]) -> None:
        """Tell the drafter what stays of every part that had a draft, and how much of it stood."""
        settled = [Accepted(r.slot.id, kept, stood) for r, kept, stood in outcomes if r.part.n_draft]
        if settled:
            self._drafter.accept(settled)

    def end_request(self, slot: Slot) -> None:
        """The slot's request is over: what quiet steps kept from those who draft from text is read now."""
        if self.policy is not None:
            self._drafter.may_be_free(slot.id, slot.tokens.view(), 0)

    def end_step(self, n_tokens: int, target_ms: float, wall_ms: float, n_gained: int) -> None:
        """A step without prompt chunks is over; what it took and gave is what the draft length goes by."""
        if self.policy is not None:
            self.policy.end_step(n_tokens, target_ms, wall_ms, n_gained)

    def interrupted(self) -> None:
        """A step with prompt chunks, or that came to nothing, is over."""
        if self.policy is not None:
            self.policy.interrupted()

    def _room(self, slot: Slot, task: Task, n_tokens: int) -> int:
        """The longest draft that fits behind the slot's n_tokens tokens."""
        # What the target lacks takes the draft's place, so that a batch never grows past a token and a draft.
        n_max = self._n_max - (n_tokens - self._target.n_tokens(slot.id))
        # The round's own token needs no cell and counts as one, so a draft may fill all but that.
        return min(n_max, task.remaining(self._target.n_ctx_seq, n_tokens) - 1)

    def _request(self, slot: Slot) -> DraftRequest | None:
        task = slot.task
        assert task is not None
        n_tokens = len(slot.tokens)
        wanted = task.request.speculative
        n_max = self._room(slot, task, n_tokens)
        if wanted.n_max is not None:
            n_max = min(wanted.n_max, n_max)
        if n_max <= 0 or wanted.type == "none":
            return None
        return DraftRequest(
            slot.id,
            slot.tokens.view(),
            task.last_token,
            n_max,
            self._defaults.n_min if wanted.n_min is None else wanted.n_min,
            self._defaults.p_min if wanted.p_min is None else wanted.p_min,
            task.sampler.drafting(n_tokens + 1, _history(slot, task.sampler.n_history, task.last_token)),
            only=wanted.type or "",
        )


def _asks_everybody(slot: Slot) -> bool:
    """Does the slot's request take drafts of every drafter?"""
    assert slot.task is not None
    wanted = slot.task.request.speculative
    return wanted.type is None and wanted.n_max != 0


def _history(slot: Slot, n: int, last_token: int) -> Ints:
    """The last n tokens before the next one; `last_token` is not in the slot yet, or negative."""
    if not n:
        return _NO_TOKENS
    tokens = slot.tokens.view()
    if last_token < 0:
        return tokens[max(0, len(tokens) - n) :]
    return np.append(tokens[max(0, len(tokens) + 1 - n) :], np.int32(last_token))


def without_first(part: Part, n: int) -> Part:
    """A part with an output row per token, less its first n tokens."""
    if n == 0:
        return part
    return replace(
        part,
        start=part.start + n,
        n_tokens=part.n_tokens - n,
        pos0=part.pos0 + n,
        out_start=part.out_start + n,
        n_out=part.n_out - n,
    )
