"""Terms of the loss of a VQ layer.

A mean over no values is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class LossBreakdown(NamedTuple):
    """The terms of the loss without their weights.

    A term is zero if its option is off.
    """

    commitment: torch.Tensor
    codebook_diversity: torch.Tensor
    orthogonal_reg: torch.Tensor
    inplace_optimize: torch.Tensor


def masked_mean(error: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of ``[..., D]`` over the positions ``[...]`` where the mask is True."""
    if mask is None:
        return error.sum() / max(1, error.numel())
    return error.masked_fill(~mask.unsqueeze(-1), 0).sum() / (mask.sum() * error.shape[-1]).clamp(min=1)


def mean_square(error: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of the squares.

    Masked values, also NaN, affect neither the mean nor its gradient.
    """
    return masked_mean((error if mask is None else error.masked_fill(~mask.unsqueeze(-1), 0)).square(), mask)


def cross_entropy(near: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of the logits ``[h, n, K]`` and the codewords ``[h, n]``, -1 for none."""
    total = F.cross_entropy(near.flatten(0, 1), indices.flatten(), ignore_index=-1, reduction="sum")
    return total / (indices >= 0).sum().clamp(min=1)


def diversity(near: torch.Tensor, kept: torch.Tensor | None, length: int, temperature: float) -> torch.Tensor:
    """Return the negative entropy of the assignment probabilities softmax(near * temperature).

    The probabilities are averaged over the batch per position.

    As in the peer, the loss makes each of the ``length`` positions of a sequence use all codewords.

    Args:
        near: ``[h, n, K]``, larger for nearer codewords.
        kept: bool ``[h, n]``, False for padding; None for no padding.
        length: positions of a sequence.
        temperature: a factor.
    """
    if near.shape[1] == 0:
        return near.sum()  # without values: zero
    share = (near * temperature).softmax(-1).reshape(-1, length, near.shape[-1])
    weight = torch.ones_like(share[..., :1]) if kept is None else kept.reshape(-1, length, 1).to(share.dtype)
    share = (share * weight).sum(0) / weight.sum(0).clamp(min=1)
    used = weight.amax(0).squeeze(-1)
    loss: torch.Tensor = ((share * share.clamp(min=1e-5).log()).sum(-1) * used).sum() / used.sum().clamp(
        min=1
    )
    return loss


def orthogonal(codewords: torch.Tensor, used: torch.Tensor | None, max_codes: int | None) -> torch.Tensor:
    """Return the mean square of the cosines of codewords ``[h, K, d]`` (Shin et al. 2021, eq. 2).

    Args:
        codewords: the rows of h codebooks.
        used: bool ``[K]``, the codewords to take; None takes all codewords.
        max_codes: take at most this number of codewords, drawn at random.
    """
    codebooks, k = codewords.shape[:2]
    if used is None:
        used = torch.ones(k, dtype=torch.bool, device=codewords.device)
    if max_codes is not None and k > max_codes:
        order = torch.randperm(k, device=codewords.device)
        order = order[(~used[order]).to(torch.uint8).argsort(stable=True)[:max_codes]]
        codewords, used = codewords[:, order], used[order]
    unit = F.normalize(codewords.masked_fill(~used.unsqueeze(-1), 0), dim=-1, eps=1e-6)
    # the squares of both products have the same sum
    product = unit @ unit.mT if unit.shape[1] < unit.shape[2] else unit.mT @ unit
    total, count = product.square().sum(), used.sum()
    return (total / (codebooks * count.clamp(min=1)) - count.clamp(max=1)) / count.clamp(min=1)
