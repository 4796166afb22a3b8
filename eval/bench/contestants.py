"""Who takes part in a round: a server over HTTP, or the bare loop, a process that only decodes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from eval.bench.stream import Stream, complete
from eval.client import Client, ServerError

BARE = "bare"
OVERHEADS = "llamacpp:step_overhead_us_per_slot", "llamacpp:step_overhead_us_per_slot_less_drafting"


class Contestant(Protocol):
    """One prompt per client; client i uses slot i. ServerError where a request fails or takes too long."""

    name: str

    @property
    def pid(self) -> int | None:
        """None: not a process of this machine."""

    def prime(self, prompts: Sequence[Sequence[int]]) -> list[Stream]:
        """Reads the prompts, all at once, and makes one token each."""

    def generate(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Stream]:
        """Exactly n_tokens for each prompt, all at once."""

    def overhead_us(self) -> tuple[float, float] | None:
        """Of a step outside llama_decode per slot: (as it is, less 60 per drafted token); None: not told."""


class ServerContestant:
    def __init__(self, name: str, base_url: str, *, pid: int | None, timeout_s: float) -> None:
        self.name = name
        self.pid = pid
        self.base_url = base_url
        self._timeout_s = timeout_s

    def prime(self, prompts: Sequence[Sequence[int]]) -> list[Stream]:
        return self.generate(prompts, 1)

    def generate(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Stream]:
        def one(id_slot: int) -> Stream:
            return complete(
                self.base_url,
                prompts[id_slot],
                n_tokens=n_tokens,
                id_slot=id_slot,
                timeout_s=self._timeout_s,
            )

        return at_once(one, len(prompts))

    def overhead_us(self) -> tuple[float, float] | None:
        if not self.name.startswith("ours:"):
            return None
        with Client(self.base_url, timeout_s=self._timeout_s) as client:
            metrics = client.metrics()
        found = [metrics[name] for name in OVERHEADS if name in metrics]
        return (found[0], found[-1]) if found else None


def at_once(one: Callable[[int], Stream], n_clients: int) -> list[Stream]:
    """one(0), one(1), ... each on a thread; the first error, once all have ended.

    Daemon threads, since a pool's would keep an interrupted run until the last of them timed out.
    """
    if n_clients == 1:
        return [one(0)]
    results: list[Stream | Exception | None] = [None] * n_clients

    def run(client: int) -> None:
        try:
            results[client] = one(client)
        except Exception as error:  # handed to the caller below
            results[client] = error

    threads = [threading.Thread(target=run, args=(client,), daemon=True) for client in range(n_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    streams = []
    for result in results:
        if isinstance(result, Exception):
            raise result
        assert result is not None
        streams.append(result)
    return streams


class BareLoop:
    """scripts/bare_loop.py behind its pipes: the library without any server. One client only."""

    name = BARE

    def __init__(
        self, argv: Sequence[str], *, log_path: Path, timeout_s: float, env: Mapping[str, str] | None = None
    ) -> None:
        self._argv = list(argv)
        self._env = {**os.environ, **(env or {})}
        self._log_path = log_path
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def __enter__(self) -> Self:
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        try:
            self._answer()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def prime(self, prompts: Sequence[Sequence[int]]) -> list[Stream]:
        return []  # each generation reads its prompt before its clock starts

    def generate(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Stream]:
        (prompt,) = prompts
        assert self._process is not None
        assert self._process.stdin is not None
        question = {"tokens": list(prompt), "n": n_tokens}
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ServerError(f"the bare loop ended; see {self._log_path}") from error
        answer = self._answer()
        arrivals = tuple((float(at), 1) for at in answer["arrivals_s"])
        return [Stream(0.0, float(answer["seconds"]), arrivals, n_tokens, 1, 0, 0)]

    def overhead_us(self) -> tuple[float, float] | None:
        return None

    def _answer(self) -> dict[str, Any]:
        """One line of JSON."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + self._timeout_s
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise ServerError(f"the bare loop did not answer in {self._timeout_s:.0f} s")
            if not (read := os.read(pipe, 1 << 16)):
                raise ServerError(f"the bare loop ended; see {self._log_path}")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None
