"""The settings table, first half: what is served, where, on what, and how slots are kept."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from spec_server.options import (
    Count,
    CountOrAuto,
    FlashAttn,
    JsonObject,
    KvType,
    Layers,
    LoadMode,
    Option,
    Positive,
    Switch,
    Verbosity,
    Words,
)

_MODEL, _SERVER, _COMPUTE = "Model", "Server", "Context and computing"
_SLOTS, _LOG = "Slots and checkpoints", "Log and checks"


class ServingFields(BaseModel):
    model: Annotated[
        str,
        Option("-m --model", _MODEL, "FILE", "model to serve, a GGUF file", env="LLAMA_ARG_MODEL"),
    ] = ""
    alias: Annotated[
        str,
        Option("-a --alias", _MODEL, "NAME", "name of the model in answers", env="LLAMA_ARG_ALIAS"),
    ] = ""
    chat_template: Annotated[
        str,
        Option(
            "--chat-template",
            _MODEL,
            "JINJA",
            "template to use instead of the model's, or chatml",
            env="LLAMA_ARG_CHAT_TEMPLATE",
        ),
    ] = ""
    chat_template_file: Annotated[
        str,
        Option(
            "--chat-template-file",
            _MODEL,
            "FILE",
            "the same, from a file",
            env="LLAMA_ARG_CHAT_TEMPLATE_FILE",
        ),
    ] = ""
    chat_template_kwargs: Annotated[
        JsonObject,
        Option(
            "--chat-template-kwargs",
            _MODEL,
            "JSON",
            "variables for the template, in every request",
            env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
        ),
    ] = {}
    prefill_assistant: Annotated[
        Switch,
        Option(
            "--prefill-assistant",
            _MODEL,
            "",
            "a trailing assistant message begins the answer",
            no="--no-prefill-assistant",
            env="LLAMA_ARG_PREFILL_ASSISTANT",
        ),
    ] = True
    host: Annotated[
        str,
        Option("--host", _SERVER, "HOST", "address to listen on", env="LLAMA_ARG_HOST"),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Field(ge=0, le=65535),
        Option("--port", _SERVER, "PORT", "port to listen on, 0 for any that is free", env="LLAMA_ARG_PORT"),
    ] = 8080
    api_key: Annotated[
        Words,
        Option(
            "--api-key",
            _SERVER,
            "KEY",
            "key that every route but /health asks for; several, by commas or repeated",
            env="LLAMA_API_KEY",
            is_repeatable=True,
        ),
    ] = ()
    api_key_file: Annotated[
        str,
        Option("--api-key-file", _SERVER, "FILE", "file with one key per line", env="LLAMA_ARG_API_KEY_FILE"),
    ] = ""
    sse_ping_interval: Annotated[
        int,
        Field(ge=-1),
        Option(
            "--sse-ping-interval",
            _SERVER,
            "N",
            "silence after which a stream gets a comment line, -1 for never",
            env="LLAMA_ARG_SSE_PING_INTERVAL",
            unit="s",
        ),
    ] = 30
    queue_limit: Annotated[
        Count,
        Option(
            "--queue-limit", _SERVER, "N", "requests that may wait for a slot before 429, 0 for any number"
        ),
    ] = 0
    slots: Annotated[
        Switch,
        Option("--slots", _SERVER, "", "serve GET /slots", no="--no-slots", env="LLAMA_ARG_ENDPOINT_SLOTS"),
    ] = True


class ComputeFields(BaseModel):
    ctx_size: Annotated[
        Count,
        Option(
            "-c --ctx-size",
            _COMPUTE,
            "N",
            "context over all slots, 0 for what the model was trained with",
            env="LLAMA_ARG_CTX_SIZE",
            unit="tokens",
        ),
    ] = 0
    parallel: Annotated[
        int,
        Field(ge=-1, le=256),
        Option(
            "-np --parallel",
            _COMPUTE,
            "N",
            "number of slots, -1 for 4 with --kv-unified",
            env="LLAMA_ARG_N_PARALLEL",
        ),
    ] = -1
    kv_unified: Annotated[
        Switch | None,
        Option(
            "-kvu --kv-unified",
            _COMPUTE,
            "",
            "all slots share one KV buffer; default: when --parallel is -1",
            no="-no-kvu --no-kv-unified",
            env="LLAMA_ARG_KV_UNIFIED",
        ),
    ] = None
    batch_size: Annotated[
        Positive,
        Option(
            "-b --batch-size",
            _COMPUTE,
            "N",
            "most tokens in one decode",
            env="LLAMA_ARG_BATCH",
            unit="tokens",
        ),
    ] = 2048
    ubatch_size: Annotated[
        Positive,
        Option(
            "-ub --ubatch-size",
            _COMPUTE,
            "N",
            "most tokens computed at once, and in one prompt chunk",
            env="LLAMA_ARG_UBATCH",
            unit="tokens",
        ),
    ] = 512
    threads: Annotated[
        int,
        Field(ge=-1, le=512),
        Option(
            "-t --threads", _COMPUTE, "N", "threads for generation, -1 to choose", env="LLAMA_ARG_THREADS"
        ),
    ] = -1
    threads_batch: Annotated[
        int,
        Field(ge=-1, le=512),
        Option("-tb --threads-batch", _COMPUTE, "N", "threads for prompts, -1 for as many as --threads"),
    ] = -1
    threads_adaptive: Annotated[
        Switch,
        Option(
            "--threads-adaptive",
            _COMPUTE,
            "on|off",
            "fewer threads for generation while a core is taken away for long",
        ),
    ] = True
    omp_spin: Annotated[
        CountOrAuto,
        Option(
            "--omp-spin",
            _COMPUTE,
            "N|auto",
            "turns that a llama worker spins at a barrier before it sleeps (GOMP_SPINCOUNT)",
        ),
    ] = -1
    load_mode: Annotated[
        LoadMode,
        Option(
            "-lm --load-mode",
            _COMPUTE,
            "MODE",
            "how weights come into memory: auto, none, mmap, mlock, mmap+mlock or dio",
            env="LLAMA_ARG_LOAD_MODE",
        ),
    ] = "auto"
    gpu_layers: Annotated[
        Layers,
        Option(
            "-ngl --gpu-layers --n-gpu-layers",
            _COMPUTE,
            "N|auto|all",
            "layers to keep on the GPU",
            env="LLAMA_ARG_N_GPU_LAYERS",
            unit="layers",
        ),
    ] = -1
    flash_attn: Annotated[
        FlashAttn,
        Option("-fa --flash-attn", _COMPUTE, "on|off|auto", "flash attention", env="LLAMA_ARG_FLASH_ATTN"),
    ] = "auto"
    cache_type_k: Annotated[
        KvType,
        Option("-ctk --cache-type-k", _COMPUTE, "TYPE", "type of the K cache", env="LLAMA_ARG_CACHE_TYPE_K"),
    ] = "f16"
    cache_type_v: Annotated[
        KvType,
        Option("-ctv --cache-type-v", _COMPUTE, "TYPE", "type of the V cache", env="LLAMA_ARG_CACHE_TYPE_V"),
    ] = "f16"
    swa_full: Annotated[
        Switch,
        Option(
            "--swa-full",
            _COMPUTE,
            "",
            "keep the whole cache of sliding-window layers",
            env="LLAMA_ARG_SWA_FULL",
        ),
    ] = False
    cache_prompt: Annotated[
        Switch,
        Option(
            "--cache-prompt",
            _SLOTS,
            "",
            "reuse what a slot already holds",
            no="--no-cache-prompt",
            env="LLAMA_ARG_CACHE_PROMPT",
        ),
    ] = True
    slot_save_path: Annotated[
        str,
        Option("--slot-save-path", _SLOTS, "DIR", "where slots are saved; without it they are not"),
    ] = ""
    cache_ram: Annotated[
        int,
        Option(
            "-cram --cache-ram",
            _SLOTS,
            "N",
            "prompt cache beside the slots; no effect so far",
            env="LLAMA_ARG_CACHE_RAM",
            unit="MiB",
        ),
    ] = 0
    ctx_checkpoints: Annotated[
        Count,
        Option(
            "-ctxcp --ctx-checkpoints --swa-checkpoints",
            _SLOTS,
            "N",
            "checkpoints per slot, 0 for none",
            env="LLAMA_ARG_CTX_CHECKPOINTS",
        ),
    ] = 32
    checkpoint_min_step: Annotated[
        Count,
        Option(
            "-cms --checkpoint-min-step",
            _SLOTS,
            "N",
            "least distance between checkpoints, 0 to choose",
            env="LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",
            unit="tokens",
        ),
    ] = 0
    ctx_checkpoints_ram: Annotated[
        int,
        Field(ge=-1),
        Option(
            "--ctx-checkpoints-ram",
            _SLOTS,
            "N",
            "memory for the checkpoints of all slots, -1 to choose",
            unit="MiB",
        ),
    ] = -1
    ctx_checkpoints_dir: Annotated[
        str,
        Option(
            "--ctx-checkpoints-dir", _SLOTS, "DIR", "keep checkpoints in unlinked files there, not in memory"
        ),
    ] = ""


class LogFields(BaseModel):
    verbosity: Annotated[
        Verbosity,
        Option(
            "-lv --verbosity --log-verbosity --log-level",
            _LOG,
            "N",
            "0 nothing, 1 error, 2 warning, 3 info, 4 trace, 5 debug; the words will do",
            env="LLAMA_ARG_LOG_VERBOSITY",
        ),
    ] = 3
    verbose: Annotated[
        Switch,
        Option("-v --verbose --log-verbose", _LOG, "", "everything, as --verbosity 5"),
    ] = False
    debug: Annotated[
        Switch,
        Option("--debug", _LOG, "", "check the engine's invariants after every step"),
    ] = False
    trace: Annotated[
        Switch,
        Option("--trace", _LOG, "", "put the trace of every round into every answer"),
    ] = False
