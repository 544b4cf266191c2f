"""``vq_forward`` around a search, in plain PyTorch, and adding rows in given units."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...._gather import flat_indices, gather
from ...vq_assign.distances import require_valid
from ...vq_assign.fallback import search

SearchFunction = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Arguments(NamedTuple):
    """Arguments of the op."""

    x: torch.Tensor
    """``[..., D]``"""
    codebook: torch.Tensor
    """``[K, d]`` or ``[S, K, d]``"""
    scales: torch.Tensor | None
    """``[C]`` float64"""
    metric: str
    exact: bool


def fallback(given: Arguments) -> Result:
    """Compute ``vq_forward`` where no kernel runs."""
    require_valid("vq_forward", given.codebook)
    return around(search, given)


def around(search: SearchFunction, given: Arguments) -> Result:
    """Compute ``vq_forward`` around a search."""
    x, codebook, scales, metric, _ = given
    indices = search(x, codebook, metric)
    codewords = gather(codebook, indices)
    error = (x.double() - codewords.double().reshape(x.shape)).square().sum()
    flat = flat_indices(codebook, indices)
    counts = torch.zeros(codebook.shape[:-1].numel(), dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    d = codebook.shape[-1]
    if scales is None:
        largest, fixed = counts.new_empty(0), counts.new_empty(0, d)
    else:
        peaks = x.reshape(-1, d).double().abs().amax(1).nan_to_num(nan=torch.inf, posinf=torch.inf)
        largest = peaks.new_zeros(len(counts)).scatter_reduce(0, flat, peaks, "amax").view(torch.int64)
        fixed = counts.new_zeros(len(counts), d)
        add(x, codebook, indices, scales, fixed)
    return codewords.to(x.dtype).reshape(x.shape), indices, error, counts, largest, fixed


def add(
    x: torch.Tensor, codebook: torch.Tensor, indices: torch.Tensor, scales: torch.Tensor, fixed: torch.Tensor
) -> None:
    """Add round(x * scale of the codeword) of each row to fixed [C, d].

    Add nothing where the scale is 0 or where the product reaches 2^62.
    """
    flat = flat_indices(codebook, indices)
    units = (x.reshape(-1, codebook.shape[-1]).double() * scales[flat, None]).round()
    fixed.index_add_(0, flat, torch.where(units.abs() < 2.0**62, units, 0.0).long())
