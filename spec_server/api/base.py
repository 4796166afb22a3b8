"""What the API is given: its options, and the place where the engine appears once it has loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spec_server.engine.base import Engine, SamplingParams
from spec_server.engine.errors import Unavailable


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Facts that hold for the whole run. Sampling and max_tokens are what a request gets that names none."""

    api_keys: tuple[str, ...] = ()
    ping_interval_s: float = 30.0  # <= 0: no pings
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = -1
    cache_prompt: bool = True
    trace: bool = False  # every answer carries its trace, asked for or not
    slots_endpoint: bool = True
    prefill_assistant: bool = True
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    retry_after_s: int = 1
    max_body_bytes: int = 64 << 20  # a prompt of some ten million tokens
    build_info: str = "spec-server"


class EngineHolder:
    """The socket opens before the model has loaded: until `engine` is set, answers are 503 with `reason`."""

    __slots__ = ("engine", "reason")

    def __init__(self, engine: Engine | None = None, reason: str = "Loading model") -> None:
        self.engine = engine
        self.reason = reason

    def ready(self) -> Engine:
        """The engine, able to serve now; Unavailable otherwise."""
        if self.engine is None:
            raise Unavailable(self.reason)
        is_ready, reason = self.engine.status()
        if not is_ready:
            raise Unavailable(reason or self.reason)
        return self.engine
