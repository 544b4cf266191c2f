"""Look up codewords by their indices."""

from __future__ import annotations

import torch


def gather(codebook: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Look up codewords: codebook [K, d] | [S, K, d], indices [..., S] -> codewords [..., S, d]."""
    if codebook.dim() == 2:
        return codebook[indices]
    if len(codebook) == 1:
        return codebook[0][indices]
    # an index beyond K is an error, and not a codeword of the next codebook
    return codebook[torch.arange(len(codebook), device=indices.device), indices]


def flat_indices(codebook: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return row numbers into ``codebook.reshape(-1, d)``, flattened."""
    if codebook.dim() == 3:
        indices = indices + torch.arange(codebook.shape[0], device=indices.device) * codebook.shape[1]
    return indices.reshape(-1)


def take_along(values: torch.Tensor, indices: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``torch.take_along_dim(values, indices, dim)``, which cannot leave a size open in a graph."""
    shape = list(values.shape)
    shape[dim] = indices.shape[dim]
    return values.gather(dim, indices.expand(shape))
