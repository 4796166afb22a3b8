"""Our server with an acceptance rule that is wrong on purpose: every drafted token stands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from spec_server import cli
from spec_server.engine import sample, verify


def accept_whatever(target: Any, drafted: Any, proposals: Any, uniform: Any) -> list[int]:
    k = len(drafted)
    return [*drafted, verify.draw(target(k), uniform(k))]


sample._ACCEPT["block"] = accept_whatever
if __name__ == "__main__":
    cli.main()
