"""Routes that tell and never wait: /health, /props, /v1/models, /metrics."""

from __future__ import annotations

from starlette.responses import Response

from spec_server.api.base import ApiOptions, EngineHolder
from spec_server.api.jsonio import json_response
from spec_server.api.metrics import CONTENT_TYPE, exposition
from spec_server.api.wire import sampling_json
from spec_server.engine.base import Engine, ModelInfo


def health(holder: EngineHolder) -> Response:
    """200 only when a request sent now would be served."""
    holder.ready()
    return json_response({"status": "ok"})


def metrics(engine: Engine) -> Response:
    return Response(exposition(engine.counters()), media_type=CONTENT_TYPE)


def props(engine: Engine, options: ApiOptions, chat_template: str) -> Response:
    model = engine.model
    defaults = {
        **sampling_json(options.sampling),
        "n_predict": options.max_tokens,
        "max_tokens": options.max_tokens,
    }
    facts: dict[str, object] = {
        "default_generation_settings": {"params": defaults, "n_ctx": model.n_ctx_seq},
        "total_slots": engine.n_slots,
        "n_ctx": model.n_ctx_seq,
        "model_alias": model.alias,
        "model_path": model.path,
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": options.slots_endpoint,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "chat_template": chat_template,
        "bos_token": model.bos_token,
        "eos_token": model.eos_token,
        "build_info": options.build_info,
        "is_sleeping": False,
    }
    return json_response({**facts, **engine.props()})


def models(engine: Engine) -> Response:
    model = engine.model
    named = {"name": model.alias, "model": model.alias, "type": "model", "capabilities": ["completion"]}
    return json_response({"object": "list", "data": [model_json(model)], "models": [named]})


def model_json(model: ModelInfo) -> dict[str, object]:
    meta = {
        "n_ctx": model.n_ctx_seq,
        "n_ctx_train": model.n_ctx_train,
        "n_vocab": model.n_vocab,
        "n_embd": model.n_embd,
        "n_params": model.n_params,
        "size": model.size,
    }
    return {
        "id": model.alias,
        "object": "model",
        "created": model.created,
        "owned_by": "spec-server",
        "meta": meta,
    }
