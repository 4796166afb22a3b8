"""Servers' settings for every drafter on the tiny models, and what tests ask of them; asserts nothing itself.

The two tiny models share a vocabulary, so each can draft for the other, wrongly often enough to be of use: one has
recurrent memory, the other a sliding window.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from draft.base import Draft, Drafter, DraftRequest
from draft.registry import DrafterSetup, NgramOptions, longest_draft, make_drafter, reads_hidden_rows
from spec_server.engine.core import EngineCore
from spec_server.runtime.llama_context import LlamaContext
from spec_server.runtime.model import Model
from tests.engine.harness import (
    DRAFT,
    HYBRID,
    WINDOW,
    Prompt,
    Setup,
    chat,
    chat_prompts,
    core_of,
    model_of,
    plain,
    smollm2,
)

N_MAX = 3
# Short matches, since the tests' texts are short.
NGRAM = NgramOptions(simple_size_n=4, simple_size_m=12, mod_n_match=6, mod_n_min=2, mod_n_max=10)


@dataclass(frozen=True)
class Kind:
    """A drafter under test: what --spec-type names, for which target, with which draft model."""

    types: tuple[str, ...]
    path: Path = HYBRID
    draft: Path | None = None
    n_rs_seq: int = 0  # 0: the target takes drafts back by a part-way state
    options: dict[str, object] = field(default_factory=dict)

    @property
    def id(self) -> str:
        draft = {None: "", HYBRID: "-recurrent", WINDOW: "-window", DRAFT: "-full"}[self.draft]
        return "+".join(self.types) + draft + ("-snapshots" if self.n_rs_seq else "")


MTP = Kind(("draft-mtp",))
SIMPLE = Kind(("ngram-simple",))
MOD = Kind(("ngram-mod",))
RECURRENT = Kind(("draft-simple",), WINDOW, HYBRID)
CHAIN = Kind(("ngram-mod", "draft-mtp"))
# Full attention, whose drafter reads late; larger models, so not in ALL.
FULL = Kind(("draft-simple",), smollm2(), DRAFT)
FULL_CHAIN = Kind(("ngram-simple", "draft-simple"), smollm2(), DRAFT)
ALL = (
    MTP,
    Kind(("draft-mtp",), n_rs_seq=N_MAX + 1),
    Kind(("draft-simple",), HYBRID, WINDOW),
    RECURRENT,
    SIMPLE,
    MOD,
    Kind(("draft-mtp", "ngram-mod")),
    CHAIN,
    Kind(("ngram-simple", "draft-simple"), WINDOW, HYBRID),
)


def setup(kind: Kind, *, n_max: int = N_MAX, n_ctx_draft: int = 0, **settings: object) -> Setup:
    """`n_ctx_draft` counts tokens per slot, 0: the target's."""

    def build(model: Model, target: LlamaContext) -> Drafter:
        given = DrafterSetup(
            target_model=model,
            target=target,
            n_max=n_max,
            model_path=kind.draft,
            n_ctx=n_ctx_draft * target.n_seq_max or target.n_ctx,
            ngram=NGRAM,
        )
        return make_drafter(kind.types, DrafterSetup(**(_fields(given) | kind.options)))  # type: ignore[arg-type]

    hidden = reads_hidden_rows(kind.types)
    return Setup(
        kind.path,
        n_rs_seq=kind.n_rs_seq,
        drafter=build,
        n_max=longest_draft(kind.types, n_max, NGRAM),
        load_mtp=hidden,
        expose_hidden=hidden,
    ).but(**settings)


def _fields(setup: DrafterSetup) -> dict[str, object]:
    return {name: getattr(setup, name) for name in DrafterSetup.__dataclass_fields__}


@contextmanager
def drafting(kind: Kind, **settings: object) -> Iterator[EngineCore]:
    with core_of(setup(kind, **settings)) as core:  # type: ignore[arg-type]
        yield core


def prompts(kind: Kind, n: int) -> list[Prompt]:
    return [chat(model_of(kind.path), messages) for messages in chat_prompts(n)]


def repeating(kind: Kind, n: int = 4) -> Prompt:
    """A text that says the same n times, which every kind of drafter can go on with."""
    line = "The quick brown fox jumps over the lazy dog near the old river bank.\n"
    return plain(model_of(kind.path), line * n)


def drafts_of(core: EngineCore, seq_id: int, last_token: int, **fields: object) -> Draft:
    """What the core's drafter proposes behind the slot's tokens and `last_token`."""
    tokens = core.slots[seq_id].tokens.view()
    values: dict[str, object] = {"n_max": core.drafter.n_max, **fields}
    (draft,) = core.drafter.propose([DraftRequest(seq_id, tokens, last_token, **values)])  # type: ignore[arg-type]
    return draft


def room(n_bytes: int) -> memoryview:
    return memoryview(bytearray(n_bytes))


def ints(tokens: list[int] | tuple[int, ...]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)
