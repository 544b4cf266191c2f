"""How the gradient of the codeword reaches the input that it replaced."""

from __future__ import annotations

from typing import Any

import torch

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
        x_norm, q_norm = (t.norm(dim=-1, keepdim=True) for t in (x, quantized))
        x_scale, q_scale = 1 / x_norm.clamp(min=_EPS), 1 / q_norm.clamp(min=_EPS)
        ratio = q_norm * x_scale
        both = (x * x_scale).addcmul_(quantized, q_scale)  # u + v; the only other tensor of the size of x is the result
        towards = (both * g).sum(-1, keepdim=True) / both.norm(dim=-1, keepdim=True).clamp(min=_EPS).square()
        back = (quantized * g).sum(-1, keepdim=True) * q_scale * x_scale
        turned = (g * ratio).addcmul_(both, -2 * ratio * towards).addcmul_(x, 2 * ratio * back)
        return turned.to(gradient.dtype), None


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
