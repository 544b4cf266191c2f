"""``ema_update`` in torch's operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Arguments(NamedTuple):
    """Arguments of the op."""

    sizes: torch.Tensor
    """``[h, K]``, float32 or float64, as averages, codewords and weights"""
    averages: torch.Tensor
    """``[h, K, d]``"""
    codewords: torch.Tensor
    """``[h, K, d]``"""
    counts: torch.Tensor
    """``[h, K]`` int64, of the batch"""
    sums: torch.Tensor
    """``[h, K, d]`` float64, of the batch"""
    weights: torch.Tensor | None
    """``[h, K]``: factors of step"""
    step: float
    eps: float
    unit: bool


def valid_batch(counts: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return counts and sums that are zero for a codeword with NaN in its sum."""
    invalid = sums.isnan().any(-1)
    return counts.masked_fill(invalid, 0), sums.masked_fill(invalid.unsqueeze(-1), 0)


def ema_update(given: Arguments) -> Result:
    """Return the new sizes, averages and codewords."""
    counts, sums = valid_batch(given.counts, given.sums)
    dtype = given.averages.dtype
    step = torch.full((), given.step, dtype=dtype, device=sums.device)
    steps = step.expand(counts.shape) if given.weights is None else step * given.weights
    sizes = given.sizes.lerp(counts.to(dtype), steps)
    averages = given.averages.lerp(sums.to(dtype), steps.unsqueeze(-1))
    return sizes, averages, codewords_of(sizes, averages, given.codewords, given.eps, given.unit)


def codewords_of(
    sizes: torch.Tensor, averages: torch.Tensor, codewords: torch.Tensor, eps: float, unit: bool
) -> torch.Tensor:
    """Return the codewords for new sizes and averages.

    A codeword with a smoothed size of zero stays.
    """
    total = sizes.sum(-1, keepdim=True)
    size = (sizes + eps) / (total + sizes.shape[-1] * eps) * total
    size = size.unsqueeze(-1)  # zero for a total of zero, which a step of 1 and a batch without rows give
    found = averages / size
    return torch.where(size > 0, F.normalize(found, dim=-1, eps=1e-6) if unit else found, codewords)
