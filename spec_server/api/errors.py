"""The one place where errors become HTTP: a table from error class to status and type, and the last resort.

The only module of the API that may catch Exception.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spec_server.api.jsonio import json_response
from spec_server.api.schemas import TAKES
from spec_server.engine import errors
from spec_server.wording import fault

log = logging.getLogger(__name__)

STATUS: Mapping[type[errors.EngineError], tuple[int, str]] = {
    errors.InvalidRequest: (400, "invalid_request_error"),
    errors.ContextExceeded: (400, "exceed_context_size_error"),
    errors.FileRefused: (400, "invalid_request_error"),
    errors.StorageForbidden: (403, "permission_error"),
    errors.SlotNotFound: (404, "not_found_error"),
    errors.FileNotFound: (404, "not_found_error"),
    errors.Overloaded: (429, "rate_limit_error"),
    errors.GenerationFailed: (500, "server_error"),
    errors.StorageFailed: (500, "server_error"),
    errors.NotSupported: (501, "not_supported_error"),
    errors.Unavailable: (503, "unavailable_error"),
    errors.StorageFull: (507, "storage_full_error"),
}
INTERNAL = (500, "server_error")
HTTP_TYPES = {401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error"}


def error_body(
    code: int, kind: str, message: str, details: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Details never displace the three fields that clients rely on."""
    return {"error": {**(details or {}), "code": code, "message": message, "type": kind}}


def status_of(error: errors.EngineError) -> tuple[int, str]:
    """By the nearest base class, so that a new subclass in the engine is served as its parent."""
    for cls in type(error).__mro__:
        if cls in STATUS:
            return STATUS[cls]
    return INTERNAL


def body_of(error: Exception) -> dict[str, object]:
    """Anything that is no EngineError is our own fault: logged in full, told in one word."""
    if isinstance(error, errors.EngineError):
        code, kind = status_of(error)
        return error_body(code, kind, str(error), error.details)
    log.error("unhandled error", exc_info=error)
    return error_body(*INTERNAL, "internal error")


def error_response(error: errors.EngineError, retry_after_s: int) -> Response:
    code, _ = status_of(error)
    headers = {"Retry-After": str(retry_after_s)} if code in (429, 503) else None
    return json_response(body_of(error), code, headers)


def from_validation(error: ValidationError) -> errors.InvalidRequest:
    """The first fault, with the field's path as the client wrote it."""
    first = error.errors(include_url=False, include_input=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if name in TAKES and first["type"] != "missing":
        return errors.InvalidRequest(f"{name}: it takes {TAKES[name]}", param=name)
    param = field_path(first["loc"])
    message = fault(first)
    return errors.InvalidRequest(f"{param}: {message}" if param else message, param=param)


def field_path(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "content", "str") -> messages[0].content; the names of union members are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _UNION_TAGS or part.startswith(("list[", "tuple[", "function-")):
            continue
        else:
            path += f".{part}" if path else part
    return path


_UNION_TAGS = frozenset(
    {"str", "int", "float", "bool", "dict", "constrained-str", "constrained-int", "TextPart"}
)


def install_handlers(app: FastAPI, retry_after_s: int) -> None:
    async def engine_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, errors.EngineError)
        return error_response(error, retry_after_s)

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ValidationError)
        return error_response(from_validation(error), retry_after_s)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = HTTP_TYPES.get(error.status_code, "invalid_request_error")
        message = f"{request.method} {request.url.path}: {error.detail}"
        return json_response(error_body(error.status_code, kind, message), error.status_code, error.headers)

    app.add_exception_handler(errors.EngineError, engine_error)
    app.add_exception_handler(ValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)


class LastResort:
    """Outermost layer: an unforeseen error is a JSON 500 and a traceback in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def watched(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            return  # it left in the middle of its own request: nobody to answer
        except Exception as error:
            body = body_of(error)
            if has_started:
                # Too late to say anything; ending without the last chunk tells the client that it is cut off.
                return
            await json_response(body, 500)(scope, receive, send)


async def report_failure(
    work: Awaitable[None],
    can_report: Callable[[], bool],
    report: Callable[[dict[str, object]], Awaitable[None]],
) -> None:
    """Awaits `work`; an error of it goes to `report` as an error body, or on to the caller while `can_report`
    says no."""
    try:
        await work
    except Exception as error:
        if not can_report():
            raise
        await report(body_of(error))
