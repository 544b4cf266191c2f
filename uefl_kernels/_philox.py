"""Philox4x32-10 on whole arrays or tensors of counters.

The references use this module. The numbers are the same as in ``csrc/common/philox.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

WORD = 0xFFFFFFFF
_ROUNDS = 10


def philox(counter: Sequence[Any], seed: Any) -> list[Any]:
    """Compute four words of counter -> four random words.

    The key is the low, then the high word of ``seed``, which may be negative.

    Words are in [0, 2^32), in NumPy arrays of uint64 or (with the seed) in torch tensors of int64. Products
    of int64 wrap like unsigned ones.

    Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.3.
    """
    a, b, c, d = counter
    low, high = seed & WORD, seed >> 32 & WORD
    for _ in range(_ROUNDS):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = second >> 32 & WORD ^ b ^ low, second & WORD
        c, d = first >> 32 & WORD ^ d ^ high, first & WORD
        low, high = (low + 0x9E3779B9) & WORD, (high + 0xBB67AE85) & WORD
    return [a, b, c, d]


def uniforms(count: int, second: int, third: int, fourth: int, seed: int) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1) with 53 bits, one for each counter (0 .. count - 1, second, third, fourth)."""
    words = philox(
        [
            np.arange(count, dtype=np.uint64),
            *(np.full(count, word, np.uint64) for word in (second, third, fourth)),
        ],
        seed,
    )
    numbers: npt.NDArray[np.float64] = ((words[0] >> 5) * (1 << 26) + (words[1] >> 6)).astype(
        np.float64
    ) * 2.0**-53
    return numbers
