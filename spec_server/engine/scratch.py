"""The buffer that all transfers share, as large as the largest section so far; it holds no state of its own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_PAGE = 4096


class Scratch:
    """One thread at a time. A view is alive until the next `view` or `release`."""

    def __init__(self) -> None:
        self._bytes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def view(self, n_bytes: int) -> memoryview:
        """Room for n_bytes whose pages are there already: the engine thread must not wait for them."""
        if len(self._bytes) < n_bytes:
            self.release()
            self._bytes = np.empty(n_bytes, np.uint8)
            self._bytes[::_PAGE] = 0
        return self._bytes.data[:n_bytes]

    @property
    def n_bytes(self) -> int:
        return len(self._bytes)

    def release(self) -> None:
        self._bytes = np.empty(0, np.uint8)
