"""llama-server's flags that are no settings here: what becomes of a start script that holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Always so here, or there is nothing for them to act on. The number is that of their values.
ALWAYS_SO = {
    "--metrics": 0,
    "--jinja": 0,
    "-cb": 0,
    "--cont-batching": 0,
    "--no-context-shift": 0,
    "--no-ui": 0,
    "--no-webui": 0,
    "--no-mmproj": 0,
    "--no-mmproj-auto": 0,
    "--mmproj-offload": 0,
    "--no-mmproj-offload": 0,
    "--offline": 0,
    "--no-cache-idle-slots": 0,
    "--no-warmup": 0,
    "-kvo": 0,
    "--kv-offload": 0,
    "--op-offload": 0,
}
# Accepted with a note on standard error: they change speed or appearance in llama-server and nothing here. The tuning
# of a sampler stands here as that sampler itself cannot be switched on.
IGNORED = {
    "--ui": 0,
    "--webui": 0,
    "--props": 0,
    "--perf": 0,
    "--no-perf": 0,
    "--warmup": 0,
    "--cache-idle-slots": 0,
    "--check-tensors": 0,
    "--repack": 0,
    "-nr": 0,
    "--no-repack": 0,
    "--no-op-offload": 0,
    "--no-host": 0,
    "-nocb": 0,
    "--no-cont-batching": 0,
    "-bs": 0,
    "--backend-sampling": 0,
    "-e": 0,
    "--escape": 0,
    "--no-escape": 0,
    "--verbose-prompt": 0,
    "--prio": 1,
    "--prio-batch": 1,
    "--poll": 1,
    "--poll-batch": 1,
    "-to": 1,
    "--timeout": 1,
    "--threads-http": 1,
    "--sleep-idle-seconds": 1,
    "--cache-reuse": 1,
    "--numa": 1,
    "--log-file": 1,
    "--keep": 1,
    "-sps": 1,
    "--slot-prompt-similarity": 1,
    "-dt": 1,
    "--defrag-thold": 1,
    "--log-disable": 0,
    "--log-colors": 1,
    "--log-prefix": 0,
    "--no-log-prefix": 0,
    "--log-timestamps": 0,
    "--no-log-timestamps": 0,
    "--reasoning-format": 1,
    "-fit": 1,
    "--fit": 1,
    "-td": 1,
    "--threads-draft": 1,
    "--spec-draft-threads": 1,
    "-tbd": 1,
    "--threads-batch-draft": 1,
    "--spec-draft-threads-batch": 1,
    "--prio-draft": 1,
    "--spec-draft-prio": 1,
    "--prio-batch-draft": 1,
    "--spec-draft-prio-batch": 1,
    "--poll-draft": 1,
    "--spec-draft-poll": 1,
    "--poll-batch-draft": 1,
    "--spec-draft-poll-batch": 1,
    "--draft-p-split": 1,
    "--spec-draft-p-split": 1,
    "--spec-draft-backend-sampling": 0,
    "--no-spec-draft-backend-sampling": 0,
    "--xtc-threshold": 1,
    "--dry-base": 1,
    "--dry-allowed-length": 1,
    "--dry-penalty-last-n": 1,
    "--dry-sequence-breaker": 1,
    "--adaptive-decay": 1,
    "--dynatemp-exp": 1,
    "--mirostat-lr": 1,
    "--mirostat-ent": 1,
}
# Switches that --load-mode has replaced.
OLDER = ("--mlock", "--mmap", "--no-mmap", "-dio", "--direct-io", "-ndio", "--no-direct-io")
# Accepted with the values that ask for what is so here anyway; with any other they would change the answers, or where
# they are computed.
NEUTRAL: Mapping[str, tuple[str, ...]] = {
    "--mirostat": ("0",),
    "--dry-multiplier": ("0",),
    "--xtc-probability": ("0",),
    "--dynatemp-range": ("0",),
    "--top-nsigma": ("-1", "0"),
    "--top-n-sigma": ("-1", "0"),
    "--adaptive-target": ("-1",),
    "-sm": ("none", "layer"),
    "--split-mode": ("none", "layer"),
    "-mg": ("0",),
    "--main-gpu": ("0",),
}
# `none` is that many layers on a GPU; other devices cannot be chosen here.
DEVICES = {
    "-dev": "gpu_layers",
    "--device": "gpu_layers",
    "-devd": "gpu_layers_draft",
    "--device-draft": "gpu_layers_draft",
    "--spec-draft-device": "gpu_layers_draft",
}
ONLY: Mapping[str, tuple[str, ...]] = {**NEUTRAL, **dict.fromkeys(DEVICES, ("none",))}
# Known and not here, by what they are for: named as such, since a flag that looks alike is no typing error then.
REFUSED: Mapping[str, str] = {
    "TLS and who may call": "--ssl-key-file --ssl-cert-file --cors-origins --cors-methods --cors-headers "
    "--cors-credentials --no-cors-credentials --reuse-port --api-prefix",
    "models from the network, several models": "-mu --model-url -dr --docker-repo -hf -hfr --hf-repo -hff --hf-file "
    "-hft --hf-token -hfd -hfrd --hf-repo-draft --spec-draft-hf -cl --cache-list --models-dir --models-preset "
    "--models-max --models-autoload --no-models-autoload --tags",
    "images and audio": "-mm --mmproj -mmu --mmproj-url --mmproj-auto --image-min-tokens --image-max-tokens "
    "--mtmd-batch-max-tokens --video-fps --video-timestamp-interval --video-ffmpeg-dir --media-path",
    "embeddings, reranking": "--embedding --embeddings --rerank --reranking --pooling --embd-normalize",
    "constrained output, tools": "--grammar --grammar-file -j --json-schema -jf --json-schema-file --tools "
    "--tools-runtime --mcp-servers-config --mcp-servers-json -ag --agent -no-ag --no-agent --ui-mcp-proxy "
    "--no-ui-mcp-proxy --webui-mcp-proxy --no-webui-mcp-proxy",
    "other weights": "--lora --lora-scaled --lora-init-without-apply --control-vector --control-vector-scaled "
    "--control-vector-layer-range --override-kv",
    "context": "--context-shift --rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
    "--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --kv-unified-per-slot",
    "sampling": "--samplers --sampler-seq --sampling-seq -l --logit-bias --ignore-eos -r --reverse-prompt -sp "
    "--special --spm-infill",
    "templates and thinking": "--no-jinja --skip-chat-parsing --no-skip-chat-parsing -rea --reasoning "
    "--reasoning-effort --reasoning-budget --reasoning-budget-message --reasoning-preserve --no-reasoning-preserve",
    "places to compute": "-nkvo --no-kv-offload -ot --override-tensor -otd --override-tensor-draft "
    "--spec-draft-override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -cmoed --cpu-moe-draft --spec-draft-cpu-moe "
    "-ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe -ts --tensor-split -fitt --fit-target -fitc --fit-ctx --rpc "
    "--list-devices -C --cpu-mask -Cr --cpu-range --cpu-strict -Cb --cpu-mask-batch -Crb --cpu-range-batch "
    "--cpu-strict-batch -Cd --cpu-mask-draft --spec-draft-cpu-mask -Crd --cpu-range-draft --spec-draft-cpu-range "
    "--cpu-strict-draft --spec-draft-cpu-strict -Cbd --cpu-mask-batch-draft --spec-draft-cpu-mask-batch "
    "--cpu-strict-batch-draft --spec-draft-cpu-strict-batch --spec-draft-ncmoe -ncffn --n-cpu-ffn -lzm --lazy-mode",
    "drafters": "--spec-default -lcs --lookup-cache-static -lcd --lookup-cache-dynamic --spec-ngram-map-k-size-n "
    "--spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m "
    "--spec-ngram-map-k4v-min-hits --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits --spec-synth-len "
    "--spec-synth-rates",
    "pages and logs": "--path --ui-config --webui-config --ui-config-file --webui-config-file --log-jsonl "
    "--no-log-jsonl --log-prompts-dir --completion-bash --usage -f --file -bf --binary-file",
    "presets that name a model in the network": "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default "
    "--fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default "
    "--gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default",
}
REFUSED_FLAGS = frozenset(flag for flags in REFUSED.values() for flag in flags.split())

# llama-server's variables of the flags above, with the value for which there is nothing to say.
ALWAYS_SO_ENV: Mapping[str, bool] = {
    "LLAMA_ARG_ENDPOINT_METRICS": True,
    "LLAMA_ARG_JINJA": True,
    "LLAMA_ARG_CONT_BATCHING": True,
    "LLAMA_ARG_CONTEXT_SHIFT": False,
    "LLAMA_ARG_UI": False,
    "LLAMA_ARG_MMPROJ_AUTO": False,
    "LLAMA_ARG_MMPROJ_OFFLOAD": False,
    "LLAMA_ARG_OFFLINE": True,
    "LLAMA_ARG_CACHE_IDLE_SLOTS": False,
    "LLAMA_ARG_KV_OFFLOAD": True,
}
IGNORED_ENV = frozenset(
    f"LLAMA_ARG_{flag.lstrip('-').upper().replace('-', '_')}"
    # where --props and --reasoning-format are found there, and older words that have no variable here
    for flag in (*IGNORED, *OLDER, "--dio", "--endpoint-props", "--think")
    if flag.startswith("--")
)


def load_mode_of(older: Sequence[str]) -> str:
    """What these of the older switches ask for together, whatever their order; empty: nothing."""
    given = set(older)
    if given & {"-dio", "--direct-io"}:
        return "dio"
    is_mapped = "--no-mmap" not in given
    if "--mlock" in given:
        return "mmap+mlock" if is_mapped else "mlock"
    return "none" if not is_mapped else "mmap" if "--mmap" in given else ""


def is_neutral(flag: str, value: str) -> bool:
    """Numbers by their value: 0.0 is 0."""
    try:
        return float(value) in {float(wanted) for wanted in ONLY[flag]}
    except ValueError:
        return value in ONLY[flag]
