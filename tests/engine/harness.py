"""Drives an EngineCore or an EngineWorker in this process, on real models; asserts nothing itself.

Cores: `run(core, request(prompt, n=32))` inside `with core_of(Setup(HYBRID, n_rs_seq=4)) as core`.
Engines with a slot store: `async with serve(Setup(WINDOW), tmp_path) as server`, then `server.ask(...)`.
Both end with Turns: `.tokens`, `.text`, `.timings`, `.counts`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from draft.base import Drafter
from draft.none import NoDrafter
from draft.registry import DrafterSetup, make_drafter
from eval.models import target
from persistence.snapshot import ModelIdentity
from persistence.store import DirectoryStore
from spec_server.engine.base import (
    DEFAULT_OWNER,
    Delta,
    EraseResult,
    Event,
    Finished,
    GenerateRequest,
    ModelInfo,
    RestoreResult,
    SamplingParams,
    SaveResult,
    Timings,
)
from spec_server.engine.checkpoints import CheckpointOptions
from spec_server.engine.core import EngineCore
from spec_server.engine.fitting import TargetFit
from spec_server.engine.sample import make_sampler
from spec_server.engine.speculate import DraftDefaults
from spec_server.engine.spill import make_spill
from spec_server.engine.stream import TextStream
from spec_server.engine.task import Task
from spec_server.engine.transfer import Transfer
from spec_server.engine.worker import EngineWorker, WorkerOptions
from spec_server.runtime.llama_context import LlamaContext
from spec_server.runtime.model import Model

ROOT = Path(__file__).resolve().parents[2]
HYBRID = ROOT / "tests" / "models" / "tiny-qwen35-mtp.gguf"  # gated delta net, every fourth layer attention
WINDOW = ROOT / "tests" / "models" / "tiny-gemma3-swa.gguf"  # sliding window of 64
DRAFT = ROOT / "draft" / "pretrained" / "smollm2-135m-draft.gguf"
GREEDY = SamplingParams(temperature=0.0)
DrafterFactory = Callable[[Model, LlamaContext], Drafter]
Message = dict[str, str]


def smollm2() -> Path:
    """The standard target, full attention."""
    return target()


def no_drafter(model: Model, target: LlamaContext) -> Drafter:
    return NoDrafter()


def mtp(n_max: int) -> DrafterFactory:
    """The target's own MTP head; the Setup needs load_mtp and expose_hidden."""

    def make(model: Model, target: LlamaContext) -> Drafter:
        setup = DrafterSetup(model, target, n_max, n_ctx=target.n_ctx, n_ubatch=target.n_ubatch)
        return make_drafter(["draft-mtp"], setup)

    return make


@dataclass(frozen=True)
class Setup:
    """One server's settings. n_ctx counts tokens per slot; n_max is the draft length."""

    path: Path
    n_slots: int = 1
    n_ctx: int = 2048
    n_ubatch: int = 512
    n_rs_seq: int = 0
    kv_unified: bool = False
    swa_full: bool = False
    drafter: DrafterFactory = no_drafter
    n_max: int = 0
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    spill: Path | None = None  # --ctx-checkpoints-dir
    load_mtp: bool = False
    expose_hidden: bool = False

    def but(self, **changes: object) -> Setup:
        return replace(self, **changes)  # type: ignore[arg-type]


@lru_cache(maxsize=4)
def model_of(path: Path, load_mtp: bool = False) -> Model:
    """Weights are shared by all cores of a test run; a core's `close` leaves them loaded."""
    return Model(path, load_mtp=load_mtp)


def make_core(setup: Setup) -> EngineCore:
    model = model_of(setup.path, setup.load_mtp)
    target = LlamaContext(
        model,
        n_ctx=setup.n_ctx * setup.n_slots,
        n_seq_max=setup.n_slots,
        n_ubatch=setup.n_ubatch,
        n_rs_seq=setup.n_rs_seq,
        kv_unified=setup.kv_unified,
        swa_full=setup.swa_full,
        expose_hidden=setup.expose_hidden,
    )
    return EngineCore(
        model,
        target,
        setup.drafter(model, target),
        DraftDefaults(),
        setup.checkpoints,
        make_spill(setup.spill),
    )


@contextmanager
def core_of(setup: Setup) -> Iterator[EngineCore]:
    core = make_core(setup)
    try:
        yield core
    finally:
        core.close()


# -- prompts


@dataclass(frozen=True)
class Prompt:
    """Tokens, and the prompt lengths worth a checkpoint."""

    tokens: tuple[int, ...]
    boundaries: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


def chat_prompts(n: int) -> list[list[Message]]:
    """The first n conversations of the repository's chat prompts."""
    lines = (ROOT / "eval" / "prompts" / "chat.jsonl").read_text().splitlines()
    return [json.loads(line)["messages"] for line in lines[:n]]


def render(messages: Sequence[Message]) -> str:
    """ChatML, which the tiny models and SmolLM2 were trained on."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = [{"role": "system", "content": system}, *messages]
    body = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in turns)
    return body


def chat(model: Model, messages: Sequence[Message]) -> Prompt:
    """A conversation up to the assistant's next turn; its boundary lies before the last user message."""
    head = render(messages[:-1])
    whole = render(messages) + "<|im_start|>assistant\n"
    return Prompt(
        tuple(model.tokenize(whole, False, True)),
        (len(model.tokenize(head, False, True)),),
    )


def plain(model: Model, text: str) -> Prompt:
    return Prompt(tuple(model.tokenize(text, False, True)))


def filler(model: Model, n_tokens: int, seed: int = 0) -> Prompt:
    """Exactly n_tokens tokens of chat text; another seed gives another text from the first words on."""
    talks = chat_prompts(200)
    talks = talks[seed * 17 % 200 :] + talks[: seed * 17 % 200]
    text = " ".join(m["content"] for talk in talks[:120] for m in talk)
    tokens = model.tokenize(f"({seed}) {text[: 12 * n_tokens + 64]}", False, False)
    if len(tokens) < n_tokens:
        raise ValueError(f"the prompt file gives {len(tokens)} tokens only, not {n_tokens}")
    return Prompt(tuple(tokens[:n_tokens]))


def request(prompt: Prompt | Sequence[int], n: int = 16, **fields: object) -> GenerateRequest:
    """Greedy, at most n tokens, no end tokens unless the fields say otherwise."""
    given = prompt if isinstance(prompt, Prompt) else Prompt(tuple(prompt))
    values: dict[str, object] = {
        "prompt": given.tokens,
        "boundaries": given.boundaries,
        "max_tokens": n,
        "sampling": GREEDY,
        "ignore_eos": True,
        **fields,
    }
    return GenerateRequest(**values)  # type: ignore[arg-type]


# -- runs


@dataclass
class Turn:
    """What a request gave."""

    events: list[Event] = field(default_factory=list)
    error: Exception | None = None

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Delta))

    @property
    def tokens(self) -> list[int]:
        return [t for e in self.events if isinstance(e, Delta) for t in e.tokens]

    @property
    def finished(self) -> Finished:
        end = self.events[-1]
        assert isinstance(end, Finished), self.error or self.events
        return end

    @property
    def timings(self) -> Timings:
        return self.finished.timings

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """cache_n, prompt_n, draft_n, draft_n_accepted."""
        t = self.timings
        return t.cache_n, t.prompt_n, t.draft_n, t.draft_n_accepted


def submit(core: EngineCore, asked: GenerateRequest) -> Turn:
    """Queue a request; its Turn fills as the core steps."""
    turn = Turn()

    def emit(_: Task, event: Event | Exception) -> None:
        if isinstance(event, Exception):
            turn.error = event
        else:
            turn.events.append(event)

    banned = tuple(core.model.eog) if asked.ignore_eos else ()
    core.submit(
        Task(
            request=asked,
            prompt=np.asarray(asked.prompt, dtype=np.int32),
            sampler=make_sampler(asked.sampling, core.model.n_vocab, suppressed=banned),
            text=TextStream(asked.stop),
            emit=emit,
        )
    )
    return turn


def drain(core: EngineCore, most_steps: int = 100_000) -> None:
    """Step until nothing is left to do, checking the step invariant each time."""
    for _ in range(most_steps):
        if not core.has_work:
            return
        core.step()
        core.say()
        core.check_invariants()
    raise AssertionError(f"still busy after {most_steps} steps")


def run(core: EngineCore, *asked: GenerateRequest) -> list[Turn]:
    """All at once, to the end."""
    turns = [submit(core, a) for a in asked]
    drain(core)
    return turns


def greedy(path: Path, prompts: Sequence[Prompt], n: int, **settings: object) -> list[list[int]]:
    """What the model says to each prompt without drafter, cache or neighbours."""
    with core_of(Setup(path).but(**settings)) as core:
        return [run(core, request(p, n, cache_prompt=False))[0].tokens for p in prompts]


def together(setup: Setup, prompts: Sequence[Prompt], n: int) -> list[list[int]]:
    """What the model says to all of them at once without drafter: with some of llama.cpp's kernels a batch of more rows
    turns a near tie (two tokens 0.017 apart, on a processor without AVX-512)."""
    with core_of(setup.but(drafter=no_drafter)) as core:
        return [t.tokens for t in run(core, *[request(p, n) for p in prompts])]


# -- a whole engine


@dataclass
class Server:
    """An EngineWorker and its core. Look into the core only while the worker has nothing to do."""

    worker: EngineWorker
    core: EngineCore

    async def ask(self, asked: GenerateRequest) -> Turn:
        return Turn([event async for event in self.worker.generate(asked)])

    async def save(self, id_slot: int, name: str) -> SaveResult:
        return await self.worker.save(id_slot, name, DEFAULT_OWNER)

    async def restore(self, id_slot: int, name: str) -> RestoreResult:
        return await self.worker.restore(id_slot, name, DEFAULT_OWNER)

    async def erase(self, id_slot: int) -> EraseResult:
        return await self.worker.erase(id_slot)


def target_fit(core: EngineCore) -> TargetFit:
    settings = {"type_k": "f16", "type_v": "f16"}
    return TargetFit(
        ModelIdentity(*core.model.identity()), settings, core.target.n_ctx_seq, core.model.n_vocab
    )


@asynccontextmanager
async def serve(setup: Setup, directory: Path) -> AsyncIterator[Server]:
    """A server whose slot files lie in `directory`; closed with everything at the end."""
    core = make_core(setup)
    model = core.model
    info = ModelInfo(
        "m", str(setup.path), core.target.n_ctx_seq, 0, model.n_vocab, model.n_embd, 0, 0, "", "", "", 0
    )
    transfer = Transfer(core, DirectoryStore(directory), target_fit(core), None)
    worker = EngineWorker(core, transfer, info, {}, WorkerOptions(debug=True))
    try:
        yield Server(worker, core)
    finally:
        await worker.close()
