"""Drafters by name: the one place that knows which there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draft.base import Drafter, DraftSetupError
from draft.draft_model import DraftModelDrafter, DraftModelIdentity, check_vocabulary
from draft.none import NoDrafter
from spec_server.runtime.context import Context
from spec_server.runtime.llama_context import LlamaContext
from spec_server.runtime.model import Model


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
    kv_unified: bool = False
    flash_attn: str = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    rebuild: bool = True


def _draft_simple(setup: DrafterSetup) -> Drafter:
    if setup.model_path is None:
        raise DraftSetupError("draft-simple needs a draft model (--model-draft)")
    model = Model(setup.model_path, n_gpu_layers=setup.n_gpu_layers)
    check_vocabulary(setup.target_model, model)
    context = LlamaContext(
        model,
        n_ctx=setup.n_ctx,
        n_batch=setup.n_batch,
        n_ubatch=setup.n_ubatch,
        n_seq_max=setup.target.n_seq_max,
        n_threads=setup.n_threads,
        n_threads_batch=setup.n_threads_batch,
        kv_unified=setup.kv_unified,
        flash_attn=setup.flash_attn,
        type_k=setup.type_k,
        type_v=setup.type_v,
    )
    _, digest = model.identity()
    identity = DraftModelIdentity(digest, setup.type_k, setup.type_v, context.v_transposed, "model")
    return DraftModelDrafter(context, model, identity, n_max=setup.n_max, rebuild=setup.rebuild)


FACTORIES: Mapping[str, Callable[[DrafterSetup], Drafter]] = {
    "none": lambda setup: NoDrafter(),
    "draft-simple": _draft_simple,
}


def make_drafter(types: Sequence[str], setup: DrafterSetup) -> Drafter:
    """DraftSetupError where a name is unknown, a part is missing, or the drafter cannot serve this target."""
    unknown = [t for t in types if t not in FACTORIES]
    if unknown:
        raise DraftSetupError(f"no drafter is called {unknown[0]}; there are {', '.join(FACTORIES)}")
    if len(types) > 1:
        raise DraftSetupError("chains of drafters are not available yet")
    return FACTORIES[types[0] if types else "none"](setup)
