"""Float64 distances, summed in a fixed order: they define the nearest codeword on every backend."""

from __future__ import annotations

import numpy as np
import torch

# of an element of a codebook, or of clustered rows: the squares of 2^60 such elements add up in float64
LARGEST = 2.0**480

BLOCK_ELEMENTS = 1 << 22  # of the distances that are in memory at a time


def argmin(rows: torch.Tensor, codebook: torch.Tensor, metric: str) -> torch.Tensor:
    """Return the nearest codeword of each row.

    Args:
        rows: ``[n, d]`` float64.
        codebook: ``[K, d]`` float64, of length 1 for ``"cosine"``.
        metric: ``"l2"`` or ``"cosine"``.

    Returns:
        indices ``[n]``; ties go to the lowest index, and NaN never wins.
    """
    total = rows.new_zeros(rows.shape[0], codebook.shape[0])
    for j in range(rows.shape[1]):
        value, code = rows[:, j, None], codebook[:, j]
        if metric == "l2":
            difference = value - code
            total += difference * difference
        else:
            total -= value * code
    return total.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).argmin(1)


def unit(codebook: torch.Tensor) -> torch.Tensor:
    """Scale codewords ``[K, d]`` float64 to length 1.

    A codeword of zeros stays.
    """
    square = codebook.new_zeros(codebook.shape[0])
    for j in range(codebook.shape[1]):
        square += codebook[:, j] * codebook[:, j]
    norm = square_root(square)
    return torch.where(norm[:, None] == 0, 0.0, codebook / norm[:, None])  # a NaN codeword stays NaN


def square_root(square: torch.Tensor) -> torch.Tensor:
    """Return the correctly rounded square root, as IEEE 754 demands.

    On the CPU torch may call a vector library that is off by one unit in the last place.
    """
    return torch.from_numpy(np.sqrt(square.numpy())) if square.device.type == "cpu" else square.sqrt()


def require_valid(op: str, codebook: torch.Tensor) -> None:
    """Raise RuntimeError for a codebook that cannot be searched.

    This looks at codebooks on the CPU only: on a GPU the check would wait for the device.
    """
    if codebook.device.type == "cpu" and not bool(
        (torch.isfinite(codebook) & (codebook.abs() <= LARGEST)).all()
    ):
        raise RuntimeError(
            f"{op}: the codebook holds NaN, infinity or values beyond 2^480 (3e144); initialize those"
            " codewords again, or lower the learning rate"
        )
