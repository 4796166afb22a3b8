"""A stored file on its way in: all that can be checked without touching llama or a slot, on the writer thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from persistence.reader import SlotFile
from persistence.snapshot import Checkpoint
from spec_server.engine.checkpoints import CheckpointKeeper
from spec_server.engine.errors import FileRefused
from spec_server.engine.fitting import TargetFit, check_fit
from spec_server.engine.scratch import Scratch
from spec_server.runtime.context import Context
from spec_server.runtime.errors import StateError


@dataclass(slots=True)
class Loaded:
    """A target state that passed every check; the last `spare` bytes of `target` are no part of it."""

    tokens: np.ndarray  # [n] int32
    target: memoryview
    spare: int
    checkpoints: list[Checkpoint]
    unsound: list[tuple[int, str]] = field(
        default_factory=list
    )  # checkpoints that cannot be: n_tokens, reason


class Loader:
    """Reads files for one target."""

    def __init__(
        self, target: Context, checkpoints: CheckpointKeeper, fit: TargetFit, scratch: Scratch
    ) -> None:
        self._target = target
        self._checkpoints = checkpoints
        self._fit = fit
        self._scratch = scratch

    def load(self, file: SlotFile) -> Loaded:
        """FileRefused, or what persistence raises; the slot is unchanged then."""
        tokens = np.frombuffer(file.tokens, dtype=np.int32) if len(file.tokens) else np.empty(0, np.int32)
        if len(tokens) and int(tokens.min()) < 0:
            raise FileRefused("the file holds tokens that are none", field="tokens", slot="unchanged")
        check_fit(self._fit, file.facts, len(tokens), int(tokens.max(initial=0)))
        spare = 8 * self._target.n_seq_max  # a count for each other stream in each of two parts
        n_bytes = file.target_bytes + spare
        try:
            buffer = self._scratch.view(max(n_bytes, file.draft_bytes))[:n_bytes]
        except MemoryError as e:
            raise FileRefused(
                f"no memory for a target state of {file.target_bytes} bytes", field="target", slot="unchanged"
            ) from e
        target = file.read_target(buffer)
        if len(tokens):
            self._check_target(target, len(tokens))
        loaded = Loaded(tokens, buffer, spare, [])
        loaded.checkpoints = self._checkpoints.collect(self._sound(file, loaded.unsound))
        return loaded

    def _check_target(self, target: memoryview, n_tokens: int) -> None:
        head = self._target.state_head()
        target[: len(head)] = head[: len(target)]
        try:
            self._target.check_state(target, n_tokens, partial=False)
        except StateError as e:
            raise FileRefused(f"the target state does not fit: {e}", field="target", slot="unchanged") from e

    def _sound(self, file: SlotFile, unsound: list[tuple[int, str]]) -> Iterator[Checkpoint]:
        """The checkpoints that this target could have written; most are applied much later, or never."""
        if not self._checkpoints.enabled:
            return
        for checkpoint in file.checkpoints():
            try:
                state = memoryview(checkpoint.state.target)
                self._target.check_state(state, checkpoint.n_tokens, partial=True)
            except StateError as e:
                unsound.append((checkpoint.n_tokens, str(e)))
            else:
                yield checkpoint
