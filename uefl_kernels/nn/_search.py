"""Find codewords other than the nearest one: the k nearest, a drawn one, or one of the row's own codebook.

Rows are ``[h, n, d]`` and the codebook ``[h, K, d]`` here, for h heads. An op finds the
nearest codeword.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .._gather import flat_indices
from ..ops.vq import composed
from ..ops.vq.forward.composed import add
from ..ops.vq_assign import vq_assign
from ._shared import no_autocast

_BLOCK = 1 << 23  # elements of a block of rows x codewords


class Sampling(NamedTuple):
    """Draw a codeword with probability softmax(-distance / temperature).

    The gradient may follow these probabilities.
    """

    temperature: float
    drawn: bool
    soft: bool


def distances(rows: torch.Tensor, codebook: torch.Tensor, cosine: bool) -> torch.Tensor:
    """Return the negative distances, or the cosines, ``[h, n, K]``: larger means nearer.

    Differentiable.
    """
    with no_autocast(rows.device):
        products = rows @ codebook.mT
    if cosine:
        return products
    squares = rows.square().sum(-1, keepdim=True) + codebook.square().sum(-1).unsqueeze(-2) - 2 * products
    return -squares.clamp(min=1e-8).sqrt()


def own_distances(rows: torch.Tensor, codebook: torch.Tensor, cosine: bool) -> torch.Tensor:
    """Compute ``distances`` for rows that each have their own codewords, ``[h, n, K, d]``."""
    return (
        (codebook * rows.unsqueeze(-2)).sum(-1)
        if cosine
        else -F.pairwise_distance(rows.unsqueeze(-2), codebook)
    )


def draw(near: torch.Tensor, sampling: Sampling, k: int | None = None) -> torch.Tensor:
    """Draw indices ``[h, n]``, or ``[h, n, k]`` in descending order, by Gumbel noise."""
    if sampling.drawn and sampling.temperature > 0:
        noise = torch.zeros_like(near).uniform_(0, 1)
        near = near / sampling.temperature - (-noise.clamp(min=1e-20).log()).clamp(min=1e-20).log()
    return near.argmax(-1) if k is None else near.topk(k, dim=-1).indices


@torch.no_grad()
def draw_in_blocks(
    rows: torch.Tensor, codebook: torch.Tensor, cosine: bool, sampling: Sampling, k: int | None = None
) -> torch.Tensor:
    """Call ``draw`` on the distances of one block of rows at a time."""
    return _in_blocks(rows, codebook, lambda x, c: draw(distances(x, c, cosine), sampling, k))


@torch.no_grad()
def nearest(rows: torch.Tensor, codebook: torch.Tensor, cosine: bool, k: int) -> torch.Tensor:
    """Return indices ``[h, n, k]`` of the k nearest codewords, nearest first.

    The first one is exact. For the others, float32 scores choose k + 4 codewords, which float64 distances
    then order. For the scores, the codewords are centered and scaled, so that no product overflows.
    """
    metric = "cosine" if cosine else "l2"
    first = torch.stack([vq_assign(x, c, metric=metric) for x, c in zip(rows, codebook, strict=True)])
    if k == 1:
        return first

    def rest(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        found = _scores(x, c, cosine).topk(min(k + 4, len(c)), dim=-1).indices
        near, x = c.double()[found], x.double().unsqueeze(-2)
        score = -(near * x).sum(-1) if cosine else (near - x).square().sum(-1)
        return found.gather(-1, _order(score))

    found = _in_blocks(rows, codebook, rest)
    # sort the exact nearest codeword behind all others
    others = _order((found == first).int())
    return torch.cat([first, found.gather(-1, others)[..., : k - 1]], -1)


def _order(keys: torch.Tensor) -> torch.Tensor:
    """Return the ascending order of keys ``[..., n]``, and of equal keys by place.

    ONNX has no name for a stable sort, but its sort is stable.
    """
    return keys.argsort(-1) if torch.compiler.is_exporting() else keys.argsort(dim=-1, stable=True)


def _scores(x: torch.Tensor, c: torch.Tensor, cosine: bool) -> torch.Tensor:
    """Return float32 scores ``[n, K]`` in the order of the distances.

    A larger score means a nearer codeword.
    """
    if cosine:
        return distances(x, c, cosine)
    mean = c.double().mean(0)
    c, x = c.double() - mean, x.double() - mean
    size = c.abs().flatten().amax(0).clamp(min=torch.finfo(c.dtype).tiny)
    c, x = c / size, x / size
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1)
    with no_autocast(x.device):
        products = (x / largest).float() @ c.float().mT
    return products - (c.square().sum(-1) / (2 * largest)).float()


def count(codebook: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Count the indices ``[..., S]`` of each codeword of ``[K, d]`` or ``[S, K, d]``."""
    flat = flat_indices(codebook, indices)
    size = codebook.shape[:-1].numel()
    # not in place, for vmap
    counts = torch.zeros(size, dtype=torch.int64, device=flat.device).scatter_add(
        0, flat, torch.ones_like(flat)
    )
    return counts.view(codebook.shape[:-1])


def count_and_sum(
    x: torch.Tensor, codebook: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count and sum the segments of x ``[..., D]`` for each codeword, as ``vq_with_sums`` does.

    Codewords are ``[K, d]`` or ``[S, K, d]``.
    """
    x, codebook = x.detach(), codebook.detach()
    flat, d = flat_indices(codebook, indices), codebook.shape[-1]
    size = codebook.shape[:-1].numel()
    counts = count(codebook, indices)
    peaks = x.reshape(-1, d).double().abs().amax(1).nan_to_num(nan=torch.inf, posinf=torch.inf)
    largest = peaks.new_zeros(size).scatter_reduce(0, flat, peaks, "amax")
    finite, shift = composed.fixed_point(largest, composed.expected_shift(codebook, len(flat)), len(flat))
    fixed = counts.new_zeros(size, d)
    add(x, codebook, indices, torch.where(finite, composed.power_of_two(shift), 0.0), fixed)
    sums = torch.where(finite[:, None], fixed.double() * composed.power_of_two(-shift)[:, None], torch.nan)
    return counts, sums.view(codebook.shape)


def _in_blocks(
    rows: torch.Tensor, codebook: torch.Tensor, choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    size = max(1, _BLOCK // codebook.shape[1])
    if torch.compiler.is_compiling() and not _known_to_exceed(rows.shape[1], size):
        # a graph for any number of rows cannot hold a number of blocks
        return torch.stack([choose(x, c) for x, c in zip(rows, codebook, strict=True)])

    def in_blocks(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.cat([choose(block, c) for block in x.split(size)])

    return torch.stack([in_blocks(x, c) for x, c in zip(rows, codebook, strict=True)])


def _known_to_exceed(rows: int, size: int) -> bool:
    """Return True if a graph under compilation is for a fixed number of rows, more than ``size``."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes long to import

    return statically_known_true(rows > size)
