"""What this layer raises; every error says what state is left behind."""

from __future__ import annotations


class LlamaError(RuntimeError):
    """Base of this package's errors. Raised itself when llama failed in a way that we did not foresee."""


class ModelError(LlamaError):
    """A model or a context could not be made; nothing was allocated."""


class ContextFull(LlamaError):
    """The batch does not fit into the free cells; nothing was appended."""


class BatchError(LlamaError):
    """The batch breaks a rule that llama would abort on; llama was not called and nothing was appended."""


class RewindError(LlamaError):
    """The prefix is out of reach of truncate; the sequence is unchanged."""


class StateError(LlamaError):
    """A state was refused, or could not be read. After a refused write the sequence is empty."""


class TooManyTokens(LlamaError):
    """A text has more tokens than were asked for: `n_tokens` at least."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__(f"more than {n_tokens - 1} tokens")
        self.n_tokens = n_tokens
