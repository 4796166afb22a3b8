"""Which weights a GGUF file holds, told from its bytes, never from its path; reads a few KiB per tensor."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from spec_server.runtime._native import function
from spec_server.runtime.errors import ModelError

SAMPLE_BYTES = 4096  # at the beginning, middle and end of every tensor

_SPLIT = re.compile(r"^(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


_init = function("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _InitParams)
_free = function("gguf_free", None, ctypes.c_void_p)
_data_offset = function("gguf_get_data_offset", ctypes.c_size_t, ctypes.c_void_p)
_n_tensors = function("gguf_get_n_tensors", ctypes.c_int64, ctypes.c_void_p)
_tensor_offset = function("gguf_get_tensor_offset", ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int64)
_tensor_size = function("gguf_get_tensor_size", ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int64)


def check_readable(path: Path) -> None:
    """ModelError unless `path` can be read and begins as a GGUF does; llama's own messages are vaguer."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read the model {path}: {error.strerror or error}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}")


def parts(path: Path) -> list[Path]:
    """The files that a model consists of, in order; one where it is not split."""
    match = _SPLIT.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def digest(path: Path) -> str:
    """XXH3-128, 32 hex digits, over header, tensor table and samples of every tensor's data, of all parts."""
    state = xxhash.xxh3_128()
    for part in parts(path):
        check_readable(part)
        with _open(part) as gguf, part.open("rb") as file:
            data_offset = _data_offset(gguf)
            state.update(_read(file.fileno(), 0, data_offset))
            for i in range(_n_tensors(gguf)):
                begin = data_offset + _tensor_offset(gguf, i)
                for offset, length in _samples(_tensor_size(gguf, i)):
                    state.update(_read(file.fileno(), begin + offset, length))
    return state.hexdigest()


@contextmanager
def _open(path: Path) -> Iterator[int]:
    gguf = _init(os.fsencode(path), _InitParams(no_alloc=True, ctx=None))
    if not gguf:
        raise ModelError(f"{path} is damaged: its GGUF header cannot be parsed")
    try:
        yield gguf
    finally:
        _free(gguf)


def _samples(size: int) -> list[tuple[int, int]]:
    """(offset, length) of what is hashed of a tensor of `size` bytes."""
    if size <= 3 * SAMPLE_BYTES:
        return [(0, size)]
    return [(offset, SAMPLE_BYTES) for offset in (0, (size - SAMPLE_BYTES) // 2, size - SAMPLE_BYTES)]


def _read(fd: int, offset: int, length: int) -> bytes:
    data = os.pread(fd, length, offset)
    if len(data) != length:
        raise ModelError(f"the model file ends at {offset + len(data)}, {length - len(data)} bytes early")
    return data
