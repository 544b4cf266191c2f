"""Philox4x32-10 on whole arrays of counters: the twin of ``csrc/common/philox.h``, for references."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = np.uint64(0xFFFFFFFF)
_ROUNDS = 10


def philox(counters: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Counters [n, 4] of 32-bit words -> four random words each; the key is the low, then the high word of ``seed``.

    Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.3.
    """
    a, b, c, d = (counters[:, i] for i in range(4))
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = second >> np.uint64(32) ^ b ^ np.uint64(low), second & _MASK
        c, d = first >> np.uint64(32) ^ d ^ np.uint64(high), first & _MASK
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([a, b, c, d], 1)


def uniforms(count: int, second: int, third: int, fourth: int, seed: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) of 53 bits, one for each counter (0 .. count - 1, second, third, fourth)."""
    counters = np.empty((count, 4), np.uint64)
    counters[:] = (0, second, third, fourth)
    counters[:, 0] = np.arange(count)
    words = philox(counters, seed)
    return ((words[:, 0] >> np.uint64(5)) * np.uint64(1 << 26) + (words[:, 1] >> np.uint64(6))).astype(np.float64) * 2.0**-53
