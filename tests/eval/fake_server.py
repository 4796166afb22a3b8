"""A fake of llama-server for the tests of eval: words are tokens, each word follows from the two before it.

Run as a program, it is a server process (`fake_server.py [flags] --host H --port P`), or it takes the draft
part out of one of its slot files (`fake_server.py strip FILE --draft`).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

N_DRAFTED = 3


class FakeSlot:
    """What the real thing keeps, in words; `drafter_is_warm` is the draft state."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.drafter_is_warm = True


class FakeServer(ThreadingHTTPServer):
    """Faults to be found: `forgets_draft` and `forgets_slot` at restore, `fails_at` a word of a stream."""

    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1", port: int = 0, **settings: object) -> None:
        super().__init__((host, port), FakeHandler)
        self.slot_dir = Path(str(settings.get("slot_save_path", ".")))
        self.is_stock = bool(settings.get("stock"))
        self.forgets_draft = bool(settings.get("forgets_draft"))
        self.forgets_slot = bool(settings.get("forgets_slot"))
        self.fails_at = settings.get("fails_at")
        self.pings = bool(settings.get("pings"))
        self.slots = [FakeSlot(), FakeSlot()]
        self.requests: list[dict] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def save(self, slot: FakeSlot, name: str) -> dict:
        path = self.slot_dir / name
        path.write_text(
            json.dumps({"words": slot.words, "draft": slot.drafter_is_warm and not self.is_stock})
        )
        return {"filename": name, "n_saved": len(slot.words), "n_written": path.stat().st_size}

    def restore(self, slot: FakeSlot, name: str) -> dict:
        path = self.slot_dir / name
        stored = json.loads(path.read_text())
        slot.words = [] if self.forgets_slot else stored["words"]
        slot.drafter_is_warm = stored["draft"] and not self.forgets_draft
        return {"filename": name, "n_restored": len(slot.words), "n_read": path.stat().st_size}

    def generate(self, slot: FakeSlot, prompt: list[str], max_tokens: int) -> tuple[list[str], dict]:
        cache_n = 0
        while cache_n < min(len(slot.words), len(prompt) - 1) and slot.words[cache_n] == prompt[cache_n]:
            cache_n += 1
        if cache_n == 0:
            slot.drafter_is_warm = True
        words = list(prompt)
        for _ in range(max_tokens):
            # A character that ends a line for Unicode and for no event stream.
            words.append(f"w\x85{zlib.crc32(' '.join(words[-2:]).encode()) % 97}")
        slot.words = words[:-1]  # the last word was never decoded
        draft_n = max_tokens // 4 * N_DRAFTED
        timings: dict[str, object] = {"cache_n": cache_n, "prompt_n": len(prompt) - cache_n, "prompt_ms": 1.5}
        timings |= {"predicted_n": max_tokens, "predicted_ms": 2.5, "draft_n": draft_n}
        timings["draft_n_accepted"] = draft_n * 2 // 3 if slot.drafter_is_warm else draft_n // 3
        if draft_n == 0:
            del timings["draft_n"], timings["draft_n_accepted"]
        return words[len(prompt) :], timings


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        if self.path == "/metrics":
            return self.answer_text("# HELP x\nllamacpp:step_overhead_us_per_slot 90.5\n")
        props = {"model_path": "fake"} if self.server.is_stock else {"model_path": "fake", "slot_draft": True}
        self.answer(200, props if self.path == "/props" else {"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        address = urlsplit(self.path)
        self.server.requests.append({"path": self.path, "body": body, "headers": dict(self.headers)})
        if address.path.startswith("/slots/"):
            self.slot_action(address.path, parse_qs(address.query)["action"][0], body)
        elif address.path == "/apply-template":
            self.answer(200, {"prompt": " ".join(message["content"] for message in body["messages"])})
        elif address.path == "/tokenize":
            self.answer(200, {"tokens": [zlib.crc32(word.encode()) for word in body["content"].split(" ")]})
        elif body.get("max_tokens", body.get("n_predict")) > 1000:
            self.answer(400, {"error": {"code": 400, "message": "too long", "type": "invalid_request_error"}})
        else:
            self.stream(body, is_chat=address.path == "/v1/chat/completions")

    def slot_action(self, path: str, action: str, body: dict) -> None:
        id_slot = int(path.rsplit("/", 1)[1])
        slot = self.server.slots[id_slot]
        if action == "erase":
            report: dict = {"n_erased": len(slot.words)}
            slot.words, slot.drafter_is_warm = [], True
        else:
            report = getattr(self.server, action)(slot, body["filename"])
        self.answer(200, {"id_slot": id_slot, **report})

    def stream(self, body: dict, is_chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for line in self.lines(body, is_chat):
            self.wfile.write(f"{line}\n\n".encode())

    def lines(self, body: dict, is_chat: bool) -> Iterator[str]:
        if is_chat:
            turns = [f"<{message['role']}> {message['content']} <end>" for message in body["messages"]]
            prompt = f"{' '.join(turns)} <assistant>".split(" ")
        else:
            given = body["prompt"]
            prompt = given.split(" ") if isinstance(given, str) else [str(token) for token in given]
        max_tokens = body["max_tokens"] if is_chat else body["n_predict"]
        words, timings = self.server.generate(self.server.slots[body["id_slot"]], prompt, max_tokens)
        yield ": still here"
        while self.server.pings:
            time.sleep(0.05)
            yield ": still here"
        if is_chat:
            yield data({"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]})
        for number, word in enumerate(words):
            if number == self.server.fails_at:
                yield data({"error": {"code": 500, "message": "decode failed", "type": "server_error"}})
                return
            text = word if number == 0 else f" {word}"
            yield data(
                {"choices": [{"index": 0, "delta": {"content": text}}]}
                if is_chat
                else {"content": text, "tokens": [number]}
            )
        if is_chat:
            yield data(
                {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "timings": timings}
            )
            yield data({"choices": [], "usage": {"completion_tokens": len(words)}, "timings": timings})
            yield "data: [DONE]"
        else:
            yield data({"content": "", "stop": True, "timings": timings})

    def answer(self, status: int, body: dict) -> None:
        self.send(status, json.dumps(body).encode())

    def answer_text(self, text: str) -> None:
        self.send(200, text.encode())

    def send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the tests read what was asked from `requests`."""


def data(event: dict) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False)}"


def strip(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"draft": False}))


def main() -> None:
    if sys.argv[1:2] == ["strip"]:
        assert sys.argv[3:] == ["--draft"]
        return strip(Path(sys.argv[2]))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--slot-save-path")
    for flag in ("--stock", "--forgets-draft", "--forgets-slot", "--dies", "--ignores-sigterm"):
        parser.add_argument(flag, action="store_true")
    args, _ = parser.parse_known_args()
    if args.dies:
        sys.exit("no such model")
    if args.ignores_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    FakeServer(**vars(args)).serve_forever()


if __name__ == "__main__":
    main()
