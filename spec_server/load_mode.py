"""How weights come into memory where nobody said how."""

from __future__ import annotations

import logging
from pathlib import Path

from spec_server import machine
from spec_server.runtime import gguf, huge_pages
from spec_server.runtime.model import goes_to_gpu
from spec_server.settings import Settings

log = logging.getLogger(__name__)

_MIB = 1 << 20


def load_mode(settings: Settings) -> str:
    """The setting; for auto `none`, a copy in huge pages, where weights are computed with on the host and the copy
    leaves as much memory again. A memory-mapped file lies in small pages, so every step is slower, but it gives way
    when memory runs short: mapping stays the choice for large models, and llama's own for those on a GPU.
    """
    if settings.load_mode != "auto":
        return settings.load_mode
    drafts = "draft-simple" in settings.drafters
    if goes_to_gpu(settings.gpu_layers) or (drafts and goes_to_gpu(settings.gpu_layers_draft)):
        return "auto"
    if not huge_pages.are_to_be_had():
        return "auto"
    needed = size_of(settings.model) + (size_of(settings.model_draft) if drafts else 0)
    available = machine.available_bytes()
    if 2 * needed <= available:
        log.info("weights are copied into huge pages")
        return "none"
    log.info(
        "weights are memory-mapped: %d MiB and %d MiB available; steps are faster with --load-mode none, in huge pages",
        needed // _MIB,
        available // _MIB,
    )
    return "auto"


def size_of(path: str) -> int:
    """Bytes of a GGUF with all its parts. OSError where one is not there."""
    return sum(part.stat().st_size for part in gguf.parts(Path(path)))
