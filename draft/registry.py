"""Drafters by name: the one place that knows which there are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draft.base import Drafter, DraftSetupError
from draft.calibrated import CalibratedDrafter
from draft.chain import ChainDrafter
from draft.draft_model import DraftModelDrafter, DraftModelIdentity, check_vocabulary
from draft.fit import Scalar
from draft.mtp_head import MtpHeadDrafter
from draft.ngram import NgramModDrafter, NgramSimpleDrafter
from draft.none import NoDrafter
from draft.window import LengthPolicy
from spec_server.runtime.batch import Batch
from spec_server.runtime.context import Context
from spec_server.runtime.llama_context import LlamaContext
from spec_server.runtime.model import Model
from spec_server.runtime.trial import trial_decode

log = logging.getLogger(__name__)

# Tokens; the steps that drafting is made of, the usual one until it is captured.
_WARM_UP = (16, 4, 2, 1, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """Lengths in tokens; llama-server's names and defaults."""

    simple_size_n: int = 12
    simple_size_m: int = 48
    simple_min_hits: int = 1
    mod_n_match: int = 24
    mod_n_min: int = 48
    mod_n_max: int = 64


@dataclass(frozen=True, slots=True)
class DrafterSetup:
    """What a drafter may build itself from. n_ctx counts cells over all slots."""

    target_model: Model
    target: Context
    n_max: int
    model_path: Path | None = None
    n_ctx: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = 1
    n_threads_batch: int = 1
    n_gpu_layers: int = -1
    load_mode: str = "auto"
    kv_unified: bool = False
    flash_attn: str = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    rebuild: bool = True
    ngram: NgramOptions = field(default_factory=NgramOptions)
    policy: LengthPolicy | None = None  # None: fixed lengths


def _context(setup: DrafterSetup, model: Model, *, mtp: bool) -> LlamaContext:
    context = LlamaContext(
        model,
        n_ctx=setup.n_ctx,
        n_batch=setup.target.n_batch if mtp else setup.n_batch,
        n_ubatch=setup.n_ubatch,
        n_seq_max=setup.target.n_seq_max,
        n_threads=setup.n_threads,
        n_threads_batch=setup.n_threads_batch,
        kv_unified=setup.kv_unified,
        flash_attn=setup.flash_attn,
        type_k=setup.type_k,
        type_v=setup.type_v,
        mtp=mtp,
    )
    _warm_up(context)
    if context.n_ctx_seq < setup.target.n_ctx_seq:
        log.warning(
            "the draft context holds %d tokens, a slot of the target %d: a longer text is drafted from what fits",
            context.n_ctx_seq,
            setup.target.n_ctx_seq,
        )
    return context


def _warm_up(context: LlamaContext) -> None:
    """What a backend does once is not part of what a draft takes: on one GPU loading kernels, making buffers and
    capturing graphs took 60 ms, where a drafted token takes 0.2."""
    batch = Batch(max(_WARM_UP), context.n_embd if context.is_mtp else 0)
    for n_tokens in _WARM_UP:
        if n_tokens <= min(context.n_batch, context.n_ctx_seq):
            trial_decode(context, batch, n_tokens, "last")
    batch.close()
    context.decode_ns = 0


def _draft_simple(setup: DrafterSetup) -> Drafter:
    if setup.model_path is None:
        raise DraftSetupError("draft-simple needs a draft model (--model-draft)")
    model = Model(setup.model_path, n_gpu_layers=setup.n_gpu_layers, load_mode=setup.load_mode)
    check_vocabulary(setup.target_model, model)
    context = _context(setup, model, mtp=False)
    _, digest = model.identity()
    identity = DraftModelIdentity(digest, setup.type_k, setup.type_v, context.v_transposed, "model")
    return DraftModelDrafter(
        context,
        model,
        identity,
        n_max=setup.n_max,
        rebuild=setup.rebuild,
        # Where steps are captured and replayed, one over two tokens is slower than two over one.
        reads_late=not model.is_offloaded,
    )


def _draft_mtp(setup: DrafterSetup) -> Drafter:
    model = setup.target_model
    if model.n_nextn == 0:
        raise DraftSetupError(f"draft-mtp: {model.path.name} has no MTP head")
    if model.n_nextn > 1:
        raise DraftSetupError(
            f"draft-mtp: {model.path.name} has {model.n_nextn} MTP layers; only a single head is supported"
        )
    if model.arch.endswith("assistant"):
        raise DraftSetupError(
            f"draft-mtp: the head of {model.arch} shares the target's memory; only a head with its own is supported"
        )
    context = _context(setup, model, mtp=True)
    facts: dict[str, Scalar] = {
        "model": model.identity()[1],
        "type_k": setup.type_k,
        "type_v": setup.type_v,
        "v_transposed": context.v_transposed,
        "rope": "model",
    }
    return MtpHeadDrafter(context, setup.target, model, facts, n_max=setup.n_max)


def _ngram_simple(setup: DrafterSetup) -> Drafter:
    options, end = setup.ngram, setup.target_model.eog
    return NgramSimpleDrafter(
        setup.target.n_seq_max,
        size_n=options.simple_size_n,
        size_m=options.simple_size_m,
        min_hits=options.simple_min_hits,
        end=end,
    )


def _ngram_mod(setup: DrafterSetup) -> Drafter:
    options, model = setup.ngram, setup.target_model
    return NgramModDrafter(
        setup.target.n_seq_max,
        n_match=options.mod_n_match,
        n_min=options.mod_n_min,
        n_max=options.mod_n_max,
        end=model.eog,
        n_vocab=model.n_vocab,
    )


FACTORIES: Mapping[str, Callable[[DrafterSetup], Drafter]] = {
    "none": lambda setup: NoDrafter(),
    "draft-simple": _draft_simple,
    "draft-mtp": _draft_mtp,
    "ngram-simple": _ngram_simple,
    "ngram-mod": _ngram_mod,
}


def reads_hidden_rows(types: Sequence[str]) -> bool:
    """Whether the target must be loaded with its MTP head and made to show its hidden rows."""
    return "draft-mtp" in types


def longest_draft(types: Sequence[str], n_max: int, ngram: NgramOptions) -> int:
    """The most tokens that any of these drafters proposes, known before there is a target."""
    own = {"none": 0, "ngram-simple": ngram.simple_size_m, "ngram-mod": ngram.mod_n_max}
    return max((own.get(t, n_max) for t in types), default=0)


def make_drafter(types: Sequence[str], setup: DrafterSetup) -> Drafter:
    """One drafter, or a chain of several in that order.

    DraftSetupError where a name is unknown, a part is missing, or a drafter cannot serve this target.
    """
    unknown = [t for t in types if t not in FACTORIES]
    if unknown:
        raise DraftSetupError(f"no drafter is called {unknown[0]}; there are {', '.join(FACTORIES)}")
    if len(set(types)) < len(types) or (len(types) > 1 and "none" in types):
        raise DraftSetupError(f"no chain of drafters: {', '.join(types)}")
    if "draft-mtp" in types and setup.model_path is not None and "draft-simple" not in types:
        raise DraftSetupError("draft-mtp: a head in a GGUF of its own (--model-draft) is not supported")
    members: list[Drafter] = []
    try:
        for name in types or ("none",):
            members.append(FACTORIES[name](setup))
    except BaseException:
        for member in members:
            member.close()
        raise
    if not types or "none" in types:
        return members[0]
    inner = members[0] if len(members) == 1 else ChainDrafter(members)
    return CalibratedDrafter(inner, types, setup.target.n_seq_max, setup.policy)
