"""Where two greedy answers part: replays both with the batches that their servers decoded, and judges.

A batch of another size rounds logits differently, so the argmax may flip where two tokens are nearly equal. That is
all that a parting may be: a fresh context that decodes the recorded batches, with no drafter and no engine in the
process, has to come to the same two tokens, both of which are the plain run's two best, at most MAX_GAP apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from spec_server.runtime.batch import Batch
from spec_server.runtime.llama_context import LlamaContext
from spec_server.runtime.model import Model
from tests.e2e.served import Answer

MAX_GAP = 0.5
MAX_SHARE = 0.2  # of the prompts compared, where one client asks at a time


@dataclass(frozen=True)
class Shape:
    """What of a server's settings moves its logits. `ctx` counts tokens per slot."""

    model: Path
    slots: int = 1
    ctx: int = 2048
    unified: bool = False
    n_ubatch: int = 512


@dataclass(frozen=True)
class Pick:
    """The best two tokens of one row, how far the second lies behind, and all that lie no more than MAX_GAP behind."""

    best: int
    second: int
    gap: float
    close: Mapping[int, float] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Parting:
    """Two greedy answers to one prompt that part at token `index`."""

    index: int
    plain: int
    other: int
    gap: float


@dataclass(frozen=True)
class _Work:
    """One slot's share of one recorded decode. `n_keep`: how many of its tokens stay."""

    answer: int
    slot: int
    pos0: int
    tokens: tuple[int, ...]
    n_keep: int
    rows: int  # output rows, the last ones
    is_prompt: bool


def parting(plain: Answer, other: Answer, shape: Shape) -> Parting | None:
    """None where the tokens are equal. AssertionError where they part and it is not rounding.

    Both answers were made on a server of this shape while its other slots were idle.
    """
    assert plain.prompt == other.prompt
    at = first_difference(plain.tokens, other.tokens)
    if at is None:
        return None
    with opened(shape) as model:
        [of_plain] = replay([plain], shape, model)
        [of_other] = replay([other], shape, model)
    return judged(plain, other, of_plain, of_other, at)


def judged(
    plain: Answer,
    other: Answer,
    of_plain: Sequence[Pick],
    of_other: Sequence[Pick],
    at: int,
    in_crowd: bool = False,
) -> Parting:
    """In a crowd every token within MAX_GAP may win: neighbours' cells move logits more than a batch's size does."""
    ours, theirs = plain.tokens[at], other.tokens[at]
    assert of_plain[at].best == ours, f"token {at}: the plain run has {ours}, its replay {of_plain[at]}"
    assert of_other[at].best == theirs, f"token {at}: the other run has {theirs}, its replay {of_other[at]}"
    if in_crowd:
        assert theirs in of_plain[at].close, f"token {at}: {theirs} is not close to the best: {of_plain[at]}"
        return Parting(at, ours, theirs, of_plain[at].close[theirs])
    assert theirs == of_plain[at].second, f"token {at}: {theirs} is not among the best two: {of_plain[at]}"
    assert of_plain[at].gap <= MAX_GAP, f"token {at}: {of_plain[at]}"
    return Parting(at, ours, theirs, of_plain[at].gap)


def judge_all(partings: Sequence[Parting | None], max_share: float = MAX_SHARE) -> str:
    """One line of report; AssertionError where too many part."""
    found = [p for p in partings if p is not None]
    gaps = ", ".join(f"{p.gap:.3f} at token {p.index}" for p in found)
    line = f"{len(found)} of {len(partings)} part" + (f": {gaps}" if found else "")
    assert len(found) <= max_share * len(partings), line
    return line


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two answers part. One may have gone on after the other's limit, which is no parting."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), None)


@contextmanager
def opened(shape: Shape) -> Iterator[Model]:
    model = Model(shape.model)
    try:
        yield model
    finally:
        model.close()


def replay(answers: Sequence[Answer], shape: Shape, model: Model) -> list[list[Pick]]:
    """For each answer and each of its tokens what a fresh context picks, given the recorded batches of all of them.

    Answers with one slot follow each other there; those that shared steps share batches. The whole of every answer
    has to come out.
    """
    picks: list[list[Pick]] = [[] for _ in answers]
    context = LlamaContext(
        model,
        n_ctx=shape.ctx * shape.slots,
        n_seq_max=shape.slots,
        n_ubatch=shape.n_ubatch,
        kv_unified=shape.unified,
        n_threads=1,
    )
    batch = Batch(context.n_batch)
    with context:
        for works in _steps(answers, shape):
            for work in works:
                if work.is_prompt:
                    context.truncate(work.slot, work.pos0)
            batch.clear()
            parts = [
                batch.add(w.slot, w.tokens, w.pos0, output="last" if w.rows else "none")
                if w.is_prompt
                else batch.add(w.slot, w.tokens, w.pos0, output="all", n_draft=len(w.tokens) - 1)
                for w in works
            ]
            context.decode(batch)
            for work, part in zip(works, parts, strict=True):
                if work.rows:
                    rows = context.logits(part.out_start, part.n_out)
                    banned = sorted(model.eog) if answers[work.answer].bans_eog else []
                    picks[work.answer] += [_pick(row, banned) for row in rows[: work.rows]]
            for work in works:
                context.truncate(work.slot, work.pos0 + work.n_keep)
    batch.close()
    for answer, of_answer in zip(answers, picks, strict=True):
        got = tuple(p.best for p in of_answer)
        at = first_difference(got, answer.tokens)
        where = "" if at is None else f" from {at} on, there {of_answer[at]}"
        assert got == answer.tokens, (
            f"the replay comes to other tokens{where}: {got}, recorded {answer.tokens}"
        )
    return picks


def _pick(row: np.ndarray, banned: Sequence[int]) -> Pick:
    if banned:
        row = row.copy()
        row[banned] = -np.inf
    top = np.argpartition(row, -2)[-2:]
    # argmax, as the first of equals is taken
    best = int(row.argmax())
    second = int(top[0] if top[1] == best else top[1])
    close = {int(i): float(row[best] - row[i]) for i in np.flatnonzero(row >= row[best] - MAX_GAP)}
    return Pick(best, second, float(row[best] - row[second]), close)


def _steps(answers: Sequence[Answer], shape: Shape) -> list[list[_Work]]:
    """The recorded decodes in order: decoding slots in the order of slots, then prompts, the oldest request first."""
    steps: dict[int, list[_Work]] = {}
    for index, answer in enumerate(answers):
        assert answer.steps, "without a single round the step of the prompt is not known"
        for step, work in (*_prompt_work(index, answer, shape), *_round_work(index, answer)):
            steps.setdefault(step, []).append(work)

    def place(work: _Work) -> tuple[bool, float]:
        return work.is_prompt, answers[work.answer].started if work.is_prompt else work.slot

    ordered = [sorted(steps[number], key=place) for number in sorted(steps)]
    for works in ordered:
        assert sum(len(w.tokens) for w in works) <= shape.n_ubatch, (
            "a prompt was cut where the trace does not say"
        )
    return ordered


def _prompt_work(index: int, answer: Answer, shape: Shape) -> Iterator[tuple[int, _Work]]:
    starts = range(answer.timings["cache_n"], len(answer.prompt), shape.n_ubatch)
    for i, start in enumerate(starts):
        tokens = answer.prompt[start : start + shape.n_ubatch]
        is_last = i == len(starts) - 1
        work = _Work(index, answer.id_slot, start, tokens, len(tokens), int(is_last), True)
        yield answer.steps[0] - len(starts) + i, work


def _round_work(index: int, answer: Answer) -> Iterator[tuple[int, _Work]]:
    done, pos = 1, len(answer.prompt)
    for step, entry in zip(answer.steps, answer.rounds, strict=True):
        n_kept = 1 + entry["accepted"]
        tokens = (answer.tokens[done - 1], *entry["draft"])
        yield step, _Work(index, answer.id_slot, pos, tokens, n_kept, n_kept, False)
        done += n_kept
        pos += n_kept
