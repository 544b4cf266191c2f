"""The dtype of results, and vectors of a dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def result_dtype(x: torch.Tensor) -> torch.dtype:
    """Return float64 for float64 tensors, and float32 for all others."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def vector_of(
    numbers: Sequence[float], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Return a vector ``[n]`` of numbers, made on the device.

    A copy from the host, as by ``torch.tensor``, slows a compiled graph down, and a decomposition cannot
    contain it.
    """
    return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])
