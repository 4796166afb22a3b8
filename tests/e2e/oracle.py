"""What a drafter would propose that has seen nothing but the text: rebuilt from scratch for every round.

No code of the drafters is in it: a fresh sequence, the text in one go, then greedy tokens one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spec_server.runtime.batch import Batch
from spec_server.runtime.llama_context import LlamaContext
from spec_server.runtime.model import Model

MAX_GAP = 0.5


@dataclass(frozen=True)
class Proposal:
    """Greedy tokens, the second best of each, and how far that lies behind."""

    tokens: tuple[int, ...]
    seconds: tuple[int, ...]
    gaps: tuple[float, ...]


class Oracle:
    def __init__(self, model: Model, *, n_ctx: int, type_k: str, type_v: str) -> None:
        self._context = LlamaContext(model, n_ctx=n_ctx, n_threads=1, type_k=type_k, type_v=type_v)
        self._batch = Batch(self._context.n_batch)
        self._eog = model.eog

    def propose(self, text: Sequence[int], n_max: int) -> Proposal:
        """At most n_max tokens behind `text`; an end token is the last."""
        self._context.truncate(0, 0)
        for start in range(0, len(text) - 1, self._context.n_ubatch):
            self._decode(text[start : min(start + self._context.n_ubatch, len(text) - 1)], start)
        token, tokens, seconds, gaps = text[-1], [], [], []
        while len(tokens) < n_max:
            row = self._decode([token], len(text) - 1 + len(tokens))
            token = int(row.argmax())
            second = _second(row, token)
            tokens.append(token)
            seconds.append(second)
            gaps.append(float(row[token] - row[second]))
            if token in self._eog:
                break
        return Proposal(tuple(tokens), tuple(seconds), tuple(gaps))

    def _decode(self, tokens: Sequence[int], pos0: int) -> np.ndarray:
        self._batch.clear()
        self._batch.add(0, tokens, pos0, output="last")
        self._context.decode(self._batch)
        return self._context.logits(0, 1)[0]

    def close(self) -> None:
        self._batch.close()
        self._context.close()


def _second(row: np.ndarray, best: int) -> int:
    a, b = (int(i) for i in np.argpartition(row, -2)[-2:])
    return b if a == best else a


@contextmanager
def oracle(path: Path, *, n_ctx: int = 2048, type_k: str = "f16", type_v: str = "f16") -> Iterator[Oracle]:
    model = Model(path)
    made = Oracle(model, n_ctx=n_ctx, type_k=type_k, type_v=type_v)
    try:
        yield made
    finally:
        made.close()
        model.close()


def agrees(draft: Sequence[int], proposal: Proposal) -> bool | None:
    """True where the draft is the proposal, None where they part at a near tie, else False."""
    for i, token in enumerate(draft):
        if i >= len(proposal.tokens):
            return False
        if token != proposal.tokens[i]:
            return None if token == proposal.seconds[i] and proposal.gaps[i] <= MAX_GAP else False
    return True


def acceptance(prompt: Sequence[int], answer: Sequence[int], n_max: int, made: Oracle) -> tuple[int, int]:
    """(drafted, accepted) of draft-verify rounds that give `answer`, which is known; the first token is free."""
    drafted = accepted = 0
    done = 1
    while done < len(answer):
        # The round's own token counts as one of those that are left.
        room = min(n_max, len(answer) - done - 1)
        if room:
            tokens = made.propose([*prompt, *answer[:done]], room).tokens
            n = next((i for i, t in enumerate(tokens) if t != answer[done + i]), len(tokens))
            drafted += len(tokens)
            accepted += n
            done += n
        done += 1
    return drafted, accepted
