"""``lfq_entropy`` by halves of the bits, block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..._dtypes import result_dtype

LOG_FLOOR = math.log(1e-5)
_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}  # probabilities that are in memory at a time


class Arguments(NamedTuple):
    """Arguments of ``lfq_entropy``."""

    rows: torch.Tensor
    """``[N, C, d]``"""


class GradientArguments(NamedTuple):
    """Arguments of ``lfq_entropy_backward``."""

    rows: torch.Tensor
    """``[N, C, d]``"""
    grad_entropy: torch.Tensor
    """scalar"""
    grad_mean: torch.Tensor
    """``[C, 2^d]``"""


class _Half(NamedTuple):
    """Half of the bits of rows, with the log-probabilities of their values."""

    signs: torch.Tensor
    """``[2^bits, bits]``, +1 and -1"""
    logs: torch.Tensor
    """``[n, C, 2^bits]``"""

    probs: torch.Tensor
    """their exponentials"""


def place_values(bits: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the value of each bit of an index, the highest first."""
    return 2 ** torch.arange(bits - 1, -1, -1, device=device)


def signs(bits: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Return the bits of each index as +1 and -1, ``[2^bits, bits]``, the highest bit first."""
    values = torch.arange(2**bits, device=device).unsqueeze(-1)
    return (values.bitwise_and(place_values(bits, device)) != 0).to(dtype) * 2 - 1


def lfq_entropy(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the results of the op without a tensor of N x 2^d elements."""
    (rows,) = given
    n, codebooks, d = rows.shape
    count = max(n, 1)
    total = rows.new_zeros((), dtype=torch.float64)
    mean = rows.new_zeros(codebooks, 2 ** ((d + 1) // 2), 2 ** (d // 2), dtype=result_dtype(rows))
    for block in rows.split(_block(rows)):
        high, low = _halves(block)
        logs = _joint(high.logs, low.logs).clamp_(min=LOG_FLOOR)
        total -= (high.probs * _times(logs, low.probs)).sum()
        mean += high.probs.permute(1, 2, 0) @ low.probs.transpose(0, 1)
    entropy = total / max(count * codebooks, 1)
    return entropy.to(rows.dtype), (mean / count).flatten(1).to(rows.dtype)


def lfq_entropy_backward(given: GradientArguments) -> torch.Tensor:
    """Compute the gradient with respect to the rows.

    For one row, with probabilities p_k and g = grad_entropy / (N C), the gradient of p_k is::

        m_k = grad_mean_k / N - g (log max(p_k, 1e-5) + [p_k >= 1e-5])

    and the gradient of the logits is p_k (m_k - sum_j p_j m_j). A logit is the sum of one logit of each half,
    so the sums of this gradient over the other half suffice.
    """
    rows, grad_entropy, grad_mean = given
    n, codebooks, _ = rows.shape
    kind = result_dtype(rows)
    weight = grad_entropy.to(kind) / max(n * codebooks, 1)
    of_mean = (grad_mean.to(kind) / max(n, 1)).unflatten(1, (-1, 2 ** (rows.shape[2] // 2)))
    found = []
    for block in rows.split(_block(rows)):
        high, low = _halves(block)
        # log p + 1, or the constant where p is below 1e-5
        slopes = F.threshold(_joint(high.logs + 1, low.logs), LOG_FLOOR + 1, LOG_FLOOR, inplace=True)
        of_high = _by_codebook(low.probs, of_mean.transpose(-1, -2)) - weight * _times(slopes, low.probs)
        of_low = _by_codebook(high.probs, of_mean) - weight * (high.probs.unsqueeze(-2) @ slopes).squeeze(-2)
        mean = (of_high * high.probs).sum(-1, keepdim=True)
        parts = [
            (half.probs * (of_half - mean)) @ half.signs for half, of_half in ((high, of_high), (low, of_low))
        ]
        found.append(torch.cat(parts, -1))
    return torch.cat(found).to(rows.dtype)


def _block(rows: torch.Tensor) -> int:
    """Return the number of rows of a block."""
    limit = _BLOCK_ELEMENTS.get(rows.device.type, _BLOCK_ELEMENTS["cpu"])
    return max(1, limit // (max(rows.shape[1], 1) << rows.shape[2]))


def _halves(block: torch.Tensor) -> Iterator[_Half]:
    """Yield the higher and the lower half of the bits of rows ``[n, C, d]``.

    The probability of a code is the product of the probabilities of its halves.
    """
    d = block.shape[-1]
    for part in block.to(result_dtype(block)).split([(d + 1) // 2, d // 2], -1):
        pattern = signs(part.shape[-1], part.dtype, part.device)
        logs = (part @ pattern.t()).log_softmax(-1)
        yield _Half(pattern, logs, logs.exp())


def _joint(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the sums ``[n, C, a, b]`` of elements of ``[n, C, a]`` and ``[n, C, b]``."""
    return high.unsqueeze(-1) + low.unsqueeze(-2)


def _times(matrices: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Multiply ``[n, C, a, b]`` by ``[n, C, b]``."""
    return (matrices @ vectors.unsqueeze(-1)).squeeze(-1)


def _by_codebook(probs: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiply ``[n, C, a]`` by the matrix ``[C, a, b]`` of each codebook."""
    return (probs.transpose(0, 1) @ matrices).transpose(0, 1)
