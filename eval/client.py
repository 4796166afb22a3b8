"""One client for llama-server's wire form: streamed turns with their timings, and slot files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

Message = Mapping[str, str]


class ServerError(Exception):
    """The server answered with an error, or ended a stream without its timings."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer. Counts are the server's; first_token_ms is measured here, from sending to first text."""

    text: str
    prompt_n: int
    cache_n: int
    predicted_n: int
    draft_n: int
    draft_n_accepted: int
    draft_prompt_n: int  # tokens that the drafter read again; 0 where the server does not say
    prompt_ms: float
    predicted_ms: float
    first_token_ms: float


class Client:
    """Blocking, one request at a time; each method is one request."""

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout_s: float = 300.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        id_slot: int = 0,
        options: Mapping[str, object] | None = None,
    ) -> Turn:
        """A turn of /v1/chat/completions. `options` are further fields of the request body."""
        body: dict[str, object] = {
            "messages": [dict(message) for message in messages],
            "max_tokens": max_tokens,
            "stream_options": {"include_usage": True},
        }
        return self._stream("/v1/chat/completions", body, id_slot, options, _chat_text)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        id_slot: int = 0,
        options: Mapping[str, object] | None = None,
    ) -> Turn:
        """A turn of /completion."""
        body: dict[str, object] = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "n_predict": max_tokens,
        }
        return self._stream("/completion", body, id_slot, options, _completion_text)

    def sample(
        self, prompt: Sequence[int], *, max_tokens: int, options: Mapping[str, object]
    ) -> tuple[list[int], Mapping[str, Any]]:
        """The tokens of one answer of /completion, and its timings; not streamed, and nothing ends it early."""
        body = {"prompt": list(prompt), "n_predict": max_tokens, "return_tokens": True, "ignore_eos": True}
        answer = self._ask("/completion", body | dict(options))
        return [int(token) for token in answer["tokens"]], answer["timings"]

    def save(self, id_slot: int, filename: str) -> dict[str, Any]:
        return self._slot(id_slot, "save", {"filename": filename})

    def restore(self, id_slot: int, filename: str) -> dict[str, Any]:
        return self._slot(id_slot, "restore", {"filename": filename})

    def erase(self, id_slot: int) -> dict[str, Any]:
        return self._slot(id_slot, "erase", {})

    def props(self) -> dict[str, Any]:
        return _body(self._http.get("/props"))

    def apply_template(self, messages: Sequence[Message]) -> str:
        return str(
            self._ask("/apply-template", {"messages": [dict(message) for message in messages]})["prompt"]
        )

    def tokenize(self, text: str) -> list[int]:
        """A prompt that came out of a template: its special tokens are tokens, and none is added."""
        body = {"content": text, "add_special": False, "parse_special": True}
        return [int(token) for token in self._ask("/tokenize", body)["tokens"]]

    def metrics(self) -> dict[str, float]:
        """Values by metric name, labels included as they are written."""
        response = self._http.get("/metrics")
        if response.is_error:
            _body(response)
        lines = (line for line in response.text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def _ask(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        return _body(self._http.post(path, json=body))

    def _slot(self, id_slot: int, action: str, body: Mapping[str, object]) -> dict[str, Any]:
        return _body(self._http.post(f"/slots/{id_slot}", params={"action": action}, json=body))

    def _stream(
        self,
        path: str,
        body: dict[str, object],
        id_slot: int,
        options: Mapping[str, object] | None,
        text_of: Callable[[Mapping[str, Any]], str],
    ) -> Turn:
        body |= {"stream": True, "temperature": 0.0, "id_slot": id_slot, "cache_prompt": True}
        body |= options or {}
        sent = time.perf_counter()
        first_token_ms = 0.0
        pieces: list[str] = []
        timings: Mapping[str, Any] | None = None
        with self._http.stream("POST", path, json=body) as response:
            if response.is_error:
                response.read()
                _body(response)
            for event in _events(_lines(response.iter_bytes())):
                # Looked at first: some servers send an error inside a stream that began well.
                if "error" in event:
                    raise ServerError(_message(event))
                if text := text_of(event):
                    if not pieces:
                        first_token_ms = (time.perf_counter() - sent) * 1000
                    pieces.append(text)
                # The last chunk counts; earlier ones may carry timings of the moment.
                timings = event.get("timings") or timings
        if timings is None:
            raise ServerError(f"{path}: the stream ended without timings")
        return _turn("".join(pieces), timings, first_token_ms)


def _chat_text(event: Mapping[str, Any]) -> str:
    return "".join(choice.get("delta", {}).get("content") or "" for choice in event.get("choices", []))


def _completion_text(event: Mapping[str, Any]) -> str:
    return str(event.get("content") or "")


def _turn(text: str, timings: Mapping[str, Any], first_token_ms: float) -> Turn:
    return Turn(
        text=text,
        prompt_n=int(timings["prompt_n"]),
        cache_n=int(timings["cache_n"]),
        predicted_n=int(timings["predicted_n"]),
        # A stock server leaves both out where nothing was drafted.
        draft_n=int(timings.get("draft_n", 0)),
        draft_n_accepted=int(timings.get("draft_n_accepted", 0)),
        draft_prompt_n=int(timings.get("draft_prompt_n", 0)),
        prompt_ms=float(timings["prompt_ms"]),
        predicted_ms=float(timings["predicted_ms"]),
        first_token_ms=first_token_ms,
    )


def _lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Split at line feeds alone: httpx's own splits at every character that Unicode calls a line's end."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode()
    if rest:
        yield rest.decode()


def _events(lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    """The JSON of each data line; comments, which keep a connection alive, are skipped."""
    for line in lines:
        name, _, value = line.partition(":")
        value = value.strip()
        if name == "data" and value == "[DONE]":
            return
        if name in ("data", "error") and value:
            event = json.loads(value)
            yield event if name == "data" or "error" in event else {"error": event}


def _body(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        body = {}
    if response.is_error:
        raise ServerError(f"{response.request.url.path}: {response.status_code} {_message(body)}")
    if not isinstance(body, dict):
        raise ServerError(f"{response.request.url.path}: the answer is no JSON object")
    return body


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or "no reason given")
