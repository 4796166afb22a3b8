"""Huge pages for what llama allocates on the host; asks the kernel for them and does nothing else.

Weights and KV cache are read from end to end in every step. In pages of 4 KiB the search for pages takes a good part
of a step on a small machine; in pages of 2 MiB it is next to nothing. Where the kernel gives none, all is as before.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPS = Path("/proc/self/maps")
_SIZE = 2 << 20  # bytes; where huge pages are larger the kernel uses what fits of a region
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_madvise: Any = None
if sys.platform == "linux":
    _madvise = ctypes.CDLL(None).madvise
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def are_to_be_had() -> bool:
    """Whether the kernel gives huge pages to memory that asks for them."""
    try:
        return _ADVICE is not None and "[never]" not in _SWITCH.read_text()
    except OSError:
        return False


def ask() -> None:
    """For all large anonymous memory of this process. What is not yet touched will lie in huge pages at once; what
    is has to wait for the kernel's own tidying, so this belongs between an allocation and its first use."""
    if _madvise is None or _ADVICE is None:
        return
    for start, end in _large_regions():
        _madvise(start, end - start, _ADVICE)  # a refusal leaves small pages


def _large_regions() -> Iterator[tuple[int, int]]:
    """Start and end of each private, writable region without a file or a name that holds a huge page."""
    try:
        lines = _MAPS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        addresses, access, *rest = line.split()
        if access != "rw-p" or len(rest) > 3:
            continue
        first, last = (int(part, 16) for part in addresses.split("-"))
        start, end = -(-first // _SIZE) * _SIZE, last // _SIZE * _SIZE
        if start < end:
            yield start, end
