"""The bound library, loaded and started once; nothing outside this package may import it."""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Any

from spec_server.runtime import logs

# OpenMP workers spin at every barrier of a graph. Long spins starve whatever else wants the cores;
# none at all costs half the speed. libgomp reads this once, when it is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "300")

lib: Any = importlib.import_module("llama_cpp.llama_cpp")
ext: Any = importlib.import_module("llama_cpp.llama_cpp_ext")

logs.install(lib)
lib.llama_backend_init()


def function(name: str, restype: Any, *argtypes: Any) -> Any:
    """A prototype of our own for an exported symbol: addresses as plain integers cost less than pointer objects."""
    symbol = lib._lib[name]  # by item, since the attribute is the binding's shared object
    symbol.restype = restype
    symbol.argtypes = argtypes
    return symbol


def address_of(buffer: Any) -> int:
    """The address of a writable, contiguous, non-empty buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
