"""Random numbers keyed by (seed, position), never by call order, so that nothing else moves them; pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # the odd steps and the finaliser are those of splitmix64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNIT = 2.0**-53


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


def _key(seed: int, position: int, stream: int) -> int:
    x = _mix((seed + _GAMMA) & _MASK)
    x = _mix((x + stream * _GAMMA + 1) & _MASK)
    return _mix((x + position * _GAMMA) & _MASK)


def keyed_uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1). Streams are independent of each other, and of `keyed_uniforms`."""
    return (_key(seed, position, stream) >> 11) * _UNIT


def keyed_uniforms(
    seed: int, position: int, ids: npt.NDArray[np.int32], stream: int = 0
) -> npt.NDArray[np.float64]:
    """[n] numbers in [0, 1), one for each of `ids` [n], whatever else is among them."""
    x = ids.astype(np.uint64) + np.uint64(1)
    x *= np.uint64(_GAMMA)
    x += np.uint64(_key(seed, position, stream))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    x ^= x >> np.uint64(31)
    uniforms: npt.NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64) * _UNIT
    return uniforms
