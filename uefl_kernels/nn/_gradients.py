"""How the gradient of the codeword reaches the input that it replaced."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_EPS = 1e-6


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        return quantized.view_as(quantized)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, quantized = (t.double() if t.dtype == torch.float64 else t.float() for t in ctx.saved_tensors)
        g = gradient.to(x.dtype)
        x_norm, q_norm = x.norm(dim=-1, keepdim=True), quantized.norm(dim=-1, keepdim=True)
        u, q = x / x_norm.clamp(min=_EPS), quantized / q_norm.clamp(min=_EPS)
        w = F.normalize(u + q, dim=-1, eps=_EPS)
        turned = g - 2 * w * (w * g).sum(-1, keepdim=True) + 2 * u * (q * g).sum(-1, keepdim=True)
        return (turned * (q_norm / x_norm.clamp(min=_EPS))).to(gradient.dtype), None


def rotate(x: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    """``quantized``, to the bit, whose gradient reaches x turned and scaled by what takes x to its codeword.

    Args:
        x: ``[..., d]``, what was quantised.
        quantized: ``[..., d]``, its codewords, of the same dtype; gets no gradient.

    Returns:
        ``[..., d]``. With lambda = |q| / |x|, u and v the unit vectors of x and q and w that of u + v, the codeword is
        lambda R x with R = 1 - 2 w w^T + 2 v u^T, held constant; so the gradient is lambda R^T times the one received,
        evaluated in float32 (float64 for float64).

    Source: Fifty et al. 2024, "Restructuring Vector Quantization with the Rotation Trick", section 4.2.

    Equivalent to: ``lambda.detach() * (R.detach() @ x)``, whose value has the rounding of the product.
    """
    result: torch.Tensor = _Rotation.apply(x, quantized.detach())
    return result
