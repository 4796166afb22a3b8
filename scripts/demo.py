"""Starts a server with SmolLM2-135M-Instruct and the packaged drafter, and says how to talk to it."""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import FrameType

from eval import models

HINT = """
Listening on {url}, press Ctrl-C to stop. Try:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \
-d '{{"messages": [{{"role": "user", "content": "What is a slot?"}}], "max_tokens": 64}}'
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    args, extra = parser.parse_known_args()
    with socket.socket() as probe:
        # Else the server that is there already would answer for ours.
        if probe.connect_ex((args.host, args.port)) == 0:
            parser.error(
                f"something listens on port {args.port} already; choose another: make demo PORT=8081"
            )
    slots = models.REPOSITORY / "demo-slots"
    slots.mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "spec_server", "-m", str(models.target()), "-md", str(models.DRAFTER)]
    argv += ["--slot-save-path", str(slots), "--host", args.host, "--port", str(args.port), *extra]
    # A group of its own, so that Ctrl-C reaches the server once, from us.
    server = subprocess.Popen(argv, start_new_session=True)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        server.terminate()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    url = f"http://{args.host}:{args.port}"
    if wait_until_ready(server, url):
        print(HINT.format(url=url), flush=True)
    return server.wait()


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> bool:
    """False where the server ended first; it has said why."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return server.poll() is None
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.2)
    return False


if __name__ == "__main__":
    sys.exit(main())
