"""What an endpoint must say to have its answers written: the protocol of an answer's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from spec_server.engine.base import Delta, Finished, Started

Event = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    tokens: tuple[int, ...]
    finished: Finished


class AnswerForm(Protocol):
    """How one endpoint writes an answer. An object lives for one request; `chunk` may return the same mapping
    again and again, since it is serialised before the next call."""

    terminator: bytes

    def opening(self, started: Started) -> Sequence[Event]:
        """Events to send as soon as the prompt is processed."""

    def chunk(self, delta: Delta) -> Event | None:
        """None: nothing in it that this form shows."""

    def closing(self, finished: Finished) -> Sequence[Event]: ...

    def whole(self, answer: Answer) -> Event: ...
