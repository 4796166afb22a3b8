"""A process that knows llama.cpp and nothing of this project: writes and reads sequence state files as a stock server.

    stock_child.py make MODEL FILE packed|plain < BATCHES    decode the batches, each a list of tokens, and save
    stock_child.py load MODEL FILE COPY                      load the whole file, save it again under COPY
Prints one JSON object: the tokens of the file, the bytes that llama says it handled, and the token that it picks next.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys

import llama_cpp.llama_cpp as lib

N_CTX = 2048


def open_context(path: str) -> tuple[object, object]:
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx = N_CTX
    params.n_batch = N_CTX
    params.n_seq_max = 1
    params.n_threads = params.n_threads_batch = 1
    return model, lib.llama_init_from_model(model, params)


def decode(context: object, tokens: list[int]) -> None:
    array = (ctypes.c_int * len(tokens))(*tokens)
    assert lib.llama_decode(context, lib.llama_batch_get_one(array, len(tokens))) == 0


def next_token(model: object, context: object) -> int:
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    row = lib.llama_get_logits_ith(context, -1)[:n_vocab]
    return max(range(n_vocab), key=row.__getitem__)


def packed(tokens: list[int]) -> list[int]:
    """llama-server's list: mark, version, count, tokens, number of media."""
    return [-1, 1, len(tokens), *tokens, 0]


def unpacked(words: list[int]) -> list[int]:
    return words[3 : 3 + words[2]] if words[:1] == [-1] else words


def save(context: object, path: str, words: list[int]) -> int:
    array = (ctypes.c_int * len(words))(*words)
    written: int = lib.llama_state_seq_save_file(context, path.encode(), 0, array, len(words))
    return written


def load(context: object, path: str) -> tuple[int, list[int]]:
    with open(path, "rb") as file:
        room = struct.unpack("<8xI", file.read(12))[0]
    array = (ctypes.c_int * room)()
    count = ctypes.c_size_t(0)
    n_read: int = lib.llama_state_seq_load_file(context, path.encode(), 0, array, room, ctypes.byref(count))
    return n_read, list(array[: count.value])


def main(command: str, model_path: str, path: str, last: str) -> dict[str, object]:
    model, context = open_context(model_path)
    if command == "make":
        tokens = []
        for batch in json.load(sys.stdin):
            decode(context, batch)
            tokens += batch
        words = packed(tokens) if last == "packed" else tokens
        return {"tokens": tokens, "bytes": save(context, path, words), "next": next_token(model, context)}
    n_read, words = load(context, path)
    tokens = unpacked(words)
    save(context, last, words)
    # The last token again, at the tip: what a loaded state is for.
    lib.llama_memory_seq_rm(lib.llama_get_memory(context), 0, len(tokens) - 1, -1)
    decode(context, tokens[-1:])
    return {"tokens": tokens, "bytes": n_read, "next": next_token(model, context)}


if __name__ == "__main__":
    result = main(*sys.argv[1:])
    # Past the interpreter's end, where the library's destructors may run in any order.
    print(json.dumps(result), flush=True)
    os._exit(0)
