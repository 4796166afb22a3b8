"""What the engine raises; the API maps each class to a status in one table."""

from __future__ import annotations

from collections.abc import Mapping


class EngineError(Exception):
    """Base. `details` are extra fields of the error body."""

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.details: Mapping[str, object] = details


class InvalidRequest(EngineError):
    """The request cannot be served as it is; nothing was touched."""


class ContextExceeded(EngineError):
    """The prompt does not fit the slot's context. details: n_prompt_tokens, n_ctx."""


class SlotNotFound(EngineError):
    """No slot of that number."""


class NotSupported(EngineError):
    """This server was started without what the call needs."""


class FileNotFound(EngineError):
    """No slot file of that name; the slot is unchanged."""


class FileRefused(EngineError):
    """The file is damaged, of another model, or does not fit. details: field, expected, found, slot."""


class StorageForbidden(EngineError):
    """The directory cannot be written or read."""


class StorageFull(EngineError):
    """No room on the disk."""


class StorageFailed(EngineError):
    """Any other failure of the file system."""


class Overloaded(EngineError):
    """The queue is full."""


class Unavailable(EngineError):
    """The engine is loading or shutting down."""


class GenerationFailed(EngineError):
    """A decode failed in mid-request; the slot was emptied."""
