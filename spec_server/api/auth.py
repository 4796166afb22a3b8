"""The gate before every route: the key first, then whether the engine can serve at all."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from spec_server.api.base import ApiOptions, EngineHolder
from spec_server.api.errors import error_body, error_response
from spec_server.api.jsonio import json_response
from spec_server.engine.errors import Unavailable

PUBLIC = frozenset({"/health", "/v1/health"})


class Gate:
    """/health needs no key and reports readiness itself; everything else answers 401 or 503 from here."""

    def __init__(self, app: ASGIApp, holder: EngineHolder, options: ApiOptions) -> None:
        self._app = app
        self._holder = holder
        self._retry_after_s = options.retry_after_s
        self._keys = tuple(key.encode() for key in options.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC:
            await self._app(scope, receive, send)
            return
        if self._keys and not self._is_known(Headers(scope=scope)):
            body = error_body(401, "authentication_error", "Invalid API Key")
            await json_response(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        try:
            self._holder.ready()
        except Unavailable as error:
            await error_response(error, self._retry_after_s)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        # Bytes as they came: starlette reads headers as latin-1.
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
        candidates = {key.strip().encode("latin-1") for key in given if key}
        # Every key is compared, so that the time taken says nothing about which one nearly fitted.
        return sum(hmac.compare_digest(given, key) for given in candidates for key in self._keys) > 0
