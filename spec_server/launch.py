"""Composition root: the only file that knows every part. Builds them in order, serves, takes them down in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from draft.base import Drafter, DraftError
from draft.registry import DrafterSetup, NgramOptions, longest_draft, make_drafter, reads_hidden_rows
from draft.window import LengthPolicy
from persistence.errors import SlotFileError
from persistence.snapshot import ModelIdentity
from persistence.store import DirectoryStore, SlotStore
from spec_server import __version__, machine
from spec_server.api import heads
from spec_server.api.app import create_app
from spec_server.api.base import ApiOptions, EngineHolder
from spec_server.api.offload import offload
from spec_server.api.templates import CHATML, ChatTemplate
from spec_server.engine.base import ModelInfo, SamplingParams
from spec_server.engine.checkpoints import CheckpointOptions
from spec_server.engine.core import EngineCore
from spec_server.engine.errors import NotSupported
from spec_server.engine.fitting import TargetFit
from spec_server.engine.speculate import DraftDefaults
from spec_server.engine.spill import make_spill
from spec_server.engine.storage import NoStore
from spec_server.engine.threads import ThreadControl
from spec_server.engine.transfer import Transfer
from spec_server.engine.warmup import measure_step_costs, warm_up
from spec_server.engine.worker import EngineWorker, WorkerOptions, engine_thread
from spec_server.listening import Server, listen, url_of
from spec_server.load_mode import load_mode
from spec_server.runtime.errors import LlamaError, ModelError
from spec_server.runtime.gguf import check_readable
from spec_server.runtime.llama_context import LlamaContext
from spec_server.runtime.model import Model
from spec_server.settings import BUILT_IN_TEMPLATE, Settings

log = logging.getLogger("spec_server")

_MIB = 1 << 20
_SNAPSHOTS = 8  # snapshots of recurrent memory per slot: each may be as large as a checkpoint
_GRACE_S = 5  # after SIGTERM: streams get their error event and the sockets close


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that is built before the event loop hands requests to it."""

    core: EngineCore
    store: SlotStore
    fit: TargetFit
    draft_identity: ModelIdentity | None
    model: ModelInfo
    facts: Mapping[str, object]


def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT. 0 after an orderly end, 1 where the server could not start, 2 where it was
    told what cannot be. What can be known without a model is found out before one is loaded."""
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    if settings.log_level > logging.DEBUG:
        logging.getLogger("llama").setLevel(logging.WARNING)
    try:
        ChatTemplate(_template(settings), "", "")
    except NotSupported as e:
        flag = "--chat-template-file" if settings.chat_template_file else "--chat-template"
        log.error("cannot start: %s: %s", flag, e)
        return 2
    try:
        sockets = listen(settings.host, settings.port)
    except OSError as e:
        log.error("cannot start: %s", e)
        return 1
    try:
        with asyncio.Runner(loop_factory=_event_loop) as runner:
            status = runner.run(_serve(settings, sockets))
    except KeyboardInterrupt:
        status = 0
    if offload.is_busy():
        # A call into llama goes on: it must not see the library's static data being taken down.
        logging.shutdown()
        os._exit(status)
    return status


def _event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(settings: Settings, sockets: Sequence[socket.socket]) -> int:
    holder = EngineHolder()
    app = create_app(holder, _api_options(settings))
    config = uvicorn.Config(
        app,
        http=heads.HTTP,
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = Server(config)
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, server.stop)
    serving = asyncio.create_task(server.serve(list(sockets)))
    loading = asyncio.create_task(_load(settings, holder, server, url_of(sockets[0])))
    stopping = asyncio.create_task(server.stopping.wait())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    worker = await loading if loading.done() and not loading.cancelled() else None
    if worker is not None:
        log.info("shutting down")
        await worker.close()
        offload.abandon()
    server.should_exit = True
    if not loading.done():
        loading.cancel()
    await serving
    return 0 if server.started and not server.failed else 1


async def _load(settings: Settings, holder: EngineHolder, server: Server, url: str) -> EngineWorker | None:
    """Build the engine beside the open socket; a failure ends the server with one line."""
    started = time.monotonic()
    try:
        thread = engine_thread()
        parts = await asyncio.get_running_loop().run_in_executor(thread, build, settings)
    except (LlamaError, DraftError, SlotFileError, OSError, ValueError) as e:
        log.error("cannot start: %s", e)
        server.failed = True
        server.stop()
        return None
    transfer = Transfer(parts.core, parts.store, parts.fit, parts.draft_identity)
    options = WorkerOptions(settings.queue_limit, settings.debug, settings.spec_verify)
    worker = EngineWorker(parts.core, transfer, parts.model, parts.facts, options, thread)
    gc.collect()
    gc.freeze()  # all of this stays: a full collection in mid-answer would walk it for 16 ms
    holder.engine = worker
    log.info("ready after %.1f s on %s", time.monotonic() - started, url)
    return worker


# -- building


def build(settings: Settings) -> Parts:
    """Model, contexts, drafter, engine and store. Raises what each of them raises where it cannot be had."""
    store = _store(settings)
    _check_models(settings)
    settings = settings.model_copy(update={"load_mode": load_mode(settings)})
    model = Model(
        settings.model,
        n_gpu_layers=settings.gpu_layers,
        load_mtp=reads_hidden_rows(settings.drafters),
        load_mode=settings.load_mode,
    )
    if settings.gpu_layers > 0 and not model.is_offloaded:
        log.warning(
            "-ngl %d: this build of llama.cpp has no accelerator, all layers stay here", settings.gpu_layers
        )
    target = _target(settings, model)
    warm_up(target, model)
    policy = _length_policy(settings, target)
    target.n_decodes = 0  # those of the measuring are nobody's
    drafter = make_drafter(settings.drafters, _drafter_setup(settings, model, target, policy))
    spill = make_spill(Path(settings.ctx_checkpoints_dir) if settings.ctx_checkpoints_dir else None)
    core = EngineCore(
        model,
        target,
        drafter,
        _draft_defaults(settings),
        _checkpoint_options(settings),
        spill,
        policy,
        _thread_control(settings, target, drafter),
    )
    name, digest = model.identity()
    layout = {
        "type_k": settings.cache_type_k,
        "type_v": settings.cache_type_v,
        "v_transposed": target.v_transposed,
        "rope": "model",
    }
    fit = TargetFit(ModelIdentity(name, digest), layout, target.n_ctx_seq, model.n_vocab)
    info = _model_info(settings, model, target)
    facts = _facts(settings, core, drafter)
    slots = "1 slot" if target.n_seq_max == 1 else f"{target.n_seq_max} slots"
    log.info("%s: %s of %d tokens, drafting %s", name, slots, target.n_ctx_seq, drafter.name)
    draft_identity = ModelIdentity(*drafter.model_identity) if drafter.model_identity else None
    return Parts(core, store, fit, draft_identity, info, facts)


def _store(settings: Settings) -> SlotStore:
    if not settings.slot_save_path:
        return NoStore()
    try:
        return DirectoryStore(Path(settings.slot_save_path))
    except (OSError, SlotFileError) as e:
        raise ValueError(f"--slot-save-path: {e}") from e


def _check_models(settings: Settings) -> None:
    """ModelError with the flag where a file is no model. Else a draft model would be found wanting after the target
    was read."""
    for flag, path in (("--model", settings.model), ("--model-draft", settings.model_draft)):
        if path:
            try:
                check_readable(Path(path))
            except ModelError as e:
                raise ModelError(f"{flag}: {e}") from e


def _threads(settings: Settings) -> tuple[int, int]:
    n = settings.threads if settings.threads > 0 else machine.default_threads()
    return n, settings.threads_batch if settings.threads_batch > 0 else n


def _target(settings: Settings, model: Model) -> LlamaContext:
    n_threads, n_threads_batch = _threads(settings)
    longest = longest_draft(settings.drafters, settings.draft_n_max, _ngram_options(settings))
    return LlamaContext(
        model,
        n_ctx=settings.ctx_size,
        n_batch=settings.batch_size,
        n_ubatch=settings.n_ubatch,
        n_seq_max=settings.n_slots,
        n_threads=n_threads,
        n_threads_batch=n_threads_batch,
        kv_unified=settings.is_unified,
        flash_attn=settings.flash_attn,
        type_k=settings.cache_type_k,
        type_v=settings.cache_type_v,
        swa_full=settings.swa_full,
        n_rs_seq=_snapshots(settings, model, longest),
        expose_hidden=reads_hidden_rows(settings.drafters),
    )


def _snapshots(settings: Settings, model: Model, longest: int) -> int:
    """How many tokens of a rejected draft recurrent memory can take back by itself; it limits the draft length."""
    if not (model.is_recurrent or model.is_hybrid):
        return 0
    wanted = settings.spec_draft_n_max if settings.spec_draft_n_max >= 0 else _SNAPSHOTS
    n_ctx = (settings.ctx_size or model.n_ctx_train) // (1 if settings.is_unified else settings.n_slots)
    # llama wants a micro-batch with room for more than all of them.
    return max(0, min(longest, wanted, min(settings.n_ubatch, n_ctx) - 2))


def _drafter_setup(
    settings: Settings, model: Model, target: LlamaContext, policy: LengthPolicy | None
) -> DrafterSetup:
    n_threads, n_threads_batch = _threads(settings)
    return DrafterSetup(
        target_model=model,
        target=target,
        n_max=settings.draft_n_max,
        model_path=Path(settings.model_draft) if settings.model_draft else None,
        n_ctx=settings.ctx_size_draft * (1 if settings.is_unified else settings.n_slots) or target.n_ctx,
        n_batch=settings.batch_size,
        n_ubatch=settings.n_ubatch,
        n_threads=n_threads,
        n_threads_batch=n_threads_batch,
        n_gpu_layers=settings.gpu_layers_draft,
        load_mode=settings.load_mode,
        kv_unified=settings.is_unified,
        flash_attn=settings.flash_attn,
        type_k=settings.cache_type_k_draft,
        type_v=settings.cache_type_v_draft,
        rebuild=settings.draft_rebuild,
        ngram=_ngram_options(settings),
        policy=policy,
    )


def _ngram_options(settings: Settings) -> NgramOptions:
    return NgramOptions(
        simple_size_n=settings.ngram_simple_size_n,
        simple_size_m=settings.spec_ngram_simple_size_m,
        simple_min_hits=settings.spec_ngram_simple_min_hits,
        mod_n_match=settings.spec_ngram_mod_n_match,
        mod_n_min=settings.spec_ngram_mod_n_min,
        mod_n_max=settings.spec_ngram_mod_n_max,
    )


def _draft_defaults(settings: Settings) -> DraftDefaults:
    return DraftDefaults(settings.spec_draft_n_min, settings.spec_draft_p_min)


def _length_policy(settings: Settings, target: LlamaContext) -> LengthPolicy | None:
    """None: fixed lengths."""
    if not settings.drafters or not settings.spec_adaptive:
        return None
    policy = LengthPolicy()
    measure_step_costs(target, policy.pace.costs)
    return policy


def _thread_control(settings: Settings, target: LlamaContext, drafter: Drafter) -> ThreadControl | None:
    if not settings.threads_adaptive:
        return None
    return ThreadControl(_threads(settings)[0], (target.set_threads, drafter.set_threads))


def _checkpoint_options(settings: Settings) -> CheckpointOptions:
    ram = settings.ctx_checkpoints_ram
    return CheckpointOptions(
        n_max=settings.ctx_checkpoints,
        min_step=settings.checkpoint_min_step,
        ram_bytes=ram * _MIB if ram >= 0 else machine.default_checkpoint_bytes(),
    )


def _model_info(settings: Settings, model: Model, target: LlamaContext) -> ModelInfo:
    return ModelInfo(
        alias=settings.alias or Path(settings.model).name,
        path=settings.model,
        n_ctx_seq=target.n_ctx_seq,
        n_ctx_train=model.n_ctx_train,
        n_vocab=model.n_vocab,
        n_embd=model.n_embd,
        n_params=model.n_params,
        size=model.size,
        chat_template=_template(settings) or model.chat_template() or "",
        bos_token=model.bos_text,
        eos_token=model.eos_text,
        created=int(time.time()),
    )


def _template(settings: Settings) -> str:
    """Empty: the model's own."""
    text = settings.template()
    return CHATML if text == BUILT_IN_TEMPLATE else text


def _facts(settings: Settings, core: EngineCore, drafter: Drafter) -> Mapping[str, object]:
    is_drafting = bool(settings.drafters)
    has_store = bool(settings.slot_save_path)
    sections = {"target": True, "checkpoints": core.checkpoints.enabled, "draft": is_drafting}
    return {
        "speculative": {
            "enabled": is_drafting,
            "reason": "" if is_drafting else "no drafter was asked for",
            "type": ",".join(settings.drafters) or "none",
            "draft_model": Path(settings.model_draft).name if "draft-simple" in settings.drafters else "",
            "n_ctx": drafter.n_ctx_seq,
            "n_max": drafter.n_max,
            "n_min": settings.spec_draft_n_min,
            "p_min": settings.spec_draft_p_min,
            "adaptive": settings.spec_adaptive,
            "verify": settings.spec_verify,
        },
        "slot_draft": is_drafting and has_store,
        "slot_checkpoints": core.checkpoints.enabled,
        "persistence": {
            "enabled": has_store,
            "reason": "" if has_store else "no --slot-save-path was given",
            "sections": [name for name, kept in sections.items() if kept],
        },
        "kv_unified": settings.is_unified,
    }


def _api_options(settings: Settings) -> ApiOptions:
    return ApiOptions(
        api_keys=settings.api_keys(),
        ping_interval_s=float(settings.sse_ping_interval),
        sampling=SamplingParams(
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            typ_p=settings.typical_p,
            repeat_penalty=settings.repeat_penalty,
            repeat_last_n=settings.repeat_last_n,
            presence_penalty=settings.presence_penalty,
            frequency_penalty=settings.frequency_penalty,
            seed=settings.seed if settings.seed >= 0 else None,
        ),
        max_tokens=settings.n_predict,
        cache_prompt=settings.cache_prompt,
        trace=settings.trace,
        slots_endpoint=settings.slots,
        prefill_assistant=settings.prefill_assistant,
        template_kwargs=settings.chat_template_kwargs,
        build_info=f"spec-server {__version__}",
    )
