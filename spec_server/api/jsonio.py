"""JSON out: one way to serialise, for bodies and for events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import orjson
from starlette.responses import Response


def dumps(value: object) -> bytes:
    try:
        return orjson.dumps(value, _plain, orjson.OPT_NON_STR_KEYS)
    except TypeError:
        # Integers beyond 64 bits and halves of surrogate pairs: a stored file may say anything.
        return json.dumps(value, default=_plain).encode()


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(body), status, headers, media_type="application/json; charset=utf-8")


def _plain(value: object) -> object:
    """The engine's read-only views, which orjson does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence | set | frozenset):
        return list(value)
    raise TypeError(f"not JSON: {type(value).__name__}")
