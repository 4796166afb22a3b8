"""A server process with a connection to it: flags in, answers with their tokens, counts and trace out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from eval.models import DRAFTER, target
from eval.server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
HYBRID = ROOT / "tests" / "models" / "tiny-qwen35-mtp.gguf"  # gated delta net, every fourth layer attention
WINDOW = ROOT / "tests" / "models" / "tiny-gemma3-swa.gguf"  # sliding window of 64

# Target and drafter. "self" drafts with its own target, so that an empty, stale or foreign draft cache shows; the
# others have drafts refused, which "self" never has.
PAIRS: Mapping[str, tuple[Path, Path]] = {
    "real": (target(), DRAFTER),
    "self": (DRAFTER, DRAFTER),
    "hybrid": (HYBRID, WINDOW),
    "window": (WINDOW, WINDOW),
    "window-hybrid": (WINDOW, HYBRID),
}
# One thread: the numerics do not depend on how a machine splits the work, and the machine stays usable.
ALWAYS = ("-t", "1", "--debug", "--spec-adaptive", "off", "--sse-ping-interval", "0")


def flags(pair: str, *more: str, slots: int = 1, ctx: int = 2048, slot_dir: Path | None = None) -> list[str]:
    """`ctx` counts tokens per slot."""
    model, draft = PAIRS[pair]
    folder = ["--slot-save-path", str(slot_dir)] if slot_dir else []
    return [
        *("-m", str(model), "-md", str(draft), "-np", str(slots), "-c", str(ctx * slots)),
        *ALWAYS,
        *folder,
        *more,
    ]


@dataclass(frozen=True)
class Answer:
    """One finished answer at temperature 0. `rounds` is its trace without what places it among others."""

    prompt: tuple[int, ...]
    text: str
    tokens: tuple[int, ...]
    timings: Mapping[str, Any]
    id_slot: int
    stop_type: str
    rounds: tuple[Mapping[str, Any], ...]
    steps: tuple[int, ...]
    started: float  # the server's clock
    bans_eog: bool = False

    @property
    def history(self) -> tuple[int, ...]:
        """What the slot holds now: the last token was sampled and never decoded."""
        return self.prompt + self.tokens[:-1]

    @property
    def counts(self) -> dict[str, int]:
        names = (
            "cache_n",
            "prompt_n",
            "predicted_n",
            "draft_n",
            "draft_n_accepted",
            "draft_prompt_n",
            "n_drafts",
        )
        return {name: self.timings[name] for name in names}

    @property
    def acceptance(self) -> float:
        return self.timings["draft_n_accepted"] / self.timings["draft_n"]


def answer_of(prompt: Sequence[int], body: Mapping[str, Any]) -> Answer:
    trace = body.get("trace", [])
    return Answer(
        prompt=tuple(prompt),
        text=body["content"],
        tokens=tuple(body["tokens"]),
        timings=body["timings"],
        id_slot=body["id_slot"],
        stop_type=body["stop_type"],
        rounds=tuple({key: entry[key] for key in entry.keys() - {"step", "started"}} for entry in trace),
        steps=tuple(entry["step"] for entry in trace),
        started=trace[0]["started"] if trace else 0.0,
        bans_eog=body["generation_settings"]["ignore_eos"],
    )


class Served:
    """`stop` demands an orderly end: exit status 0 and no traceback in the log."""

    def __init__(self, argv: Sequence[str], log_path: Path) -> None:
        self.log_path = log_path
        self.stopped = False
        self.process = ServerProcess([sys.executable, "-m", "spec_server", *argv], log_path=log_path)
        self.process.start()
        self.http = httpx.Client(base_url=self.process.base_url, timeout=120.0)

    @property
    def base_url(self) -> str:
        return self.process.base_url

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def stop(self) -> None:
        fault = self.stop_quietly()
        assert not fault, fault

    def stop_quietly(self) -> str:
        """What was not in order about the end; empty where all was."""
        self.stopped = True
        self.http.close()
        status = self.process.stop()
        if status != 0 or "Traceback" in self.log:
            return f"exit status {status}\n{self.log[-6000:]}"
        return ""

    # -- requests

    def post(self, path: str, body: object, **params: object) -> dict[str, Any]:
        response = self.http.post(path, json=body, params=params)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
        result: dict[str, Any] = response.json()
        return result

    def get(self, path: str) -> Any:
        response = self.http.get(path)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
        return response.json()

    def ask(self, prompt: Sequence[int], n: int = 64, slot: int = 0, **fields: object) -> Answer:
        return answer_of(prompt, self.post("/completion", body_of(prompt, n, slot, **fields)))

    def save(self, slot: int, filename: str) -> dict[str, Any]:
        return self.post(f"/slots/{slot}", {"filename": filename}, action="save")

    def restore(self, slot: int, filename: str) -> dict[str, Any]:
        return self.post(f"/slots/{slot}", {"filename": filename}, action="restore")

    def erase(self, slot: int) -> int:
        n_erased: int = self.post(f"/slots/{slot}", {}, action="erase")["n_erased"]
        return n_erased

    def erase_all(self) -> None:
        for slot in self.get("/slots"):
            self.erase(slot["id"])

    # -- tokens and facts

    def tokens(self, text: str) -> list[int]:
        result: list[int] = self.post("/tokenize", {"content": text})["tokens"]
        return result

    def chat_tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.tokens(self.post("/apply-template", {"messages": messages})["prompt"])

    def metrics(self) -> dict[str, float]:
        """Unlabelled samples by name."""
        lines = self.http.get("/metrics").text.splitlines()
        pairs = (
            line.rsplit(" ", 1) for line in lines if line and not line.startswith("#") and "{" not in line
        )
        return {name.partition(":")[2] or name: float(value) for name, value in pairs}

    def busy(self) -> list[int]:
        return [slot["id"] for slot in self.get("/slots") if slot["is_processing"]]


def body_of(prompt: Sequence[int], n: int, slot: int, **fields: object) -> dict[str, object]:
    return {
        "prompt": list(prompt),
        "n_predict": n,
        "id_slot": slot,
        "temperature": 0.0,
        "return_tokens": True,
        "trace": True,
        **fields,
    }


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def differences(expected: Answer, got: Answer) -> dict[str, tuple[Any, Any]]:
    """Fields in which two answers differ, with both values: counts, text, and every round's draft and place."""
    pairs = {name: (value, got.counts[name]) for name, value in expected.counts.items()}
    pairs |= {"text": (expected.text, got.text), "tokens": (expected.tokens, got.tokens)}
    pairs |= {"stop_type": (expected.stop_type, got.stop_type), "rounds": (expected.rounds, got.rounds)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
