"""From indices back to codewords."""

from __future__ import annotations

import torch


def gather(codebook: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """codebook [K, d] | [S, K, d], indices [..., S] -> codewords [..., S, d]."""
    d = codebook.shape[-1]
    return codebook.reshape(-1, d)[flat_indices(codebook, indices)].reshape(*indices.shape, d)


def flat_indices(codebook: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Row numbers into ``codebook.reshape(-1, d)``, flattened."""
    if codebook.dim() == 3:
        indices = indices + torch.arange(codebook.shape[0], device=indices.device) * codebook.shape[1]
    return indices.reshape(-1)
