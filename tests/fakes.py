"""FakeEngine: the Engine protocol without a model, for tests of everything above it. A token is a byte."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from spec_server.engine.base import (
    Delta,
    DraftReport,
    EraseResult,
    Event,
    Finished,
    GenerateRequest,
    ModelInfo,
    RestoreResult,
    SaveResult,
    SlotFileEntry,
    Started,
    Timings,
)
from spec_server.engine.errors import (
    ContextExceeded,
    FileNotFound,
    GenerationFailed,
    InvalidRequest,
    NotSupported,
    Overloaded,
    SlotNotFound,
)

BOS, EOS, N_VOCAB = 256, 257, 258
SPECIAL = {"<s>": BOS, "</s>": EOS}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
GOOD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}(?<!\.)")


def model_info(**changes: object) -> ModelInfo:
    facts: dict[str, object] = {
        "alias": "fake",
        "path": "/models/fake.gguf",
        "n_ctx_seq": 512,
        "n_ctx_train": 2048,
        "n_vocab": N_VOCAB,
        "n_embd": 8,
        "n_params": 1000,
        "size": 4000,
        "chat_template": TEMPLATE,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "created": 1,
    }
    return ModelInfo(**{**facts, **changes})  # type: ignore[arg-type]


@dataclass
class FakeEngine:
    """Answers every prompt with `answer`, `n_step` tokens a step. `n_active` and `n_closed` tell what became
    of the generations that were not read to their end."""

    answer: str = "hello world"
    n_step: int = 3
    n_slots: int = 2
    model: ModelInfo = field(default_factory=model_info)
    prefill_s: float = 0.0
    step_s: float = 0.0
    fail_at: int | None = None
    n_waiting_limit: int | None = None
    has_directory: bool = True
    is_ready: tuple[bool, str] = (True, "")
    is_drafting: bool = True
    n_active: int = 0
    n_closed: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    contents: dict[int, tuple[int, ...]] = field(default_factory=dict)
    files: dict[str, tuple[int, ...]] = field(default_factory=dict)
    refusal: Exception | None = None
    counts: dict[str, float] = field(default_factory=dict)

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool, is_prompt: bool = False
    ) -> list[int]:
        tokens = [BOS] if add_special else []
        parts = re.split("(<s>|</s>)", text) if parse_special else [text]
        for part in parts:
            tokens += [SPECIAL[part]] if part in SPECIAL and parse_special else list(part.encode())
        return tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        self._check(request)
        self.requests.append(request)
        id_slot = max(request.id_slot, 0)
        self.n_active += 1
        n_sent = 0
        try:
            await asyncio.sleep(self.prefill_s)
            if self.refusal is not None:
                raise self.refusal
            yield Started(id_slot, len(request.prompt), 0)
            tokens = list(self.answer.encode())
            limit = len(tokens) if request.max_tokens < 0 else min(request.max_tokens, len(tokens))
            while n_sent < limit:
                await asyncio.sleep(self.step_s)
                if self.fail_at is not None and n_sent >= self.fail_at:
                    raise GenerationFailed("decode failed")
                step = tuple(tokens[n_sent : min(n_sent + self.n_step, limit)])
                n_sent += len(step)
                yield Delta(self.detokenize(step), step)
            self.contents[id_slot] = (*request.prompt, *tokens[:n_sent])
            yield self._finished(request, id_slot, n_sent, limit == len(tokens))
        except (GeneratorExit, asyncio.CancelledError):
            self.n_closed += 1
            raise
        finally:
            self.n_active -= 1

    def _check(self, request: GenerateRequest) -> None:
        if request.id_slot >= self.n_slots:
            raise SlotNotFound(f"no slot {request.id_slot}")
        n_ctx = self.model.n_ctx_seq
        if len(request.prompt) >= n_ctx:
            message = f"the prompt has {len(request.prompt)} tokens, the context {n_ctx}"
            raise ContextExceeded(message, n_prompt_tokens=len(request.prompt), n_ctx=n_ctx)
        if request.speculative.type not in (None, "none", "draft-simple"):
            raise InvalidRequest("no such drafter", param="speculative.type")
        if self.n_waiting_limit is not None and self.n_active >= self.n_waiting_limit:
            raise Overloaded("the queue is full")

    def _finished(self, request: GenerateRequest, id_slot: int, n_sent: int, is_whole: bool) -> Finished:
        n_drafted = n_sent if self.is_drafting else 0
        timings = Timings(
            cache_n=0,
            prompt_n=len(request.prompt),
            prompt_ms=2.0,
            predicted_n=n_sent,
            predicted_ms=4.0,
            draft_n=n_drafted,
            draft_n_accepted=n_drafted // 2,
            accepted_per_pos=(n_drafted // 2,) if self.is_drafting else (),
            drafters={"draft-simple": {"draft_n": n_drafted}} if self.is_drafting else {},
        )
        self.counts["tokens_predicted_total"] = self.counts.get("tokens_predicted_total", 0) + n_sent
        return Finished(
            reason="stop" if is_whole else "length",
            stop_type="eos" if is_whole else "limit",
            stopping_word="",
            truncated=False,
            n_prompt=len(request.prompt),
            id_slot=id_slot,
            seed=request.sampling.seed if request.sampling.seed is not None else 7,
            timings=timings,
            trace=({"drafted": [1, 2], "n_accepted": 1},) if request.trace else (),
        )

    def _file_name(self, filename: str) -> str:
        if not GOOD_NAME.fullmatch(filename):
            raise InvalidRequest("filename: not a plain file name", param="filename")
        if not self.has_directory:
            raise NotSupported("started without --slot-save-path")
        return filename

    async def save(self, id_slot: int, filename: str, owner: str) -> SaveResult:
        name = self._file_name(filename)
        tokens = self.files[name] = self.contents.get(id_slot, ())
        return SaveResult(id_slot, name, len(tokens), 100, 1.5, 0, 60, DraftReport(True, len(tokens), 40, ""))

    async def restore(self, id_slot: int, filename: str, owner: str) -> RestoreResult:
        name = self._file_name(filename)
        if self.refusal is not None:
            raise self.refusal
        if name not in self.files:
            raise FileNotFound(f"no slot file {name}", slot="unchanged")
        tokens = self.contents[id_slot] = self.files[name]
        draft = DraftReport(False, 0, 0, "another draft model")
        return RestoreResult(
            id_slot, name, len(tokens), 100, 1.5, 0, 1, 60, draft, "verified", len(tokens), ("a note",)
        )

    async def erase(self, id_slot: int) -> EraseResult:
        return EraseResult(id_slot, len(self.contents.pop(id_slot, ())))

    async def slot_files(self, owner: str) -> list[SlotFileEntry]:
        return [self._entry(name) for name in sorted(self.files)]

    async def slot_file(self, filename: str, owner: str) -> SlotFileEntry:
        if self._file_name(filename) not in self.files:
            raise FileNotFound(f"no slot file {filename}")
        return self._entry(filename)

    async def remove_slot_file(self, filename: str, owner: str) -> None:
        await self.slot_file(filename, owner)
        del self.files[filename]

    def _entry(self, name: str) -> SlotFileEntry:
        return SlotFileEntry(name, "fake", "drafty", len(self.files[name]), 0, True, 100, 2.0, "")

    def props(self) -> Mapping[str, object]:
        speculative = {"enabled": self.is_drafting, "reason": "" if self.is_drafting else "--spec-type none"}
        return {"speculative": speculative, "slot_draft": True, "slot_checkpoints": True}

    def slots(self) -> list[Mapping[str, object]]:
        return [
            {"id": i, "n_ctx": self.model.n_ctx_seq, "is_processing": i < self.n_active}
            for i in range(self.n_slots)
        ]

    def counters(self) -> Mapping[str, float]:
        return self.counts

    def status(self) -> tuple[bool, str]:
        return self.is_ready
