"""Tokens to text: half UTF-8 characters and possible stop strings are held back; knows no tokens' meaning."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Feed it token pieces; it gives out text that is certain to stand."""

    __slots__ = ("_decoder", "_held", "_is_split", "_longest", "_out", "_stop", "stopping_word")

    def __init__(self, stop: Sequence[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_split = False  # does a character wait for its other half?
        self._stop = tuple(s for s in stop if s)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self._out: list[str] = []
        self.stopping_word = ""

    @property
    def may_stop(self) -> bool:
        """Does every token have to be looked at as it comes?"""
        return bool(self._stop)

    def push(self, piece: bytes) -> bool:
        """Add one token's bytes. True where a stop string is complete: what stands behind it is gone."""
        if not self._is_split and piece.isascii():
            text = piece.decode("ascii")  # a third of what the decoder takes
        else:
            text = self._decoder.decode(piece)
            self._is_split = bool(self._decoder.getstate()[0])
        if not self._stop:
            self._out.append(text)
            return False
        self._held += text
        found = self._find_stop()
        if found >= 0:
            self._out.append(self._held[:found])
            self._held = ""
            return True
        keep = self._partial_stop()
        if keep < len(self._held):
            self._out.append(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
        return False

    def take(self) -> str:
        """The text that became certain since the last call."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def flush(self) -> None:
        """The end without a stop string: what was held stands; half a character is dropped."""
        self._out.append(self._held)
        self._held = ""

    def _find_stop(self) -> int:
        """Where the earliest complete stop string begins, the longest of those; -1 where there is none."""
        best = -1
        for word in self._stop:
            at = self._held.find(word)
            if at >= 0 and (best < 0 or at < best or (at == best and len(word) > len(self.stopping_word))):
                best, self.stopping_word = at, word
        return best

    def _partial_stop(self) -> int:
        """The length of the longest tail that could begin a stop string."""
        for n in range(min(len(self._held), self._longest - 1), 0, -1):
            tail = self._held[-n:]
            if any(word.startswith(tail) for word in self._stop):
                return n
        return 0
