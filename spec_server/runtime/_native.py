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
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

lib: Any = importlib.import_module("llama_cpp.llama_cpp")
ext: Any = importlib.import_module("llama_cpp.llama_cpp_ext")

logs.install(lib)
lib.llama_backend_init()


def function(name: str, restype: Any, *argtypes: Any) -> Any:
    """A prototype of our own for a symbol: addresses as plain integers cost less than pointer objects."""
    symbol = lib._lib[name]  # by item, since the attribute is the binding's shared object
    symbol.restype = restype
    symbol.argtypes = argtypes
    return symbol


def address_of(buffer: Any) -> int:
    """The address of a writable, contiguous, non-empty buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


POINTER = ctypes.c_void_p
decode = lib.llama_decode
get_logits = function("llama_get_logits", POINTER, POINTER)
seq_rm = function(
    "llama_memory_seq_rm", ctypes.c_bool, POINTER, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32
)
pos_min = function("llama_memory_seq_pos_min", ctypes.c_int32, POINTER, ctypes.c_int32)
pos_max = function("llama_memory_seq_pos_max", ctypes.c_int32, POINTER, ctypes.c_int32)
_STATE_ARGS = (POINTER, POINTER, ctypes.c_size_t, ctypes.c_int32, ctypes.c_uint32)
state_size = function(
    "llama_state_seq_get_size_ext", ctypes.c_size_t, POINTER, ctypes.c_int32, ctypes.c_uint32
)
state_get = function("llama_state_seq_get_data_ext", ctypes.c_size_t, *_STATE_ARGS)
state_set = function("llama_state_seq_set_data_ext", ctypes.c_size_t, *_STATE_ARGS)
