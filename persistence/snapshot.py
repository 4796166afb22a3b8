"""The value that a slot file carries; plain data, opaque to this package, and no bytes on disk here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Blob = bytes | bytearray | memoryview
Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One sequence at one point.

    `target` and `draft` are what llama's `state_seq_get_data(_ext)` gives, its 8-byte head included, in the
    one-stream form; `draft` and `spec` are empty where the drafter keeps none.
    """

    target: Blob
    draft: Blob = b""
    spec: Blob = b""

    @property
    def n_bytes(self) -> int:
        return len(self.target) + len(self.draft) + len(self.spec)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A partial state part-way through the slot's tokens: the first `n_tokens` of them."""

    n_tokens: int
    pos_min: int
    pos_max: int
    state: SequenceState


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which weights: `digest` is XXH3-128 (32 hex digits) over the GGUF's content, `name` its base name, for people."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The drafter's whole state at the tip. `fit` is the drafter's own header, JSON, opaque here."""

    fit: bytes
    context: Blob
    spec: Blob


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the footer says beside its section table.

    `settings` holds every setting that changes the payload's bytes or their meaning, by name.
    """

    target: ModelIdentity
    draft: ModelIdentity | None
    settings: Mapping[str, Scalar]
    n_tokens: int
    writer: str
    created: float = 0.0  # seconds since the epoch, UTC
    extra: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """A slot as a value: tokens, the full state at the tip, the checkpoints, and whose they are."""

    tokens: tuple[int, ...]
    state: SequenceState
    checkpoints: tuple[Checkpoint, ...]
    draft_fit: bytes
    facts: FileFacts
