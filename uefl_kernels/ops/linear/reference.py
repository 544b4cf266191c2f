"""The definition of ``linear``: in float64, rounded once."""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x ``[N, D]``, weight ``[M, D]``, bias ``[M]`` -> ``[N, M]`` in the dtype of x."""
    return torch.nn.functional.linear(x.double(), weight.double(), bias.double()).to(x.dtype)
