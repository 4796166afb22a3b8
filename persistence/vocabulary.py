"""Token id to text by the vocabulary in a GGUF's metadata, for people to look at; no llama library is needed.

Only the metadata is read. Control tokens show by name, bytes that are no UTF-8 as a replacement character.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from persistence.errors import SlotFileError

TOKENS_KEY = "tokenizer.ggml.tokens"
KIND_KEY = "tokenizer.ggml.model"
MAX_ITEMS = 1 << 22

# GGUF value types: fixed-size ones by number, then string and array.
_FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING = 8
_ARRAY = 9


class NoVocabulary(SlotFileError):
    """The file is no GGUF, or has no token list."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    pieces: Sequence[str]
    byte_level: bool  # GPT-2's way: each byte is written as one printable character

    def text(self, tokens: Iterable[int]) -> str:
        return b"".join(self.piece(token) for token in tokens).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        if not 0 <= token < len(self.pieces):
            return f"<{token}?>".encode()
        piece = self.pieces[token]
        if self.byte_level:
            return (
                bytes(_BYTES.get(char, 0x3F) for char in piece)
                if set(piece) <= _BYTES.keys()
                else piece.encode()
            )
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


def read_vocabulary(path: Path) -> Vocabulary:
    """Raises NoVocabulary."""
    try:
        with path.open("rb") as file:
            found = _read_metadata(file)
    except (OSError, struct.error, UnicodeDecodeError, KeyError) as error:
        raise NoVocabulary(f"{path.name}: no GGUF with a vocabulary ({error})") from error
    tokens, kind = found.get(TOKENS_KEY), found.get(KIND_KEY)
    if not isinstance(tokens, list) or not isinstance(kind, str):
        raise NoVocabulary(f"{path.name}: no vocabulary in its metadata")
    return Vocabulary(tokens, byte_level=kind == "gpt2")


def _read_metadata(file: BinaryIO) -> dict[str, object]:
    magic, _version, _n_tensors, n_values = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF":
        raise NoVocabulary(f"it begins with {magic!r}, not with b'GGUF'")
    found: dict[str, object] = {}
    for _ in range(min(n_values, MAX_ITEMS)):
        key = _read_string(file)
        (kind,) = struct.unpack("<I", file.read(4))
        if kind == _ARRAY:
            found[key] = _read_array(file, keep=key == TOKENS_KEY)
        elif kind == _STRING:
            found[key] = _read_string(file)
        else:
            file.seek(_FIXED[kind], 1)
        if TOKENS_KEY in found and KIND_KEY in found:
            break
    return found


def _read_array(file: BinaryIO, *, keep: bool) -> list[str] | None:
    kind, n = struct.unpack("<IQ", file.read(12))
    if kind in _FIXED:
        file.seek(_FIXED[kind] * n, 1)
        return None
    if kind != _STRING or n > MAX_ITEMS:
        raise KeyError(f"an array of {n} values of type {kind}")
    items = [_read_string(file) for _ in range(n)]
    return items if keep else None


def _read_string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    data = file.read(min(length, 1 << 24))
    if len(data) != length:
        raise KeyError("a string past the end")
    return data.decode("utf-8", "replace")


def _byte_characters() -> dict[str, int]:
    # Printable Latin-1 characters stand for themselves, all other bytes for characters from 256 on, in order.
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {chr(byte): byte for byte in plain}
    rest = [byte for byte in range(256) if byte not in set(plain)]
    characters.update({chr(256 + n): byte for n, byte in enumerate(rest)})
    return characters


_BYTES = _byte_characters()
