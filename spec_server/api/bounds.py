"""Lists that are too long to make sense, refused by their length alone, before each of their items is looked at."""

from __future__ import annotations

from collections.abc import Mapping

from spec_server.engine.base import Engine
from spec_server.engine.errors import ContextExceeded, InvalidRequest

MOST_TOKENS = 1 << 20  # in a list for /tokenize or /detokenize, which no context bounds


def check_generation(data: Mapping[str, object], engine: Engine) -> None:
    bias, n_vocab = data.get("logit_bias"), engine.model.n_vocab
    if isinstance(bias, dict | list) and len(bias) > n_vocab:
        message = f"logit_bias: {len(bias)} entries, more than the vocabulary has tokens, {n_vocab}"
        raise InvalidRequest(message, param="logit_bias")
    prompt, n_ctx = data.get("prompt"), engine.model.n_ctx_seq
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if isinstance(prompt, list) and len(prompt) > n_ctx and isinstance(prompt[0], int):
        message = f"the prompt has {len(prompt)} tokens, the context of a slot is {n_ctx}"
        raise ContextExceeded(message, n_prompt_tokens=len(prompt), n_ctx=n_ctx)


def check_tokens(data: Mapping[str, object]) -> None:
    for name in ("content", "tokens"):
        given = data.get(name)
        if isinstance(given, list) and len(given) > MOST_TOKENS:
            raise InvalidRequest(f"{name}: {len(given)} tokens, more than {MOST_TOKENS}", param=name)
