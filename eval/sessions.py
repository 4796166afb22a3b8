"""The servers that can be measured: a process of ours, or whatever answers at a URL."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from eval.client import Client, ServerError
from eval.server import ServerProcess


class RemoteSession(AbstractContextManager["RemoteSession"]):
    """A server that somebody else runs."""

    why_no_restart = "not ours to restart (--url)"
    why_no_strip = "its slot files are out of reach (--url)"

    def __init__(self, client: Client) -> None:
        self.client = client

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    def restart(self) -> None:
        raise RuntimeError(self.why_no_restart)

    def strip_draft(self, filename: str) -> str:
        raise RuntimeError(self.why_no_strip)


class ProcessSession(AbstractContextManager["ProcessSession"]):
    """A server that was started here (whoever started it ends it), with its slot files in `slot_dir`.

    `strip_command` is followed by a file and --draft.
    """

    why_no_restart = ""

    def __init__(self, process: ServerProcess, slot_dir: Path, strip_command: Sequence[str]) -> None:
        self._process = process
        self._slot_dir = slot_dir
        self._strip_command = list(strip_command)
        self.client = Client(process.base_url)
        self.why_no_strip = (
            "" if stores_draft(self.client) else "this server's slot files have no draft block"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    def restart(self) -> None:
        self.client.close()
        self._process.restart()
        self.client = Client(self._process.base_url)

    def strip_draft(self, filename: str) -> str:
        copy = f"no-draft-{filename}"
        shutil.copyfile(self._slot_dir / filename, self._slot_dir / copy)
        subprocess.run(
            [*self._strip_command, str(self._slot_dir / copy), "--draft"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return copy


def stores_draft(client: Client) -> bool:
    """A stock server has no such property."""
    try:
        return client.props().get("slot_draft") is True
    except ServerError:
        return False


def strip_command() -> list[str]:
    """spec-slots as it was installed beside this interpreter, or its module from a checkout."""
    script = Path(sys.executable).with_name("spec-slots")
    start = [str(script)] if script.exists() else [sys.executable, "-m", "persistence.cli"]
    return [*start, "strip"]
