"""The dtype of results."""

from __future__ import annotations

import torch


def result_dtype(x: torch.Tensor) -> torch.dtype:
    """Return float64 for float64 tensors, and float32 for all others."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
