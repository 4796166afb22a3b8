"""Model: weights and vocabulary, loaded once and shared by contexts; tokens to bytes and back."""

from __future__ import annotations

import ctypes
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from spec_server.runtime import gguf, logs
from spec_server.runtime._native import lib
from spec_server.runtime.cuts import Cutter
from spec_server.runtime.errors import LlamaError, ModelError, TooManyTokens

# llama-server's rules for a draft model's vocabulary (common/speculative.cpp)
MAX_VOCAB_DIFFERENCE = 128
FIRST_COMPARED_TOKEN = 5

# How weights come into memory, in llama-server's words
LOAD_MODES: dict[str, int] = {
    "auto": lib.LLAMA_LOAD_MODE_AUTO,
    "none": lib.LLAMA_LOAD_MODE_NONE,
    "mmap": lib.LLAMA_LOAD_MODE_MMAP,
    "mlock": lib.LLAMA_LOAD_MODE_MLOCK,
    "mmap+mlock": lib.LLAMA_LOAD_MODE_MMAP_MLOCK,
    "dio": lib.LLAMA_LOAD_MODE_DIRECT_IO,
}

_SHORT = 4096  # bytes: not worth cutting
_STRIPS = lib.LLAMA_TOKEN_ATTR_LSTRIP | lib.LLAMA_TOKEN_ATTR_RSTRIP


def goes_to_gpu(n_gpu_layers: int) -> bool:
    """Whether a model loaded with so many layers on the GPU has any there."""
    return n_gpu_layers != 0 and bool(lib.llama_supports_gpu_offload())


class Model:
    """A loaded GGUF. Freed by `close`, or with the last context that stands on it, whichever is later.

    ModelError: no such file, not readable, no GGUF, or refused by llama; the message says which.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = -1,
        load_mtp: bool = False,
        load_mode: str = "auto",
        vocab_only: bool = False,
    ) -> None:
        self._model: Any = None
        self._n_users = 1  # this object, and one for each open context
        self._closed = False
        self.path = Path(path)
        gguf.check_readable(self.path)
        params = lib.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        self.is_offloaded = goes_to_gpu(n_gpu_layers)
        params.load_mtp = load_mtp
        params.vocab_only = vocab_only
        params.load_mode = LOAD_MODES[load_mode]
        logs.joiner.take_errors()
        self._model = lib.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self._model:
            raise ModelError(
                f"llama cannot load {self.path}: {logs.joiner.take_errors() or 'no reason given'}"
            )
        self._vocab: Any = lib.llama_model_get_vocab(self._model)
        self.has_mtp = load_mtp and self.n_nextn > 0
        self._read_facts()

    def _read_facts(self) -> None:
        model, vocab = self._model, self._vocab
        self.n_vocab: int = lib.llama_vocab_n_tokens(vocab)
        self.vocab_type: int = lib.llama_vocab_type(vocab)
        self.n_embd: int = lib.llama_model_n_embd(model)
        self.n_embd_out: int = lib.llama_model_n_embd_out(model)  # width of logits input and of hidden rows
        self.n_layer: int = lib.llama_model_n_layer(model)
        self.n_ctx_train: int = lib.llama_model_n_ctx_train(model)
        self.n_params: int = lib.llama_model_n_params(model)
        self.size: int = lib.llama_model_size(model)  # bytes
        self.n_swa: int = lib.llama_model_n_swa(model)  # 0: no sliding window
        self.is_recurrent: bool = lib.llama_model_is_recurrent(model)
        self.is_hybrid: bool = lib.llama_model_is_hybrid(model)
        self.add_bos: bool = lib.llama_vocab_get_add_bos(vocab)
        self.add_eos: bool = lib.llama_vocab_get_add_eos(vocab)
        self.bos: int = lib.llama_vocab_bos(vocab)  # -1 where there is none, as below
        self.eos: int = lib.llama_vocab_eos(vocab)
        self._pieces: dict[bool, list[bytes | None]] = {s: [None] * self.n_vocab for s in (False, True)}

    # -- metadata

    def meta(self, key: str) -> str | None:
        """A metadata value as text; None where the file has no such key (arrays have no text form)."""
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = lib.llama_model_meta_val_str(self._model, key.encode(), buffer, size)
            if length < 0:
                return None
            if length < size:
                return buffer.value.decode("utf-8", "replace")
            size = length + 1

    @cached_property
    def arch(self) -> str:
        return self.meta("general.architecture") or ""

    @cached_property
    def desc(self) -> str:
        """llama's one-line description, such as "llama 135M Q4_1"."""
        buffer = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self._model, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @cached_property
    def n_nextn(self) -> int:
        """Layers of the MTP head that the file holds, loaded or not."""
        return int(self.meta(f"{self.arch}.nextn_predict_layers") or 0)

    @cached_property
    def has_cell_ext(self) -> bool:
        """Whether cells in a state carry a wider record (M-RoPE positions, or n-gram hashes of tokens)."""
        wide = (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE, lib.LLAMA_ROPE_TYPE_VISION)
        return lib.llama_model_rope_type(self._model) in wide or self.arch == "qwen4exp"

    def chat_template(self) -> str | None:
        """The model's own jinja template; None where it has none."""
        text = lib.llama_model_chat_template(self._model, None)
        return None if text is None else text.decode("utf-8", "replace")

    @cached_property
    def _identity(self) -> tuple[str, str]:
        return self.path.name, gguf.digest(self.path)

    def identity(self) -> tuple[str, str]:
        """(file name, digest): two files with one digest hold the same weights, wherever they lie."""
        return self._identity

    # -- vocabulary

    def tokenize(
        self,
        text: str | bytes,
        add_special: bool = True,
        parse_special: bool = True,
        at_most: int | None = None,
    ) -> list[int]:
        """Token ids of `text`. Lone surrogates become question marks.

        TooManyTokens: `at_most` were passed before the end; the rest was not looked at.
        """
        data = text.encode("utf-8", "replace") if isinstance(text, str) else text
        if len(data) <= _SHORT:
            return self._tokenize(data, add_special, parse_special)
        if at_most is not None and self.fewest_tokens(data) > at_most:
            raise TooManyTokens(self.fewest_tokens(data))
        ends = self._tokenize(b"", add_special, parse_special)
        tokens = ends[: self.add_bos]
        n_bytes = 0
        for piece in self._cutters[parse_special].pieces(data):
            n_bytes += len(piece)
            tokens += self._tokenize(piece, False, parse_special)
            if at_most is not None and len(tokens) > at_most and n_bytes < len(data):
                raise TooManyTokens(len(tokens))
        return tokens + ends[self.add_bos :]

    def _tokenize(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        room = len(data) + 8
        while True:
            buffer = np.empty(room, np.int32)
            n = lib.llama_tokenize(
                self._vocab,
                data,
                len(data),
                ctypes.cast(buffer.ctypes.data, ctypes.POINTER(ctypes.c_int32)),
                room,
                add_special,
                parse_special,
            )
            if n >= 0:
                tokens: list[int] = buffer[:n].tolist()
                return tokens
            if -n <= room:  # INT32_MIN, more than it can count
                raise LlamaError(f"llama cannot tokenize {len(data)} bytes")
            room = -n

    def fewest_tokens(self, data: bytes) -> int:
        """A number of tokens that `data` surely has, without looking for them: by the longest piece.

        0 where the vocabulary's tokenizer rewrites the text first.
        """
        if self.vocab_type not in (lib.LLAMA_VOCAB_TYPE_SPM, lib.LLAMA_VOCAB_TYPE_BPE):
            return 0
        longest, lost = self._reach
        return -(-len(data.translate(None, lost)) // longest)

    @cached_property
    def _reach(self) -> tuple[int, bytes]:
        """(bytes of the longest piece, bytes that may vanish: those that no token stands for, and white space
        where a special token takes it along)."""
        pieces = [self.piece(token, special=True) for token in range(self.n_vocab)]
        single = {piece[0] for piece in pieces if len(piece) == 1}
        lost = {byte for byte in range(256) if byte not in single}
        if self._attributes_any(_STRIPS):
            lost |= set(b" \t\n\v\f\r")
        # one unknown token may stand for a character of four bytes
        return max(4, *(len(piece) for piece in pieces)), bytes(sorted(lost))

    @cached_property
    def _attributes(self) -> list[int]:
        return [lib.llama_vocab_get_attr(self._vocab, token) for token in range(self.n_vocab)]

    def _attributes_any(self, mask: int) -> bool:
        return any(attributes & mask for attributes in self._attributes)

    @cached_property
    def _cutters(self) -> dict[bool, Cutter]:
        """By parse_special: without it only the user's own special tokens are looked for in a text."""
        user = lib.LLAMA_TOKEN_ATTR_USER_DEFINED
        control = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
        return {False: self._cutter(user, but=control), True: self._cutter(user | control, but=0)}

    def _cutter(self, mask: int, but: int) -> Cutter:
        specials = {
            token: lib.llama_vocab_get_text(self._vocab, token)
            for token, attributes in enumerate(self._attributes)
            if attributes & mask and not attributes & but
        }
        return Cutter(
            specials,
            lambda run: next(iter(self._tokenize(run, False, not but)), None),
            frozenset(t for t in specials if self._attributes[t] & lib.LLAMA_TOKEN_ATTR_LSTRIP),
            self._attributes_any(_STRIPS),
        )

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of `token`; special tokens give b"" unless asked for. IndexError: no such token."""
        if token < 0:
            raise IndexError(token)
        pieces = self._pieces[special]
        piece = pieces[token]
        if piece is None:
            piece = pieces[token] = self._render(token, special)
        return piece

    def _render(self, token: int, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n: int = lib.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def detokenize(self, tokens: list[int], special: bool = False) -> bytes:
        """The pieces of `tokens` in a row: what a stream of them would have sent."""
        return b"".join([self.piece(token, special) for token in tokens])

    def is_eog(self, token: int) -> bool:
        """Whether `token` ends a generation."""
        return token in self.eog

    @cached_property
    def eog(self) -> frozenset[int]:
        """Every token that ends a generation."""
        return frozenset(t for t in range(self.n_vocab) if lib.llama_vocab_is_eog(self._vocab, t))

    @cached_property
    def suppressed(self) -> tuple[int, ...]:
        """Tokens that the model file says must never come out; llama-server biases them with -inf."""
        n = ctypes.c_int32(0)
        tokens = lib.llama_vocab_get_suppress_tokens(self._vocab, ctypes.byref(n))
        return tuple(tokens[i] for i in range(n.value))

    @cached_property
    def bos_text(self) -> str:
        return self._special_text(self.bos)

    @cached_property
    def eos_text(self) -> str:
        return self._special_text(self.eos)

    def _special_text(self, token: int) -> str:
        return "" if token < 0 else self.piece(token, special=True).decode("utf-8", "replace")

    @cached_property
    def _texts(self) -> list[bytes]:
        text, vocab = lib.llama_vocab_get_text, self._vocab
        return [text(vocab, token) for token in range(self.n_vocab)]

    def vocab_mismatch(self, draft: Model) -> str | None:
        """None if `draft` may draft for this model, else the first thing in which the vocabularies differ."""
        if self.vocab_type != draft.vocab_type:
            return f"vocabulary type: target {self.vocab_type}, draft {draft.vocab_type}"
        for name, ours, theirs in (
            ("add_bos", self.add_bos, draft.add_bos),
            ("bos token", self.add_bos and self.bos, draft.add_bos and draft.bos),
            ("add_eos", self.add_eos, draft.add_eos),
            ("eos token", self.add_eos and self.eos, draft.add_eos and draft.eos),
        ):
            if ours != theirs:
                return f"{name}: target {ours}, draft {theirs}"
        if abs(self.n_vocab - draft.n_vocab) > MAX_VOCAB_DIFFERENCE:
            return (
                f"vocabulary size: target {self.n_vocab}, draft {draft.n_vocab}, "
                f"more than {MAX_VOCAB_DIFFERENCE} apart"
            )
        n = min(self.n_vocab, draft.n_vocab)
        ours_texts, their_texts = self._texts[:n], draft._texts[:n]
        if ours_texts[FIRST_COMPARED_TOKEN:] == their_texts[FIRST_COMPARED_TOKEN:]:
            return None
        token = next(i for i in range(FIRST_COMPARED_TOKEN, n) if ours_texts[i] != their_texts[i])
        return f"token {token}: target {self._quoted(token)}, draft {draft._quoted(token)}"

    def _quoted(self, token: int) -> str:
        return repr(self.piece(token, special=True).decode("utf-8", "replace"))

    # -- life

    def _acquire(self) -> Any:
        """The native model, for a context that will call _release once."""
        if self._closed:
            raise LlamaError("the model is closed")
        self._n_users += 1
        return self._model

    def _release(self) -> None:
        self._n_users -= 1
        if self._n_users == 0 and self._model:
            lib.llama_model_free(self._model)
            self._model = self._vocab = None

    def close(self) -> None:
        """Free it once no context stands on it any more. May be called twice."""
        if not self._closed:
            self._closed = True
            self._release()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_model", None) is not None:
            self.close()
