"""Rows of turns, and what they come to; pure arithmetic, no server."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from eval.client import Turn


@dataclass(frozen=True, slots=True)
class Row:
    """One way to reach turn two: a turn per conversation, or the reason why there are none."""

    name: str
    turns: tuple[Turn, ...] = ()
    skipped: str = ""
    note: str = ""  # what a reader must know before comparing


@dataclass(frozen=True, slots=True)
class Summary:
    """A row added up. `n_equal_*` count the conversations that equal the live row's."""

    n_turns: int
    prompt_n: int
    cache_n: int
    predicted_n: int
    draft_n: int
    draft_n_accepted: int
    draft_prompt_n: int
    acceptance_rate: float | None  # None where nothing was drafted
    first_token_ms: float  # median
    n_equal_counts: int
    n_equal_texts: int


def counts(turn: Turn) -> tuple[int, ...]:
    """What a restore must not move.

    With the tokens that the drafter read again: a server that feeds it the whole conversation has restored
    nothing, however well it drafts then.
    """
    return turn.prompt_n, turn.cache_n, turn.draft_n, turn.draft_n_accepted, turn.draft_prompt_n


def summarise(turns: Sequence[Turn], live: Sequence[Turn]) -> Summary:
    """ValueError where the rows are of unlike length or empty: then nothing can be compared."""
    if not turns:
        raise ValueError("a row without turns has no summary")
    pairs = list(zip(turns, live, strict=True))
    draft_n = sum(turn.draft_n for turn in turns)
    accepted = sum(turn.draft_n_accepted for turn in turns)
    return Summary(
        n_turns=len(turns),
        prompt_n=sum(turn.prompt_n for turn in turns),
        cache_n=sum(turn.cache_n for turn in turns),
        predicted_n=sum(turn.predicted_n for turn in turns),
        draft_n=draft_n,
        draft_n_accepted=accepted,
        draft_prompt_n=sum(turn.draft_prompt_n for turn in turns),
        acceptance_rate=accepted / draft_n if draft_n else None,
        first_token_ms=statistics.median(turn.first_token_ms for turn in turns),
        n_equal_counts=sum(counts(turn) == counts(other) for turn, other in pairs),
        n_equal_texts=sum(turn.text == other.text for turn, other in pairs),
    )
