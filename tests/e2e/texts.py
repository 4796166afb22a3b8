"""Prompts as token lists: conversations of the measurement set, their follow-ups, and lengths made to measure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from eval.models import CHAT_PROMPTS
from tests.e2e.served import Answer, Served

FOLLOW_UP = (
    "<|im_end|>\n<|im_start|>user\nTell me more about the second point, please."
    "<|im_end|>\n<|im_start|>assistant\n"
)
OTHER_TURN = (
    " No, wait.<|im_end|>\n<|im_start|>user\nSay it in other words.<|im_end|>\n<|im_start|>assistant\n"
)


def conversations(n: int) -> list[list[dict[str, str]]]:
    lines = CHAT_PROMPTS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines[:n]]


def chat_prompts(server: Served, n: int) -> list[list[int]]:
    return [server.chat_tokens(messages) for messages in conversations(n)]


def prompt_of(server: Served, n_tokens: int, skip: int = 0) -> list[int]:
    """Exactly n_tokens of running text."""
    text = " ".join(message["content"] for messages in conversations(60)[skip:] for message in messages)
    tokens = server.tokens(text)
    assert len(tokens) >= n_tokens
    return tokens[:n_tokens]


def straight(server: Served, first: Answer) -> list[int]:
    """The next turn: everything so far, then a user's message."""
    return [*first.prompt, *first.tokens, *server.tokens(FOLLOW_UP)]


def divergent(server: Served, first: Answer) -> list[int]:
    """Another turn out of the middle of the first answer."""
    return [*first.prompt, *first.tokens[: len(first.tokens) // 2], *server.tokens(OTHER_TURN)]


def again(server: Served, first: Answer) -> list[int]:
    """The first prompt once more, as a user who wants another answer sends it."""
    return list(first.prompt)


FOLLOW_UPS = {"straight": straight, "divergent": divergent, "again": again}


def common(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
