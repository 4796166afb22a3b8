"""The Engine protocol and the plain data that crosses it; the API needs nothing else of the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

DEFAULT_OWNER = "default"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """llama-server's names and defaults; temperature <= 0 is greedy. seed None: chosen by the engine."""

    temperature: float = 0.8
    top_k: int = 40  # <= 0: off
    top_p: float = 0.95
    min_p: float = 0.05
    typ_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SpeculativeParams:
    """Per-request overrides; None takes the server's value. `type` "none" turns drafting off for the request."""

    type: str | None = None
    n_max: int | None = None
    n_min: int | None = None
    p_min: float | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion.

    `boundaries` are prompt lengths worth a checkpoint (the prefix before the last user message), increasing.
    max_tokens < 0: until the context's end. max_tokens 0: the prompt is processed and nothing generated.
    """

    prompt: Sequence[int]
    max_tokens: int = -1
    sampling: SamplingParams = SamplingParams()
    speculative: SpeculativeParams = SpeculativeParams()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    id_slot: int = -1  # -1: the engine chooses
    cache_prompt: bool = True
    boundaries: tuple[int, ...] = ()
    owner: str = DEFAULT_OWNER
    trace: bool = False  # per round: drafted ids, accepted count, positions; in Finished.trace


@dataclass(frozen=True, slots=True)
class Timings:
    """llama-server's names. Times in ms. prompt_n: tokens processed; cache_n: tokens reused."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    draft_n: int
    draft_n_accepted: int
    draft_ms: float = 0.0
    n_drafts: int = 0  # rounds with a draft
    n_decodes: int = 0  # target decodes that took part in this request's generation
    accepted_per_pos: tuple[int, ...] = ()
    draft_prompt_n: int = 0  # prompt tokens that the drafter itself processed
    # by name: drafts, drafted, accepted, mean_length (1 + accepted / drafts), draft_ms, accepted_per_pos
    drafters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cache_kind: Literal["prefix", "checkpoint", "none"] = "none"
    n_checkpoint: int = 0  # tokens of the checkpoint that was applied


@dataclass(frozen=True, slots=True)
class Started:
    """The request has its slot and its prompt is processed (sent before the first Delta)."""

    id_slot: int
    n_prompt: int
    cache_n: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that became certain since the last one: whole UTF-8 characters, no part of a possible stop string.
    `tokens` are the tokens accepted since then."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request. `reason` "stop": an end token or a stop string; "length": max_tokens or the context."""

    reason: Literal["stop", "length"]
    stop_type: Literal["eos", "word", "limit"]
    stopping_word: str
    truncated: bool  # True where the context's end stopped it
    n_prompt: int
    id_slot: int
    seed: int
    timings: Timings
    trace: tuple[Mapping[str, object], ...] = ()


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What became of the draft part of a save or a restore."""

    restored: bool  # saved, for a save
    n_tokens: int
    n_bytes: int
    reason: str  # why not; empty where it was


@dataclass(frozen=True, slots=True)
class SaveResult:
    id_slot: int
    filename: str
    n_saved: int
    n_written: int
    save_ms: float
    n_ckpt_saved: int
    target_bytes: int
    draft: DraftReport
    hold_ms: float = 0.0  # longest stretch for which the engine thread was kept from its steps
    sync_ms: float = 0.0  # part of save_ms that went into getting the bytes onto the disk, and the name


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """n_reusable: the cache_n that the next exact append will have."""

    id_slot: int
    filename: str
    n_restored: int
    n_read: int
    restore_ms: float
    n_ckpt_restored: int
    n_ckpt_dropped: int
    target_bytes: int
    draft: DraftReport
    checksum: Literal["verified", "absent"]
    n_reusable: int
    notes: tuple[str, ...] = ()
    hold_ms: float = 0.0  # as in SaveResult


@dataclass(frozen=True, slots=True)
class EraseResult:
    id_slot: int
    n_erased: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the API says of the model that is served."""

    alias: str
    path: str
    n_ctx_seq: int
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    n_params: int
    size: int
    chat_template: str
    bos_token: str
    eos_token: str
    created: int


@dataclass(frozen=True, slots=True)
class SlotFileEntry:
    """One stored file, from its footer; `reason` says why it does not fit this server, empty where it does."""

    name: str
    model: str
    draft_model: str
    n_tokens: int
    n_checkpoints: int
    has_draft: bool
    n_bytes: int
    modified: float
    reason: str


class Engine(Protocol):
    """Async face of the engine. Everything here is called on the event loop; nothing here waits for a decode
    except generate, save, restore and erase."""

    model: ModelInfo
    n_slots: int

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool, is_prompt: bool = False
    ) -> list[int]:
        """Pure; may take long for long texts: call it in a thread.

        ContextExceeded: it `is_prompt`, and far too long for a slot; found out early, and `n_prompt_tokens` is
        then how many tokens it has at least.
        """

    def detokenize(self, tokens: Sequence[int]) -> str: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Started, Delta*, Finished. Closing the iterator early (aclose) cancels within one step.

        Raises before the first event: InvalidRequest, ContextExceeded, SlotNotFound, Overloaded, Unavailable.
        Later: GenerationFailed.
        """

    async def save(self, id_slot: int, filename: str, owner: str) -> SaveResult:
        """Waits until the slot is idle. SlotNotFound, InvalidRequest (name), NotSupported, Storage*."""

    async def restore(self, id_slot: int, filename: str, owner: str) -> RestoreResult:
        """As save; also FileNotFound, FileRefused."""

    async def erase(self, id_slot: int) -> EraseResult: ...

    async def slot_files(self, owner: str) -> list[SlotFileEntry]: ...

    async def slot_file(self, filename: str, owner: str) -> SlotFileEntry: ...

    async def remove_slot_file(self, filename: str, owner: str) -> None: ...

    def props(self) -> Mapping[str, object]:
        """Facts for /props beside what `model` says: speculative, slot_draft, slot_checkpoints, persistence."""

    def slots(self) -> list[Mapping[str, object]]:
        """One mapping per slot as of the last step."""

    def counters(self) -> Mapping[str, float]:
        """Monotone counts and gauges as of the last step, by metric name without prefix."""

    def status(self) -> tuple[bool, str]:
        """(ready, reason)."""
