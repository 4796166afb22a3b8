"""One streamed completion with the arrival of every token, taken at little cost to the server's machine."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from eval.client import ServerError

_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Stream:
    """Times are seconds of one clock. An arrival is a time and the number of tokens that came then."""

    sent_s: float
    ended_s: float
    arrivals: tuple[tuple[float, int], ...]
    n_tokens: int
    prompt_n: int
    draft_n: int
    draft_n_accepted: int

    @property
    def first_token_ms(self) -> float:
        first = self.arrivals[0][0] if self.arrivals else self.ended_s
        return (first - self.sent_s) * 1000

    def gaps_ms(self) -> list[float]:
        """The wait before each token but the first; 0 for those that came together with another."""
        gaps: list[float] = []
        before: float | None = None
        for at, n_tokens in self.arrivals:
            if before is not None:
                gaps.append((at - before) * 1000)
            gaps.extend([0.0] * (n_tokens - 1))
            before = at
        return gaps


def complete(
    base_url: str, prompt: Sequence[int], *, n_tokens: int, id_slot: int, timeout_s: float
) -> Stream:
    """Exactly n_tokens at temperature 0, in that slot. `timeout_s` is for the whole of it, pings or not."""
    body: dict[str, object] = {
        "prompt": list(prompt),
        "n_predict": n_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "id_slot": id_slot,
        "cache_prompt": True,
        "stream": True,
    }
    payload = json.dumps(body).encode()
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
    try:
        connection.connect()
        sent = time.perf_counter()
        chunks = list(_chunks(connection, payload, sent + timeout_s))
    except (http.client.HTTPException, TimeoutError) as error:
        raise ServerError(f"/completion: {type(error).__name__} {error}") from error
    finally:
        connection.close()
    # Parsed after the last byte: while the server works, this process only notes times.
    return _stream(sent, chunks)


def _chunks(
    connection: http.client.HTTPConnection, payload: bytes, deadline: float
) -> Iterator[tuple[float, bytes]]:
    connection.request("POST", "/completion", payload, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ServerError(f"/completion: {response.status} {response.read().decode(errors='replace')[:300]}")
    while chunk := response.read1(_READ_BYTES):
        now = time.perf_counter()
        if now > deadline:
            raise TimeoutError("the stream did not end in time")
        yield now, chunk


def _stream(sent: float, chunks: Sequence[tuple[float, bytes]]) -> Stream:
    arrivals: list[tuple[float, int]] = []
    timings: Mapping[str, Any] | None = None
    for at, event in events(chunks):
        if "error" in event:
            raise ServerError(f"/completion: {event['error']}")
        timings = event.get("timings") or timings
        n_tokens = len(event.get("tokens") or ()) or int(bool(event.get("content")))
        if n_tokens and not event.get("stop"):
            arrivals.append((at, n_tokens))
    if timings is None:
        raise ServerError("/completion: the stream ended without timings")
    return Stream(
        sent_s=sent,
        ended_s=chunks[-1][0],
        arrivals=tuple(arrivals),
        # The server's count: a token inside a character that is not whole yet is in no event of some servers.
        n_tokens=int(timings["predicted_n"]),
        prompt_n=int(timings["prompt_n"]),
        draft_n=int(timings.get("draft_n", 0)),
        draft_n_accepted=int(timings.get("draft_n_accepted", 0)),
    )


def events(chunks: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Each event's JSON with the arrival of the chunk that completed it."""
    rest = b""
    for at, chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            name, _, value = line.partition(b":")
            if name in (b"data", b"error") and value.strip() not in (b"", b"[DONE]"):
                event = json.loads(value)
                yield at, event if name == b"data" or "error" in event else {"error": event}
