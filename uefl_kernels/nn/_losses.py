"""The terms of a VQ layer's loss besides the one of ``vq``."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class LossBreakdown(NamedTuple):
    """The terms of the loss, unweighted; zero where they are off."""

    commitment: torch.Tensor
    codebook_diversity: torch.Tensor
    orthogonal_reg: torch.Tensor
    inplace_optimize: torch.Tensor


def masked_mean(error: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Mean of ``[..., D]`` over what the mask ``[...]`` lets through; 0 without anything."""
    if mask is None:
        return error.sum() / max(1, error.numel())
    return error.masked_fill(~mask.unsqueeze(-1), 0).sum() / (mask.sum() * error.shape[-1]).clamp(min=1)


def mean_square(error: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The same of the squares; what the padding holds, NaN included, has no part in the gradient either."""
    return masked_mean((error if mask is None else error.masked_fill(~mask.unsqueeze(-1), 0)).square(), mask)


def diversity(near: torch.Tensor, kept: torch.Tensor | None, length: int, temperature: float) -> torch.Tensor:
    """Minus the mean entropy of the ``length`` positions' shares of codewords, the mean over the batch of softmax(near * temperature).

    near is ``[h, n, K]``, and ``[h, n]`` says which rows are no padding. As in the peer, each position of a sequence is to use all
    codewords.
    """
    if length == 0:
        return near.sum()  # of nothing: zero
    share = (near * temperature).softmax(-1).reshape(-1, length, near.shape[-1])
    weight = torch.ones_like(share[..., :1]) if kept is None else kept.reshape(-1, length, 1).to(share.dtype)
    share = (share * weight).sum(0) / weight.sum(0).clamp(min=1)
    used = weight.amax(0).squeeze(-1)
    loss: torch.Tensor = ((share * share.clamp(min=1e-5).log()).sum(-1) * used).sum() / used.sum().clamp(min=1)
    return loss


class Orthogonal(NamedTuple):
    """Keep codewords apart: the mean square of their cosines (Shin et al. 2021, eq. 2)."""

    weight: float
    active_only: bool
    max_codes: int | None

    def __call__(self, codes: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Of codes ``[h, K, d]``, of which ``counts [h, K]`` says how often each was chosen."""
        if self.active_only:  # waits for the device, which has to say how many they are
            codes = codes[:, counts.sum(0) > 0]
        if self.max_codes is not None and codes.shape[1] > self.max_codes:
            codes = codes[:, torch.randperm(codes.shape[1], device=codes.device)[: self.max_codes]]
        books, k = codes.shape[:2]
        unit = F.normalize(codes, dim=-1, eps=1e-6)
        return (unit @ unit.mT).square().sum() / (books * k**2) - 1 / k
