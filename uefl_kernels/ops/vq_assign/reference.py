"""The definition of ``vq_assign``: a float64 evaluation in a fixed order, so that every backend can agree to
the bit."""

from __future__ import annotations

import numpy as np
import torch

# of an element of a codebook, or of what is clustered: the squares of 2^60 of them add up in float64
LARGEST = 2.0**480

# Rows are taken in blocks so that the distances of one block, not of all rows, are in memory.
BLOCK_ELEMENTS = 1 << 22


def vq_assign(x: torch.Tensor, codebook: torch.Tensor, metric: str, exact: bool) -> torch.Tensor:
    """x [..., D], codebook [K, d] or [S, K, d] -> indices [..., S] int64; ``exact`` is always true here.

    l2:     distance_k = sum over d of (x_d - c_kd)^2, the argmin
    cosine: score_k = sum over d of x_d * (c_kd / |c_k|), the argmax; a zero codeword scores 0

    Terms are rounded and added in float64 in the order d = 0, 1, ...; ties go to the lowest index; NaN never
    wins, so a row of NaN gets index 0. Squares overflow and underflow as float64 does: a row beyond some
    2^511 is infinitely far from every codeword, which gives index 0, and differences below some 2^-537 are
    none.
    """
    require_valid("vq_assign", codebook)
    return search(x, codebook, metric)


def require_valid(op: str, codebook: torch.Tensor) -> None:
    """Raise RuntimeError for codewords that cannot be searched; on the CPU only, a GPU would have to be
    waited for."""
    if codebook.device.type == "cpu" and not bool(
        (torch.isfinite(codebook) & (codebook.abs() <= LARGEST)).all()
    ):
        raise RuntimeError(
            f"{op}: the codebook holds NaN or infinity, or values beyond 2^480 (3e144), whose squares"
            " overflow; re-initialise those codewords (or lower the learning rate)"
        )


def search(x: torch.Tensor, codebook: torch.Tensor, metric: str) -> torch.Tensor:
    """``vq_assign`` of a codebook that is finite."""
    x, codebook = x.detach(), codebook.detach()  # indices have no gradient, so no graph is worth recording
    d = codebook.shape[-1]
    segments = x.reshape(-1, x.shape[-1] // d, d)
    n, s = segments.shape[:2]
    indices = torch.empty(n, s, dtype=torch.int64, device=x.device)
    block = max(1, BLOCK_ELEMENTS // codebook.shape[-2])
    for segment in range(s):
        codes = (codebook if codebook.dim() == 2 else codebook[segment]).double()
        if metric == "cosine":
            codes = unit(codes)
        for start in range(0, n, block):
            rows = segments[start : start + block, segment].double()
            indices[start : start + block, segment] = argmin(rows, codes, metric)
    return indices.reshape(*x.shape[:-1], s)


def argmin(rows: torch.Tensor, codes: torch.Tensor, metric: str) -> torch.Tensor:
    """rows [n, d], codes [K, d], both float64, the codes of length 1 for "cosine" -> indices [n]."""
    total = rows.new_zeros(rows.shape[0], codes.shape[0])
    for j in range(rows.shape[1]):
        value, code = rows[:, j, None], codes[:, j]
        if metric == "l2":
            difference = value - code
            total += difference * difference
        else:
            total -= value * code
    return total.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).argmin(1)


def unit(codes: torch.Tensor) -> torch.Tensor:
    """codes / |codes| of codes [K, d] float64, the norm summed in the order d = 0, 1, ...; a zero codeword stays zero."""
    square = codes.new_zeros(codes.shape[0])
    for j in range(codes.shape[1]):
        square += codes[:, j] * codes[:, j]
    norm = _sqrt(square)
    return torch.where(norm[:, None] == 0, 0.0, codes / norm[:, None])  # a NaN codeword stays NaN


def _sqrt(square: torch.Tensor) -> torch.Tensor:
    """Rounded correctly, as IEEE 754 asks: torch's own on the CPU may come from a vector library that is off
    by one ulp."""
    return torch.from_numpy(np.sqrt(square.numpy())) if square.device.type == "cpu" else square.sqrt()
