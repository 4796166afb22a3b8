"""docs/http-api.md names every route, error type, refused field and metric."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.routing import Route

from spec_server.api.app import create_app
from spec_server.api.base import ApiOptions, EngineHolder
from spec_server.api.errors import HTTP_TYPES, STATUS
from spec_server.api.schemas import UNSUPPORTED, GenerationBody

PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
ROUTES = [
    (method, route.path.replace(":path", ""))
    for route in create_app(EngineHolder(), ApiOptions()).routes
    if isinstance(route, Route)
    for method in sorted((route.methods or set()) - {"HEAD"})
]
ALIASES = {"model", "speculative"}  # ignored; written with its parts


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_route_is_documented(method: str, path: str) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `") and method in line]
    assert any(f"`{path}`" in row or f" {path}`" in row for row in rows)


@pytest.mark.parametrize(("status", "kind"), sorted({*STATUS.values(), *HTTP_TYPES.items()}))
def test_error_is_documented(status: int, kind: str) -> None:
    assert f"| {status} | `{kind}` |" in PAGE


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_refused_field_is_documented(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", sorted(GenerationBody.model_fields.keys() - ALIASES))
def test_request_field_is_documented(name: str) -> None:
    assert f"`{name}" in PAGE
