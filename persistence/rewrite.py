"""Copies an open slot file into a new one of the newest form; what is damaged stays behind."""

from __future__ import annotations

from dataclasses import replace

from persistence.reader import SlotFile
from persistence.snapshot import FileFacts, ModelIdentity
from persistence.writer import Saved, SlotWriter

UNKNOWN = ModelIdentity("", "")


def rewrite(
    file: SlotFile, writer: SlotWriter, writer_name: str, *, checkpoints: bool = True, draft: bool = True
) -> Saved:
    """Write all sound parts of `file`, and commit. `file.dropped` then names the parts left behind.

    A file without a footer gets one that names no model and no settings. Unknown sections are not copied.
    Raises SlotFileError, with nothing written, where the tokens or the target state are damaged.
    """
    facts = file.facts or FileFacts(UNKNOWN, None, {}, len(file.tokens), "")
    writer.payload(file.tokens, file.read_target())
    if checkpoints:
        # Which ones are sound shows only on reading them, and their number stands before them.
        n_sound = sum(1 for _ in file.checkpoints())
        writer.checkpoints(n_sound, file.checkpoints())
    block = file.draft() if draft else None
    if block is not None:
        writer.draft(block.fit, block.context, block.spec)
    kept = facts.draft if block is not None else None
    return writer.commit(replace(facts, draft=kept, writer=writer_name, created=0.0))
