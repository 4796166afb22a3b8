"""The n-grams of one text and where each was last followed by something; knows neither slots nor drafts.

Appending and cutting cost the same few steps per token, and a cut undoes exactly what the tokens had added: the index
is a function of the text that it holds, whatever was appended and cut before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

# Polynomial hash of the last n tokens, modulo a Mersenne prime. Fixed: stored hashes must mean the same everywhere.
_PRIME = (1 << 61) - 1
_BASE = 0x1C3F_A7D9_4E6B_2585 % _PRIME
KEY_BITS = 61


class TextIndex:
    """A text, and for every n-gram in it that has a follower the end of its latest occurrence."""

    __slots__ = ("_before", "_drop", "_latest", "keys", "n", "tokens")

    def __init__(self, n: int) -> None:
        self.n = n
        self.tokens = array("i")
        self.keys = array("Q")  # hash of the n-gram that ends at i; of fewer tokens where i < n - 1
        self._before = array("i")  # the latest occurrence before that of the n-gram ending at i, -1: none
        self._latest: dict[int, int] = {}
        self._drop = pow(_BASE, n, _PRIME)  # what the token that leaves the window has been multiplied by

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        tokens, keys, n = self.tokens, self.keys, self.n
        i = len(tokens)
        if i >= n:  # the n-gram that ends at i - 1 has a follower now
            key = keys[i - 1]
            self._before.append(self._latest.get(key, -1))
            self._latest[key] = i - 1
        elif i:
            self._before.append(-1)
        tokens.append(token)
        keys.append(self.roll(keys[i - 1] if i else 0, token, tokens[i - n] if i >= n else -1))

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def cut(self, n_tokens: int) -> None:
        """Keep the first n_tokens."""
        tokens, keys, before, latest = self.tokens, self.keys, self._before, self._latest
        while len(tokens) > n_tokens:
            tokens.pop()
            keys.pop()
            if not before:
                continue
            i, earlier = len(tokens) - 1, before.pop()  # the n-gram that ends at i has lost its follower
            if i < self.n - 1:
                continue
            if earlier < 0:
                latest.pop(keys[i], None)
            else:
                latest[keys[i]] = earlier

    def roll(self, key: int, token: int, leaving: int) -> int:
        """The key of the window one token further; `leaving` is the token that falls out of it, -1: none."""
        return (key * _BASE + token + 1 - (leaving + 1) * self._drop) % _PRIME

    def latest(self, key: int) -> int:
        """The end of the latest n-gram of that key that has a follower, -1: there is none. Hashes may collide."""
        return self._latest.get(key, -1)

    def may_recur(self, token: int) -> bool:
        """Could the text's last tokens, with that one behind them, have stood before? Hashes may collide."""
        tokens, n = self.tokens, self.n
        i = len(tokens)
        if i + 1 < n:
            return False
        before = self.keys[-1] if i else -1
        key = self.roll(max(before, 0), token, tokens[i - n] if i >= n else -1)
        return key == before or key in self._latest

    def occurrences(self) -> Iterator[int]:
        """Ends of the earlier occurrences of the text's last n tokens, latest first."""
        tokens, n = self.tokens, self.n
        if len(tokens) < n:
            return
        tail = tokens[-n:]
        at = self.latest(self.keys[-1])
        while at >= 0:
            if tokens[at + 1 - n : at + 1] == tail:
                yield at
            at = self._before[at]

    def match_length(self, end: int, most: int) -> int:
        """How many of the text's last tokens also stand right up to `end`, at most `most`."""
        tokens = self.tokens
        last = len(tokens) - 1
        most = min(most, end + 1)
        i = self.n
        while i < most and tokens[end - i] == tokens[last - i]:
            i += 1
        return i
