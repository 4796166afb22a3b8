"""The MTP head: hidden rows in, drafts out; as a drafter would drive it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spec_server.runtime.batch import Batch
from spec_server.runtime.llama_context import LlamaContext
from spec_server.runtime.model import Model
from tests.runtime.drive import Driver, Floats, gap, some_tokens

pytestmark = pytest.mark.model

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


class Head:
    """An MTP context, and the batch with hidden rows that it takes."""

    def __init__(self, model: Model, n_seq_max: int = 1, **settings: Any) -> None:
        self.context = LlamaContext(model, n_ctx=1024 * n_seq_max, n_seq_max=n_seq_max, mtp=True, **settings)
        self.batch = Batch(512, n_embd=self.context.n_embd)

    def feed(self, *shares: tuple[int, list[int], Floats], output: Any = "last") -> None:
        self.batch.clear()
        for seq_id, tokens, hidden in shares:
            part = self.batch.add(seq_id, tokens, self.context.n_tokens(seq_id), output=output)
            self.batch.embd[part.start : part.start + part.n_tokens] = hidden
        self.context.decode(self.batch)


def test_most_drafts_are_right(models: dict[str, Model], drive: Callable[..., Driver]) -> None:
    model = models["hybrid"]
    target, head = drive("hybrid", n_rs_seq=3, expose_hidden=True), Head(model)
    tokens = model.tokenize(PROMPT, False, True)
    target.feed((0, tokens[:-1]))
    hidden = target.context.hidden(0, len(tokens) - 1).copy()
    head.feed((0, tokens[:-1], np.concatenate([np.zeros((1, 256), np.float32), hidden[:-1]])))
    pending, n_drafted, n_accepted = hidden[-1:], 0, 0
    for _ in range(25):
        n, row, draft = len(tokens) - 1, pending, []
        token = tokens[-1]
        for _ in range(2):
            head.feed((0, [token], row))
            token = int(head.context.logits(0, 1)[0].argmax())
            row = head.context.hidden(0, 1).copy()
            draft.append(token)
        head.context.truncate(0, n)
        rows = target.feed((0, [tokens[-1], *draft]), output="all", drafted=True)[0]
        hidden = target.context.hidden(0, 3).copy()
        best = rows.argmax(1).tolist()
        k = next((i for i in range(2) if best[i] != draft[i]), 2)
        target.context.truncate(0, n + 1 + k)
        head.feed((0, [tokens[-1], *draft[:k]], np.concatenate([pending, hidden[:k]])))
        pending = hidden[k : k + 1]
        tokens += [*draft[:k], best[k]]
        n_drafted, n_accepted = n_drafted + 2, n_accepted + k
    assert n_accepted / n_drafted > 0.6
    head.context.close()


@pytest.mark.parametrize("kv_unified", [True, False])
def test_rows_of_a_ragged_batch(models: dict[str, Model], kv_unified: bool) -> None:
    """Logits and hidden rows by output row, in batch order, whatever the micro-batches were."""
    rng = np.random.default_rng(0)
    shares = [
        (seq_id, some_tokens(n, n).tolist(), rng.standard_normal((n, 256)).astype(np.float32))
        for seq_id, n in ((2, 7), (0, 2), (1, 5))
    ]
    together, alone = Head(models["hybrid"], 3, kv_unified=kv_unified), Head(models["hybrid"])
    together.feed(*shares, output="all")
    for part, (_, tokens, hidden) in zip(together.batch.parts, shares, strict=True):
        alone.context.truncate(0, 0)
        alone.feed((0, tokens, hidden), output="all")
        n = len(tokens)
        assert gap(together.context.logits(part.out_start, n), alone.context.logits(0, n)) < 0.6
        assert gap(together.context.hidden(part.out_start, n), alone.context.hidden(0, n)) < 0.2
    together.context.close()
    alone.context.close()


def test_its_state_comes_back(models: dict[str, Model]) -> None:
    hidden = np.random.default_rng(0).standard_normal((60, 256)).astype(np.float32)
    head = Head(models["hybrid"], 3, kv_unified=False)
    context = head.context
    assert not context.needs_checkpoints
    assert context.can_rewind_draft
    head.feed((1, some_tokens(59).tolist(), hidden[:59]))
    state = context.read_state(1, memoryview(bytearray(context.state_size(1, partial=False))), partial=False)
    head.feed((1, [7], hidden[59:]))
    live = context.logits(0, 1).copy()
    context.write_state(2, state, 59, partial=False)
    head.feed((2, [7], hidden[59:]))
    assert gap(context.logits(0, 1), live) == 0.0
    context.close()
