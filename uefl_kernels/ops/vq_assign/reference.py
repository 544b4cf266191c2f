"""The definition of ``vq_assign``."""

from __future__ import annotations

import torch

from . import Arguments
from .distances import BLOCK_ELEMENTS, argmin, require_valid, unit


def vq_assign(given: Arguments) -> torch.Tensor:
    """Return the nearest codeword of each segment.

    ``exact`` makes no difference here.

    l2:     distance_k = sum over d of (x_d - c_kd)^2, the argmin
    cosine: score_k = sum over d of x_d * (c_kd / |c_k|), the argmax; a codeword of zeros scores 0

    Terms are rounded and added in float64 in the order d = 0, 1, ...; ties go to the lowest index; NaN never
    wins, so a row of NaN gets index 0. Squares overflow and underflow as float64 does: a row beyond some
    2^511 is infinitely far from every codeword, which gives index 0, and squares of differences below some
    2^-537 are zero.
    """
    require_valid("vq_assign", given.codebook)
    return search(given.x, given.codebook, given.metric)


def search(x: torch.Tensor, codebook: torch.Tensor, metric: str) -> torch.Tensor:
    """Return the nearest codeword of each segment for a codebook that is valid."""
    x, codebook = x.detach(), codebook.detach()  # indices have no gradient
    d = codebook.shape[-1]
    segments = x.reshape(-1, x.shape[-1] // d, d)
    n, s = segments.shape[:2]
    indices = torch.empty(n, s, dtype=torch.int64, device=x.device)
    block = max(1, BLOCK_ELEMENTS // codebook.shape[-2])
    for segment in range(s):
        searched = (codebook if codebook.dim() == 2 else codebook[segment]).double()
        if metric == "cosine":
            searched = unit(searched)
        for start in range(0, n, block):
            rows = segments[start : start + block, segment].double()
            indices[start : start + block, segment] = argmin(rows, searched, metric)
    return indices.reshape(*x.shape[:-1], s)
