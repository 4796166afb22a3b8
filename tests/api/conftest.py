"""The application around a FakeEngine, spoken to in process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from spec_server.api.app import create_app
from spec_server.api.base import ApiOptions, EngineHolder
from tests.fakes import FakeEngine


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def options() -> ApiOptions:
    """Override in a test module for other options."""
    return ApiOptions()


@pytest.fixture
async def client(
    engine: FakeEngine, options: ApiOptions, anyio_backend: str
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(EngineHolder(engine), options)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
