"""The buffer that all transfers share, as large as the largest section so far; it holds no state of its own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_PAGE = 4096
_LINE = 64


class Scratch:
    """One thread at a time. A view is alive until the next `view` or `release`."""

    def __init__(self) -> None:
        self._bytes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def view(self, n_bytes: int, residue: int = 0) -> memoryview:
        """Room for n_bytes whose pages are there already: the engine thread must not wait for them.

        Its address modulo 64 is `residue`: what lies in a file as it lies in memory is written a sixth faster.
        """
        if len(self._bytes) < n_bytes + _LINE:
            self.release()
            self._bytes = np.empty(n_bytes + _LINE, np.uint8)
            self._bytes[::_PAGE] = 0
        start = (residue - self._bytes.ctypes.data) % _LINE
        return self._bytes.data[start : start + n_bytes]

    @property
    def n_bytes(self) -> int:
        return len(self._bytes)

    def release(self) -> None:
        self._bytes = np.empty(0, np.uint8)
