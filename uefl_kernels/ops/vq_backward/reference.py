"""The definition of ``vq_backward``.

Straight through is in float32 (float64 if an input is float64), like autograd. Rotated is in float64.
"""

from __future__ import annotations

import torch

from ..._gather import gather
from . import Arguments

_EPS = 1e-6  # norms below it count as this, as in the published code


def vq_backward(given: Arguments) -> torch.Tensor:
    """Return the gradient with respect to x."""
    x, codebook, indices, grad_quantized, pull, rotation = given
    rotation = rotation and grad_quantized is not None
    wide = torch.float64 if rotation or torch.float64 in (x.dtype, codebook.dtype) else torch.float32
    codewords, segments = (
        gather(codebook, indices).to(wide),
        x.to(wide).unflatten(-1, (indices.shape[-1], -1)),
    )
    gradient = (segments - codewords) * pull.to(wide)
    if grad_quantized is not None:
        g = grad_quantized.to(wide).unflatten(-1, segments.shape[-2:])
        gradient = (rotated(segments, codewords, g) if rotation else g) + gradient
    return torch.empty_like(x).copy_(gradient.flatten(-2))


def rotated(x: torch.Tensor, q: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return lambda R^T g, ``[..., d]`` float64.

    lambda = |q| / |x|, R = 1 - 2 w w^T + 2 v u^T, and u, v, w are the unit vectors of x, q, u + v.

    Source: Fifty et al. 2024, "Restructuring Vector Quantization with the Rotation Trick", section 4.2.
    """
    xx, qq, xq, xg, qg = ((a * b).sum(-1, keepdim=True) for a, b in ((x, x), (q, q), (x, q), (x, g), (q, g)))
    q_norm = qq.sqrt()
    x_scale, q_scale = 1 / xx.sqrt().clamp(min=_EPS), 1 / q_norm.clamp(min=_EPS)
    sum_g = xg * x_scale + qg * q_scale
    sum_sum = xx * x_scale * x_scale + 2 * xq * x_scale * q_scale + qq * q_scale * q_scale
    ratio, mirror = q_norm * x_scale, sum_g / sum_sum.clamp(min=_EPS * _EPS)
    along, towards = 2 * ratio * x_scale * (qg * q_scale - mirror), -2 * ratio * q_scale * mirror
    return g * ratio + (x * along + q * towards)
