"""Two-turn conversations, and the ways a slot can come to the second turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from eval.client import Client, Message, Turn
from eval.measure import Row

FOLLOW_UP = "Please go on, and give one example that was not named so far."
LIVE = "live"

Progress = Callable[[str, int], None]  # row, conversations done


class Session(Protocol):
    """A server to measure, and what may be done to it beside HTTP: an empty reason says that it may."""

    client: Client
    why_no_restart: str
    why_no_strip: str

    def restart(self) -> None:
        """A new process on the same slot files; `client` speaks to it afterwards."""

    def strip_draft(self, filename: str) -> str:
        """The name of a copy of that slot file without its draft block."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turn one is whatever the prompts file holds; turn two is always FOLLOW_UP."""

    index: int
    messages: tuple[Message, ...]

    def second(self, answer: str) -> list[Message]:
        # Exactly as it came: a changed answer breaks the prefix, and the server would be blamed for it.
        return [
            *self.messages,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": FOLLOW_UP},
        ]


def load(path: Path, n_prompts: int) -> list[Conversation]:
    """The first n_prompts conversations of a JSON Lines file; ValueError where it has fewer."""
    with path.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines if line.strip()]
    if len(records) < n_prompts:
        raise ValueError(f"{path} has {len(records)} conversations, {n_prompts} were asked for")
    return [
        Conversation(index, tuple(record["messages"])) for index, record in enumerate(records[:n_prompts])
    ]


@dataclass(slots=True)
class Acceptance:
    """The rows of the acceptance table, in the order of measurement.

    The live row comes first and is never saved: it is what the others are compared with.
    """

    session: Session
    conversations: Sequence[Conversation]
    max_tokens: int
    prefix: str  # of the names of slot files
    id_slot: int = 0
    progress: Progress = lambda row, done: None
    _live_answers: dict[int, str] = field(default_factory=dict)  # turn one by conversation
    _answers: dict[int, str] = field(default_factory=dict)  # the same of the pass that was saved

    def rows(self) -> Iterator[Row]:
        yield self._measure(LIVE, self._live)
        yield replace(self._measure("save, erase, restore", self._restored_in_process), note=self._note())
        yield self._restarted()
        yield self._without_draft()
        # Every restore must be better than none, else the rows above prove nothing.
        yield self._measure("erase, no restore", self._never_restored)

    def _measure(self, name: str, turn: Callable[[Conversation], Turn]) -> Row:
        turns = []
        for done, conversation in enumerate(self.conversations):
            self.progress(name, done)
            turns.append(turn(conversation))
        self.progress(name, len(turns))
        return Row(name, tuple(turns))

    def _live(self, conversation: Conversation) -> Turn:
        answer = self._first(conversation)
        self._live_answers[conversation.index] = answer
        return self._second(conversation, answer)

    def _restored_in_process(self, conversation: Conversation) -> Turn:
        answer = self._first(conversation)
        self._answers[conversation.index] = answer
        self.session.client.save(self.id_slot, self._filename(conversation))
        return self._after_restore(conversation, self._filename(conversation))

    def _note(self) -> str:
        differ = sum(self._answers[index] != answer for index, answer in self._live_answers.items())
        # Then turn two has another history, and its comparison says nothing about the restore.
        return f"turn one differed from the live one in {differ} conversations" if differ else ""

    def _restarted(self) -> Row:
        name = "save, restart, restore"
        if self.session.why_no_restart:
            return Row(name, skipped=self.session.why_no_restart)
        self.session.restart()
        return self._measure(name, lambda one: self._after_restore(one, self._filename(one)))

    def _without_draft(self) -> Row:
        name = "restore, draft dropped"
        if self.session.why_no_strip:
            return Row(name, skipped=self.session.why_no_strip)
        return self._measure(
            name, lambda one: self._after_restore(one, self.session.strip_draft(self._filename(one)))
        )

    def _never_restored(self, conversation: Conversation) -> Turn:
        self.session.client.erase(self.id_slot)
        return self._second(conversation, self._answers[conversation.index])

    def _after_restore(self, conversation: Conversation, filename: str) -> Turn:
        self.session.client.erase(self.id_slot)
        self.session.client.restore(self.id_slot, filename)
        return self._second(conversation, self._answers[conversation.index])

    def _first(self, conversation: Conversation) -> str:
        self.session.client.erase(self.id_slot)
        return self._chat(conversation.messages).text

    def _second(self, conversation: Conversation, answer: str) -> Turn:
        return self._chat(conversation.second(answer))

    def _chat(self, messages: Sequence[Message]) -> Turn:
        return self.session.client.chat(messages, max_tokens=self.max_tokens, id_slot=self.id_slot)

    def _filename(self, conversation: Conversation) -> str:
        return f"{self.prefix}-{conversation.index:03d}.bin"
