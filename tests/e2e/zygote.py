"""Starts servers quickly, for tests that kill many: everything is imported once, then each server is a fork.

zygote.py FLAGS...    for each line "PORT" on stdin: fork a server on that port, and print its process id
"""

from __future__ import annotations

import os
import sys

import spec_server.launch
from spec_server.cli import main

assert spec_server.launch.serve  # the part of the import that takes long


def serve_lines(argv: list[str]) -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            sys.stdin.close()
            os.setpgid(0, 0)
            os._exit(main([*argv, "--host", "127.0.0.1", "--port", line.strip()]) or 0)
        print(pid, flush=True)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    serve_lines(sys.argv[1:])
