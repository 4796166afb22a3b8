"""What `spec-slots` says of a file: values for --json, tables for people, tab-separated lines for pipes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from persistence.catalog import StoredFile
from persistence.reader import SlotFile
from persistence.snapshot import ModelIdentity

NOT_CHECKED = "not checked"
NO_CHECKSUMS = "no checksums"


def listed(stored: StoredFile, verified: str) -> dict[str, Any]:
    """One row of `ls --json`."""
    facts = stored.facts
    return {
        "name": stored.name,
        "model": _identity(facts.target if facts else None),
        "draft": _identity(facts.draft if facts else None),
        "n_tokens": stored.n_tokens,
        "n_checkpoints": stored.n_checkpoints,
        "draft_bytes": stored.draft_bytes,
        "bytes": stored.n_bytes,
        "created": facts.created if facts else stored.modified,
        "verified": verified or None,
        "error": str(stored.error) if stored.error else None,
    }


def inspected(file: SlotFile) -> dict[str, Any]:
    """The value of `inspect --json`. Reads the checkpoints and the draft block, not the target state."""
    checkpoints = [
        {
            "n_tokens": c.n_tokens,
            "pos_min": c.pos_min,
            "pos_max": c.pos_max,
            "target_bytes": len(c.state.target),
            "draft_bytes": len(c.state.draft),
            "spec_bytes": len(c.state.spec),
        }
        for c in file.checkpoints()
    ]
    block = file.draft()
    facts = file.facts
    return {
        "bytes": file.n_read,
        "n_tokens": len(file.tokens),
        "checksum": "present" if file.checksum == "verified" else "absent",
        "writer": facts.writer if facts else None,
        "created": facts.created if facts else None,
        "model": _identity(facts.target if facts else None),
        "draft_model": _identity(facts.draft if facts else None),
        "settings": dict(facts.settings) if facts else None,
        "extra": dict(facts.extra) if facts else None,
        "sections": [
            {"kind": s.label, "offset": s.offset, "bytes": s.length, "xxh3_128": s.digest.hex() or None}
            for s in file.sections
        ],
        "checkpoints": checkpoints,
        "draft": None
        if block is None
        else {
            "fit": block.fit.decode("utf-8", "replace"),
            "context_bytes": len(block.context),
            "spec_bytes": len(block.spec),
        },
        "dropped": [
            {"section": d.section, "index": d.index, "reason": d.reason, "detail": d.detail}
            for d in file.dropped
        ],
        "notes": list(file.notes),
    }


def print_listing(
    console: Console, stored: Sequence[StoredFile], verified: Mapping[str, str], *, now: float
) -> None:
    head = ("name", "model", "draft", "tokens", "checkpoints", "size", "age", "verified")
    rows = []
    for file in stored:
        facts = file.facts
        size = decimal(file.n_bytes) if console.is_terminal else str(file.n_bytes)
        rows.append(
            (
                file.name,
                (facts.target.name if facts else "") or ("?" if file.error else "unknown"),
                _draft_name(file),
                str(file.n_tokens),
                str(file.n_checkpoints),
                size,
                _age(now - (facts.created if facts else file.modified)),
                str(file.error) if file.error else verified.get(file.name, NOT_CHECKED),
            )
        )
    _print_table(console, head, rows, right={"tokens", "checkpoints", "size", "age"})


def print_inspection(console: Console, name: str, facts: Mapping[str, Any]) -> None:
    created = facts["created"]
    rows = [
        ("file", name),
        ("bytes", str(facts["bytes"])),
        ("tokens", str(facts["n_tokens"])),
        ("checksums", "one per section" if facts["checksum"] == "present" else "none"),
        ("writer", facts["writer"] or "?"),
        ("created", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(created)) if created else "?"),
        ("model", _shown(facts["model"])),
        ("draft model", _draft_shown(facts)),
        *((f"setting {key}", str(value)) for key, value in (facts["settings"] or {}).items()),
        *((f"extra {key}", str(value)) for key, value in (facts["extra"] or {}).items()),
        *(("note", note) for note in facts["notes"]),
        *(("dropped", f"{d['section']} {d['index']}: {d['reason']} {d['detail']}") for d in facts["dropped"]),
    ]
    if facts["draft"]:
        rows.append(("draft fit", facts["draft"]["fit"]))
    _print_table(console, ("field", "value"), rows)
    for title in ("sections", "checkpoints"):
        parts = facts[title]
        if parts:
            head = tuple(parts[0])
            _print_table(
                console,
                head,
                [tuple("none" if part[key] is None else str(part[key]) for key in head) for part in parts],
                title=title,
            )
    if "tokens" in facts:
        tokens = facts["tokens"]
        console.print(Text(tokens if isinstance(tokens, str) else " ".join(map(str, tokens))), soft_wrap=True)


def _draft_name(file: StoredFile) -> str:
    """A draft state may belong to no model: that of an n-gram drafter, or of a file that names none."""
    if file.facts and file.facts.draft and file.facts.draft.name:
        return file.facts.draft.name
    return "?" if file.error else "unnamed" if file.draft_bytes else "none"


def _print_table(
    console: Console,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: set[str] = frozenset(),  # type: ignore[assignment]
    title: str = "",
) -> None:
    if not console.is_terminal:
        for row in (head, *rows):
            print("\t".join(_plain(cell) for cell in row), file=console.file)
        return
    table = Table(title=title or None, title_justify="left")
    for name in head:
        table.add_column(
            name, justify="right" if name in right else "left", overflow="fold", min_width=len(name)
        )
    for row in rows:
        table.add_row(*(Text(_plain(cell)) for cell in row))
    console.print(table)


def _plain(cell: str) -> str:
    # Names and settings come from files, which may hold terminal control sequences.
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in cell)


def _identity(model: ModelIdentity | None) -> dict[str, str] | None:
    return None if model is None or not model.digest else {"name": model.name, "digest": model.digest}


def _shown(model: Mapping[str, str] | None) -> str:
    return f"{model['name']} ({model['digest']})" if model else "?"


def _draft_shown(facts: Mapping[str, Any]) -> str:
    if facts["draft_model"]:
        return _shown(facts["draft_model"])
    return "unnamed" if facts["draft"] else "none"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
