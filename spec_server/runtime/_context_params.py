"""Settings of a context as llama's parameters; what llama would abort on is refused here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spec_server.runtime._native import lib
from spec_server.runtime.errors import ModelError
from spec_server.runtime.model import Model

CACHE_TYPES = {
    "f32": lib.GGML_TYPE_F32,
    "f16": lib.GGML_TYPE_F16,
    "bf16": 30,  # the binding has no name for it
    "q8_0": lib.GGML_TYPE_Q8_0,
    "q4_0": lib.GGML_TYPE_Q4_0,
    "q4_1": lib.GGML_TYPE_Q4_1,
    "iq4_nl": lib.GGML_TYPE_IQ4_NL,
    "q5_0": lib.GGML_TYPE_Q5_0,
    "q5_1": lib.GGML_TYPE_Q5_1,
}
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
ROPE_SCALING = {"none": 0, "linear": 1, "yarn": 2, "longrope": 3}


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """Overrides of the model's own rope parameters; None, 0 and -1 leave the model's."""

    scaling: str | None = None  # none, linear, yarn, longrope
    freq_base: float = 0.0
    freq_scale: float = 0.0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_fast: float = -1.0
    yarn_beta_slow: float = -1.0
    yarn_orig_ctx: int = 0


def context_params(model: Model, rope: RopeSettings, mtp: bool, **settings: Any) -> Any:
    """llama_context_params of LlamaContext's arguments, named as there. ModelError: refused."""
    params = lib.llama_context_default_params()
    settings["flash_attn_type"] = _choice("flash_attn", settings.pop("flash_attn"), FLASH_ATTENTION)
    for name in ("type_k", "type_v"):
        settings[name] = _choice(name, settings[name], CACHE_TYPES)
    for name, value in settings.items():
        try:
            setattr(params, name, value)
        except TypeError as error:
            raise ModelError(f"{name} {value!r}: {error}") from error
    params.no_perf = True
    if mtp:
        params.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
        params.n_rs_seq = 0
    _check(model, settings, params)
    # llama keeps an output row for each sequence, asked for or not
    params.n_batch = max(params.n_batch, params.n_seq_max)
    params.n_outputs_max = params.n_outputs_max and max(params.n_outputs_max, params.n_seq_max)
    _set_rope(params, rope)
    return params


def _check(model: Model, settings: dict[str, Any], params: Any) -> None:
    for name in ("n_ctx", "n_rs_seq", "n_outputs_max"):
        if settings[name] < 0:
            raise ModelError(f"{name} {settings[name]} is negative")
    for name in ("n_batch", "n_ubatch", "n_threads", "n_threads_batch"):
        if settings[name] < 1:
            raise ModelError(f"{name} {settings[name]} is not positive")
    n_seq_max = lib.llama_max_parallel_sequences()
    if not 1 <= settings["n_seq_max"] <= n_seq_max:
        raise ModelError(f"n_seq_max {settings['n_seq_max']} is not in 1..{n_seq_max}")
    n_ubatch = min(params.n_ubatch, params.n_batch, params.n_ctx or model.n_ctx_train)
    if params.n_rs_seq and n_ubatch <= params.n_rs_seq + 1:
        raise ModelError(f"n_ubatch {n_ubatch} must be above n_rs_seq + 1 = {params.n_rs_seq + 1}")
    if params.ctx_type == lib.LLAMA_CONTEXT_TYPE_MTP and not model.has_mtp:
        raise ModelError(f"{model.path} has no MTP head, or was loaded without it")


def _choice(name: str, value: str, values: dict[str, int]) -> int:
    if value not in values:
        raise ModelError(f"{name} {value!r} is none of {', '.join(values)}")
    return values[value]


def _set_rope(params: Any, rope: RopeSettings) -> None:
    if rope.scaling is not None:
        params.rope_scaling_type = _choice("rope scaling", rope.scaling, ROPE_SCALING)
    params.rope_freq_base = rope.freq_base
    params.rope_freq_scale = rope.freq_scale
    params.yarn_ext_factor = rope.yarn_ext_factor
    params.yarn_attn_factor = rope.yarn_attn_factor
    params.yarn_beta_fast = rope.yarn_beta_fast
    params.yarn_beta_slow = rope.yarn_beta_slow
    params.yarn_orig_ctx = rope.yarn_orig_ctx
