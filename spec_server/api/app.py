"""The application: routes, and the layers around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from spec_server.api import chat, completions, slot_files, slots, status
from spec_server.api.auth import Gate
from spec_server.api.base import ApiOptions, EngineHolder
from spec_server.api.errors import LastResort, install_handlers
from spec_server.api.limits import BodyLimit
from spec_server.api.templates import ChatTemplate
from spec_server.engine.base import Engine

Handler = Callable[[Request], Awaitable[Response]]


def create_app(holder: EngineHolder, options: ApiOptions) -> FastAPI:
    """Serves at once; every route but /health answers 503 until `holder.engine` is set and ready."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    install_handlers(app, options.retry_after_s)
    for paths, method, handler in _routes(holder, options):
        for path in paths:
            app.add_route(path, handler, methods=[method])
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=options.max_body_bytes)
    app.add_middleware(Gate, holder=holder, options=options)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
        allow_headers=["*"],
        allow_credentials=True,
    )
    app.add_middleware(LastResort)
    return app


def _routes(holder: EngineHolder, options: ApiOptions) -> list[tuple[tuple[str, ...], str, Handler]]:
    templates = _TemplateOnce()

    async def get_health(http: Request) -> Response:
        return status.health(holder)

    async def get_props(http: Request) -> Response:
        engine = holder.ready()
        return status.props(engine, options, engine.model.chat_template)

    async def get_models(http: Request) -> Response:
        return status.models(holder.ready())

    async def get_metrics(http: Request) -> Response:
        return status.metrics(holder.ready())

    async def post_chat(http: Request) -> Response:
        engine = holder.ready()
        return await chat.chat_completions(http, engine, templates.of(engine), options)

    async def post_apply_template(http: Request) -> Response:
        return await chat.apply_template(http, templates.of(holder.ready()), options)

    async def post_completion(http: Request) -> Response:
        return await completions.completion(http, holder.ready(), options)

    async def post_text_completions(http: Request) -> Response:
        return await completions.text_completions(http, holder.ready(), options)

    async def post_tokenize(http: Request) -> Response:
        return await completions.tokenize(http, holder.ready())

    async def post_detokenize(http: Request) -> Response:
        return await completions.detokenize(http, holder.ready())

    async def get_slots(http: Request) -> Response:
        return await slots.list_slots(http, holder.ready(), options)

    async def post_slot(http: Request) -> Response:
        return await slots.slot_action(http, holder.ready())

    async def get_files(http: Request) -> Response:
        return await slot_files.list_files(http, holder.ready())

    async def get_file(http: Request) -> Response:
        return await slot_files.get_file(http, holder.ready())

    async def delete_file(http: Request) -> Response:
        return await slot_files.delete_file(http, holder.ready())

    return [
        (("/health", "/v1/health"), "GET", get_health),
        (("/props",), "GET", get_props),
        (("/v1/models", "/models"), "GET", get_models),
        (("/metrics",), "GET", get_metrics),
        (("/v1/chat/completions", "/chat/completions"), "POST", post_chat),
        (("/apply-template",), "POST", post_apply_template),
        (("/completion", "/completions"), "POST", post_completion),
        (("/v1/completions",), "POST", post_text_completions),
        (("/tokenize",), "POST", post_tokenize),
        (("/detokenize",), "POST", post_detokenize),
        (("/slots",), "GET", get_slots),
        (("/slots/{id_slot}",), "POST", post_slot),
        (("/slot-files",), "GET", get_files),
        (("/slot-files/{name:path}",), "GET", get_file),
        (("/slot-files/{name:path}",), "DELETE", delete_file),
    ]


class _TemplateOnce:
    """The engine's template, compiled at its first use."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._template: ChatTemplate | None = None

    def of(self, engine: Engine) -> ChatTemplate:
        if self._template is None or engine is not self._engine:
            model = engine.model
            self._template = ChatTemplate(model.chat_template, model.bos_token, model.eos_token)
            self._engine = engine
        return self._template
