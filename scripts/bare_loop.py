"""The library without a server: prompt tokens in, one llama_decode and one argmax per token, times out.

Reads lines of JSON, {"tokens": [...], "n": N}, and answers each with {"seconds": S, "arrivals_s": [...]}. The
clock starts before the prompt's last token is decoded; what stands before that token is read earlier.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as llama


class BareLoop:
    def __init__(self, args: argparse.Namespace) -> None:
        llama.llama_backend_init()
        model_params = llama.llama_model_default_params()
        if args.n_gpu_layers is not None:
            model_params.n_gpu_layers = args.n_gpu_layers
        model = llama.llama_model_load_from_file(args.model.encode(), model_params)
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = args.ctx_size, 2048, 512, 1
        params.n_threads = params.n_threads_batch = args.threads
        self._context: Any = llama.llama_init_from_model(model, params) if model else None
        if not self._context:
            raise SystemExit(f"cannot load {args.model}")
        self._memory = llama.llama_get_memory(self._context)
        self._n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._batch = llama.llama_batch_init(params.n_batch, 0, 1)
        self._n_batch = int(params.n_batch)

    def generate(self, prompt: Sequence[int], n_tokens: int) -> dict[str, object]:
        llama.llama_memory_seq_rm(self._memory, 0, -1, -1)
        position = len(prompt) - 1
        for start in range(0, position, self._n_batch):
            self._decode(prompt[start : min(start + self._n_batch, position)], start)
        llama.llama_synchronize(self._context)
        arrivals: list[float] = []
        token = prompt[-1]
        began = time.perf_counter()
        for _ in range(n_tokens):
            self._decode([token], position)
            position += 1
            # The logits' address stays what it is only until the next decode.
            row = llama.llama_get_logits_ith(self._context, -1)
            token = int(np.ctypeslib.as_array(row, shape=(self._n_vocab,)).argmax())
            arrivals.append(time.perf_counter() - began)
        return {"seconds": arrivals[-1], "arrivals_s": arrivals}

    def _decode(self, tokens: Sequence[int], position: int) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = index == len(tokens) - 1
        if status := llama.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode: {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("-ngl", "--n-gpu-layers", type=int)
    args = parser.parse_args()
    silent = llama.llama_log_callback(lambda _level, _text, _data: None)
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    loop = BareLoop(args)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(loop.generate(question["tokens"], question["n"])), flush=True)


if __name__ == "__main__":
    main()
