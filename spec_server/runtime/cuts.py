"""Where a text may be cut for the tokenizer without moving a token.

llama looks for special tokens by walking a list of all that it has found so far, so its time grows with their
square: a megabyte of them takes minutes. Pieces of few special tokens each take time by their length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

APART = 32  # runs of special tokens between two cuts
_LONGEST_RUN = 4096  # bytes; a longer one is not worth asking the tokenizer about
_SPACE = b" \t\n\v\f\r"


class Cutter:
    """Knows the special tokens of one vocabulary, by their texts.

    `begins_with` gives the first token of a text. `strips_left`: those that take the white space before them
    along; `eats_space`: some take it on one side or the other.
    """

    def __init__(
        self,
        specials: Mapping[int, bytes],
        begins_with: Callable[[bytes], int | None],
        strips_left: frozenset[int] = frozenset(),
        eats_space: bool = False,
        apart: int = APART,
    ) -> None:
        self._apart = apart
        self._specials = specials
        self._begins_with = begins_with
        self._strips_left = strips_left
        self._eats_space = eats_space
        texts = [text for text in specials.values() if text]
        self._pattern = re.compile(b"(?=(" + _any_of(texts) + b"))", re.DOTALL) if texts else None
        self._known: dict[bytes, bool] = {}

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """`data` in pieces that, tokenised one by one, have the tokens of the whole.

        A cut lies before a run of special tokens that touch or overlap. Nothing outside of a run has a say in how
        it is split, so asking the tokenizer about the run alone tells whether a special token stands at its start.
        """
        start = n_runs = 0
        for run_start, run_end in self._runs(data):
            n_runs += 1
            if n_runs > self._apart and run_start > start and self._is_cut(data[run_start:run_end]):
                yield data[start:run_start]
                start, n_runs = run_start, 0
        yield data[start:]

    def _runs(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Longest stretches that are covered by texts of special tokens overlapping each other."""
        if self._pattern is None:
            return
        start = end = -1
        for match in self._pattern.finditer(data):
            if match.start() >= end:
                if end >= 0:
                    yield start, end
                start = match.start()
            end = max(end, match.end(1))
        if end >= 0:
            yield start, end

    def _is_cut(self, run: bytes) -> bool:
        if len(run) > _LONGEST_RUN:
            return False
        if self._eats_space and (run[:1] in _SPACE or run[-1:] in _SPACE):
            return False  # a neighbour may take it
        is_cut = self._known.get(run)
        if is_cut is None:
            token = self._begins_with(run)
            is_cut = token in self._specials and token not in self._strips_left
            if is_cut:
                is_cut = run.startswith(self._specials[token])  # type: ignore[index]
            if len(self._known) < 1024:
                self._known[run] = is_cut
        return is_cut


def _any_of(texts: list[bytes]) -> bytes:
    """A pattern for the longest of `texts` at a place, in the form of a tree: there may be thousands."""
    branches: dict[int, list[bytes]] = {}
    for text in texts:
        if text:
            branches.setdefault(text[0], []).append(text[1:])
    alternatives = [re.escape(bytes([first])) + _any_of(rest) for first, rest in sorted(branches.items())]
    if not alternatives:
        return b""
    if len(alternatives) == 1 and b"" not in texts:
        return alternatives[0]  # groups inside groups are limited
    pattern = b"(?:" + b"|".join(alternatives) + b")"
    return pattern + b"?" if b"" in texts else pattern
