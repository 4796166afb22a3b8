"""Slot: one sequence of the target context and what runs on it; moves no tokens itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from persistence.snapshot import Checkpoint
from spec_server.engine.base import DEFAULT_OWNER
from spec_server.engine.task import Task

Ints = npt.NDArray[np.int32]


class SlotState(Enum):
    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"
    TRANSFER = "transfer"  # being saved or restored


class TokenList:
    """Growable int32 array; `view()` is alive until the next append."""

    __slots__ = ("_data", "_n")

    def __init__(self) -> None:
        self._data = np.empty(1024, dtype=np.int32)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def view(self) -> Ints:
        return self._data[: self._n]

    def extend(self, tokens: list[int] | Ints) -> None:
        n = self._n + len(tokens)
        if n > len(self._data):
            grown = np.empty(max(n, 2 * len(self._data)), dtype=np.int32)
            grown[: self._n] = self._data[: self._n]
            self._data = grown
        if n == self._n + 1:  # an element costs a third of a slice
            self._data[self._n] = tokens[0]
        else:
            self._data[self._n : n] = tokens
        self._n = n

    def truncate(self, n_tokens: int) -> None:
        self._n = min(self._n, n_tokens)


@dataclass(slots=True)
class Slot:
    """`tokens` is exactly what the target holds of sequence `id`; the last sampled token is not among them."""

    id: int
    tokens: TokenList = field(default_factory=TokenList)
    state: SlotState = SlotState.IDLE
    task: Task | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list)
    owner: str = DEFAULT_OWNER
    last_used: int = 0

    def common_prefix(self, prompt: Ints) -> int:
        """How many of its first tokens `prompt` shares."""
        n = min(len(self.tokens), len(prompt))
        differ = np.flatnonzero(self.tokens.view()[:n] != prompt[:n])
        return int(differ[0]) if len(differ) else n
