"""The settings table, second half: drafters, and what a request gets that asks for nothing special."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from spec_server.options import (
    Count,
    CountOrAuto,
    Fraction,
    KvType,
    Layers,
    Ngram,
    NgramOrAuto,
    Option,
    Positive,
    SpecVerify,
    Switch,
    Words,
)

_SPEC, _SAMPLING = "Speculative decoding", "Sampling defaults"


class DraftingFields(BaseModel):
    model_draft: Annotated[
        str,
        Option(
            "-md --model-draft --spec-draft-model",
            _SPEC,
            "FILE",
            "draft model, a GGUF file",
            env="LLAMA_ARG_SPEC_DRAFT_MODEL LLAMA_ARG_MODEL_DRAFT",
        ),
    ] = ""
    spec_type: Annotated[
        Words,
        Option(
            "--spec-type",
            _SPEC,
            "TYPE,...",
            "drafters in order of trial: none, draft-simple, draft-mtp, ngram-simple, ngram-mod; "
            "default: draft-simple with -md, else none",
            env="LLAMA_ARG_SPEC_TYPE",
            is_repeatable=True,
        ),
    ] = ()
    spec_draft_n_max: Annotated[
        CountOrAuto,
        Option(
            "--spec-draft-n-max --draft --draft-n --draft-max --draft-n-max",
            _SPEC,
            "N|auto",
            "most tokens in a draft of a model or a head; auto: 16 with --spec-adaptive, else 3",
            env="LLAMA_ARG_SPEC_DRAFT_N_MAX LLAMA_ARG_DRAFT_MAX",
            unit="tokens",
        ),
    ] = -1
    spec_draft_n_min: Annotated[
        Count,
        Option(
            "--spec-draft-n-min --draft-min --draft-n-min",
            _SPEC,
            "N",
            "a shorter draft is not used",
            env="LLAMA_ARG_SPEC_DRAFT_N_MIN LLAMA_ARG_DRAFT_MIN",
            unit="tokens",
        ),
    ] = 0
    spec_draft_p_min: Annotated[
        Fraction,
        Option(
            "--spec-draft-p-min --draft-p-min",
            _SPEC,
            "P",
            "a draft ends before a token less probable than this",
            env="LLAMA_ARG_SPEC_DRAFT_P_MIN LLAMA_ARG_DRAFT_P_MIN",
            unit="probability",
        ),
    ] = 0.0
    spec_adaptive: Annotated[
        Switch,
        Option(
            "--spec-adaptive",
            _SPEC,
            "on|off",
            "draft as many tokens as pay: found while running from acceptance and step times",
        ),
    ] = True
    spec_verify: Annotated[
        SpecVerify,
        Option(
            "--spec-verify",
            _SPEC,
            "RULE",
            "which drafted tokens stand where a request samples: exact-match, token (accept or resample each), "
            "block (the whole draft at once)",
        ),
    ] = "block"
    draft_rebuild: Annotated[
        Switch,
        Option("--draft-rebuild", _SPEC, "on|off", "rebuild a draft state that a restore had to drop"),
    ] = True
    ctx_size_draft: Annotated[
        Count,
        Option(
            "-cd --ctx-size-draft",
            _SPEC,
            "N",
            "context of the draft model per slot, 0 for the target's",
            env="LLAMA_ARG_CTX_SIZE_DRAFT",
            unit="tokens",
        ),
    ] = 0
    gpu_layers_draft: Annotated[
        Layers,
        Option(
            "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl",
            _SPEC,
            "N|auto|all",
            "layers of the draft model to keep on the GPU",
            env="LLAMA_ARG_N_GPU_LAYERS_DRAFT",
            unit="layers",
        ),
    ] = -1
    cache_type_k_draft: Annotated[
        KvType,
        Option(
            "-ctkd --cache-type-k-draft --spec-draft-type-k",
            _SPEC,
            "TYPE",
            "type of the draft's K cache",
            env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
        ),
    ] = "f16"
    cache_type_v_draft: Annotated[
        KvType,
        Option(
            "-ctvd --cache-type-v-draft --spec-draft-type-v",
            _SPEC,
            "TYPE",
            "type of the draft's V cache",
            env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
        ),
    ] = "f16"
    spec_ngram_simple_size_n: Annotated[
        NgramOrAuto,
        Option(
            "--spec-ngram-simple-size-n",
            _SPEC,
            "N|auto",
            "tokens that must match; auto: 3 with --spec-adaptive, else 12",
            unit="tokens",
        ),
    ] = -1
    spec_ngram_simple_size_m: Annotated[
        Ngram,
        Option(
            "--spec-ngram-simple-size-m", _SPEC, "N", "most tokens in a draft of ngram-simple", unit="tokens"
        ),
    ] = 48
    spec_ngram_simple_min_hits: Annotated[
        Positive,
        Option("--spec-ngram-simple-min-hits", _SPEC, "N", "matches needed for a draft"),
    ] = 1
    spec_ngram_mod_n_match: Annotated[
        Ngram,
        Option("--spec-ngram-mod-n-match", _SPEC, "N", "tokens that must match", unit="tokens"),
    ] = 24
    spec_ngram_mod_n_max: Annotated[
        int,
        Field(ge=0, le=1024),
        Option("--spec-ngram-mod-n-max", _SPEC, "N", "most tokens in a draft of ngram-mod", unit="tokens"),
    ] = 64
    spec_ngram_mod_n_min: Annotated[
        int,
        Field(ge=0, le=1024),
        Option(
            "--spec-ngram-mod-n-min", _SPEC, "N", "a shorter draft of ngram-mod is not used", unit="tokens"
        ),
    ] = 48


class SamplingFields(BaseModel):
    n_predict: Annotated[
        int,
        Field(ge=-1),
        Option(
            "-n --predict --n-predict",
            _SAMPLING,
            "N",
            "most tokens in an answer, -1 for the context's end",
            env="LLAMA_ARG_N_PREDICT",
            unit="tokens",
        ),
    ] = -1
    temperature: Annotated[
        float,
        Field(ge=0.0),
        Option("--temp --temperature", _SAMPLING, "T", "0 for greedy", env="LLAMA_ARG_TEMPERATURE"),
    ] = 0.8
    top_k: Annotated[
        int,
        Field(ge=-1),
        Option("--top-k", _SAMPLING, "N", "0 for off", env="LLAMA_ARG_TOP_K"),
    ] = 40
    top_p: Annotated[
        Fraction,
        Option("--top-p", _SAMPLING, "P", "1 for off", env="LLAMA_ARG_TOP_P"),
    ] = 0.95
    min_p: Annotated[
        Fraction,
        Option("--min-p", _SAMPLING, "P", "0 for off", env="LLAMA_ARG_MIN_P"),
    ] = 0.05
    typical_p: Annotated[
        Fraction,
        Option("--typical --typical-p", _SAMPLING, "P", "1 for off"),
    ] = 1.0
    repeat_last_n: Annotated[
        Count,
        Option("--repeat-last-n", _SAMPLING, "N", "tokens that penalties look back on", unit="tokens"),
    ] = 64
    repeat_penalty: Annotated[
        float,
        Field(gt=0.0),
        Option("--repeat-penalty", _SAMPLING, "X", "1 for off", env="LLAMA_ARG_REPEAT_PENALTY"),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Option("--presence-penalty", _SAMPLING, "X", "0 for off", env="LLAMA_ARG_PRESENCE_PENALTY"),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Option("--frequency-penalty", _SAMPLING, "X", "0 for off", env="LLAMA_ARG_FREQUENCY_PENALTY"),
    ] = 0.0
    seed: Annotated[
        int,
        Field(ge=-1, lt=2**32),
        Option("-s --seed", _SAMPLING, "N", "-1 for another one in every request"),
    ] = -1
