"""Drives a context as the engine would, a batch at a time, and keeps copies of what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spec_server.runtime.batch import Batch, Output
from spec_server.runtime.llama_context import LlamaContext
from spec_server.runtime.model import Model

ROOT = Path(__file__).resolve().parents[2]
DRAFT = ROOT / "draft/pretrained/smollm2-135m-draft.gguf"
HYBRID = ROOT / "tests/models/tiny-qwen35-mtp.gguf"
WINDOWED = ROOT / "tests/models/tiny-gemma3-swa.gguf"

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Share = tuple[int, Sequence[int] | Ints]  # sequence and tokens


def some_tokens(n: int, seed: int = 0) -> Ints:
    return np.random.default_rng(seed).integers(300, 4000, n).astype(np.int32)


class Driver:
    """A context with the settings of these tests, and a batch for it."""

    def __init__(self, model: Model, n_seq_max: int = 1, **settings: Any) -> None:
        self.context = LlamaContext(
            model, n_seq_max=n_seq_max, **{"n_ctx": 1024 * n_seq_max, "n_threads": 1, **settings}
        )
        self.batch = Batch(2048)

    def feed(self, *shares: Share, output: Output = "last", drafted: bool = False) -> list[Floats]:
        """Decode all shares in one batch; per share a copy of its logits rows [n_out, n_vocab].

        `drafted`: all but the first token of a share count as drafted.
        """
        self.batch.clear()
        parts = [
            self.batch.add(
                seq_id,
                tokens,
                self.context.n_tokens(seq_id),
                output=output,
                n_draft=len(tokens) - 1 if drafted else 0,
            )
            for seq_id, tokens in shares
        ]
        self.context.decode(self.batch)
        return [self.context.logits(part.out_start, part.n_out).copy() for part in parts]

    def step(self, seq_id: int, tokens: Ints) -> Floats:
        """Token by token; [n, n_vocab], the logits behind each."""
        return np.concatenate([self.feed((seq_id, tokens[i : i + 1]))[0] for i in range(len(tokens))])

    def read(self, seq_id: int, partial: bool = False) -> bytes:
        out = memoryview(bytearray(self.context.state_size(seq_id, partial=partial)))
        return bytes(self.context.read_state(seq_id, out, partial=partial))

    def write(self, seq_id: int, state: bytes, n_tokens: int, partial: bool = False) -> None:
        self.context.write_state(seq_id, memoryview(state), n_tokens, partial=partial)

    def close(self) -> None:
        self.context.close()


def gap(a: Floats, b: Floats) -> float:
    """The largest difference of two blocks of logits."""
    return float(np.abs(a - b).max())
