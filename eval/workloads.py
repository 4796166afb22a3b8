"""The five kinds of text that drafting is measured on."""

from __future__ import annotations

import json
from dataclasses import dataclass

from eval.client import Client, Message
from eval.models import CHAT_PROMPTS

WORKLOADS = ("chat", "rewrite", "story", "json", "code")


@dataclass(frozen=True, slots=True)
class Prompt:
    """`answer_start`, where there is one, is the beginning of the answer: a file that is being copied."""

    messages: tuple[Message, ...]
    answer_start: str = ""


def prompts(workload: str) -> list[Prompt]:
    if workload not in WORKLOADS:
        raise ValueError(f"{workload!r} is no workload; there are {', '.join(WORKLOADS)}")
    path = CHAT_PROMPTS.with_name(f"{workload}.jsonl")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [Prompt(tuple(record["messages"]), record.get("answer_start", "")) for record in records]


def tokens(prompt: Prompt, client: Client) -> list[int]:
    """As our server's template and vocabulary make them, so that every server is given the same tokens."""
    return client.tokenize(client.apply_template(prompt.messages) + prompt.answer_start)
