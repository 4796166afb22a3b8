"""Does a stored target state fit this server: identity, settings, room. Pure; touches neither llama nor a slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from persistence.snapshot import FileFacts, ModelIdentity, Scalar
from spec_server.engine.errors import FileRefused


@dataclass(frozen=True, slots=True)
class TargetFit:
    """What the running target is: its model, the settings that change a state's bytes, its room."""

    identity: ModelIdentity
    settings: Mapping[str, Scalar]
    n_ctx_seq: int
    n_vocab: int


def check_fit(running: TargetFit, facts: FileFacts | None, n_tokens: int, largest_token: int) -> None:
    """FileRefused, naming the field and both values.

    A file that states no identity (another server's) is judged by its tokens alone.
    """
    if facts is not None and facts.target.digest:
        if facts.target.digest != running.identity.digest:
            raise _refusal("model", _named(running.identity), _named(facts.target))
        for name, value in running.settings.items():
            if facts.settings.get(name) != value:
                raise _refusal(name, value, facts.settings.get(name))
    if n_tokens > running.n_ctx_seq:
        raise _refusal("n_ctx", f"at most {running.n_ctx_seq} tokens", f"{n_tokens} tokens")
    if largest_token >= running.n_vocab:
        raise _refusal("tokens", f"ids below {running.n_vocab}", largest_token)


def misfit(running: TargetFit, facts: FileFacts | None) -> str:
    """The same as text, "" where the file fits; for listings, which read no tokens."""
    try:
        check_fit(running, facts, facts.n_tokens if facts else 0, 0)
    except FileRefused as e:
        return str(e)
    return ""


def _named(identity: ModelIdentity) -> str:
    return f"{identity.name} ({identity.digest})"


_IN_WORDS = {"v_transposed": "v_transposed (set by flash attention, -fa)"}


def _refusal(field: str, running: object, stored: object) -> FileRefused:
    return FileRefused(
        f"the file does not fit this server: {_IN_WORDS.get(field, field)} is {stored} in the file and {running} here",
        field=field,
        expected=running,
        found=stored,
        slot="unchanged",
    )
