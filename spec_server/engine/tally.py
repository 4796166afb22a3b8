"""What transfers come to, as metrics: outcomes, bytes, seconds, and what of the files was dropped and why."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from persistence.reader import SlotFile
from spec_server.engine.base import DraftReport
from spec_server.engine.errors import EngineError, FileNotFound, FileRefused
from spec_server.engine.loading import Loaded

_OUTCOMES: dict[type[EngineError], str] = {FileRefused: "refused", FileNotFound: "not found"}


class Tally:
    """Adds to `counts`, by metric name with its labels. `what` is "save" or "restore"."""

    def __init__(self, counts: MutableMapping[str, float]) -> None:
        self._counts = counts

    def done(self, what: str, n_bytes: int, seconds: float) -> None:
        self._add(f'slot_{what}s_total{{outcome="{what}d"}}', 1)
        self._add(f"slot_{what}_bytes_total", n_bytes)
        self._add(f"slot_{what}_seconds_total", seconds)

    def failed(self, what: str, error: EngineError) -> None:
        outcome = _OUTCOMES.get(type(error), "failed")
        self._add(f'slot_{what}s_total{{outcome="{outcome}"}}', 1)

    def dropped(self, file: SlotFile, loaded: Loaded, draft: DraftReport, n_kept: int) -> None:
        """A restore that went well: which parts of the file are not in the slot."""
        for part, reason in _dropped(file, loaded, draft, n_kept):
            label = "".join(c if c.isprintable() and c not in '"\\' else " " for c in reason.split(":")[0])
            self._add(f'slot_restore_dropped_total{{part="{part}",reason="{label}"}}', 1)

    def _add(self, name: str, amount: float) -> None:
        self._counts[name] = self._counts.get(name, 0) + amount


def _dropped(file: SlotFile, loaded: Loaded, draft: DraftReport, n_kept: int) -> Iterator[tuple[str, str]]:
    if file.draft_bytes and draft.reason:
        yield "draft", draft.reason
    damaged = [d for d in file.dropped if d.section == "checkpoints"]
    for d in damaged:
        yield "checkpoints", d.reason
    for _ in loaded.unsound:
        yield "checkpoints", "state"
    for _ in range(n_left_out(file, loaded, n_kept)):
        yield "checkpoints", "limit"


def n_left_out(file: SlotFile, loaded: Loaded, n_kept: int) -> int:
    """Sound checkpoints of the file that the slot did not take."""
    n_damaged = sum(d.section == "checkpoints" and d.index < file.n_checkpoints for d in file.dropped)
    return file.n_checkpoints - n_damaged - len(loaded.unsound) - n_kept
