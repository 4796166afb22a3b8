"""One generation over HTTP: the engine's events to one JSON answer, or to a stream of events."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from spec_server.api.base import ApiOptions
from spec_server.api.disconnect import ClientGone, closing, unless_gone
from spec_server.api.finished import log_finished
from spec_server.api.forms import Answer, AnswerForm
from spec_server.api.jsonio import json_response
from spec_server.api.schemas import GenerationBody
from spec_server.api.sse import EventStream
from spec_server.engine.base import Delta, Engine, Finished, GenerateRequest
from spec_server.engine.errors import GenerationFailed

CLIENT_CLOSED_REQUEST = 499  # seen in logs only: nobody is left to read it


async def respond(
    http: Request,
    body: GenerationBody,
    request: GenerateRequest,
    form: AnswerForm,
    engine: Engine,
    options: ApiOptions,
) -> Response:
    if body.stream:
        interval = options.ping_interval_s if body.sse_ping_interval is None else body.sse_ping_interval
        return EventStream(engine, request, form, interval)
    try:
        answer = await unless_gone(http.receive, collect(engine, request))
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return json_response(form.whole(answer))


async def collect(engine: Engine, request: GenerateRequest) -> Answer:
    """The whole answer. Cancelling this cancels the generation."""
    texts: list[str] = []
    tokens: list[int] = []
    async with closing(engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                texts.append(event.text)
                tokens += event.tokens
            elif isinstance(event, Finished):
                log_finished(event)
                return Answer("".join(texts), tuple(tokens), event)
    raise GenerationFailed("the generation ended without a result")
