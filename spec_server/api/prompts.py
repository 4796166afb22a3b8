"""Prompts to tokens: text, token lists and mixtures of both, and the prefixes worth a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeGuard, cast

from spec_server.api.offload import offload
from spec_server.engine.base import Engine
from spec_server.engine.errors import InvalidRequest

# Below this a thread costs more than the event loop loses by tokenising itself (about 1 ms).
LONG_TEXT = 8192


async def tokenize(
    engine: Engine, text: str, *, add_special: bool, parse_special: bool = True, is_prompt: bool = True
) -> list[int]:
    """ContextExceeded: it `is_prompt`, and far longer than a slot."""
    work = partial(
        engine.tokenize, text, add_special=add_special, parse_special=parse_special, is_prompt=is_prompt
    )
    return work() if len(text) < LONG_TEXT else await offload.run(work)


async def tokenize_rendered(engine: Engine, text: str) -> list[int]:
    """A template that wrote the begin token itself must not get a second one."""
    return await tokenize(engine, text, add_special=not _begins(engine, text))


def _begins(engine: Engine, text: str) -> bool:
    bos = engine.model.bos_token
    return bool(bos) and text.startswith(bos)


async def prompt_tokens(
    engine: Engine,
    prompt: str | list[object],
    *,
    add_special: bool = True,
    parse_special: bool = True,
    param: str = "prompt",
    is_prompt: bool = True,
) -> list[int]:
    """llama-server's forms: a string, token ids, a list that mixes both, or a list of one such prompt."""
    convert = partial(tokenize, engine, parse_special=parse_special, is_prompt=is_prompt)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        add_special = add_special and not _begins(engine, prompt)
        return await convert(prompt, add_special=add_special)
    if any(isinstance(item, list) for item in prompt) or (
        len(prompt) > 1 and all(isinstance(item, str) for item in prompt)
    ):
        raise InvalidRequest(f"{param}: one prompt a request; several were given", param=param)
    n_vocab = engine.model.n_vocab
    if _are_token_ids(prompt, n_vocab):
        return prompt
    tokens: list[int] = []
    for index, item in enumerate(prompt):
        if isinstance(item, str):
            is_first = add_special and index == 0 and not _begins(engine, item)
            tokens += await convert(item, add_special=is_first)
        else:
            tokens.append(token_id(item, n_vocab, f"{param}[{index}]"))
    return tokens


def _are_token_ids(prompt: list[object], n_vocab: int) -> TypeGuard[list[int]]:
    """A quick look: one by one each would be checked ten times as long."""
    if not all([type(item) is int for item in prompt]):
        return False
    ids = cast("list[int]", prompt)
    return not ids or 0 <= min(ids) <= max(ids) < n_vocab


def token_id(item: object, n_vocab: int, param: str) -> int:
    if not isinstance(item, int) or isinstance(item, bool):
        raise InvalidRequest(f"{param}: neither text nor a token id", param=param)
    if not 0 <= item < n_vocab:
        raise InvalidRequest(f"{param}: token id {item} is not in 0..{n_vocab - 1}", param=param)
    return item


def n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(index for index in range(shorter) if a[index] != b[index])
