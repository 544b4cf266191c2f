"""A training step of a VQ layer: forward, moving averages of the codewords, backward to the input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from uefl_kernels.nn import VectorQuantize

from ..registry import Call, Case, Gate, Op
from .vq import nearest

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Step(Case):
    """A batch of sequences of D elements each, and K codewords."""

    batch: int
    length: int
    dim: int
    k: int

    @property
    def elements(self) -> int:
        """Of the input."""
        return self.batch * self.length * self.dim


def gaussian(case: Step, device: str) -> Inputs:
    """x and the gradient that comes back [B, L, D], a codebook [K, D]: standard normal, the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((case.batch, case.length, case.dim), (case.batch, case.length, case.dim), (case.k, case.dim))
    x, grad, codebook = (torch.randn(size, generator=generator).to(device) for size in sizes)
    return x, grad, codebook


def train_step(layer_class: Callable[..., Any]) -> Callable[[Inputs], Call]:
    """Both layers have the same interface, the same defaults (rotation trick, moving averages) and the same result."""

    def prepare(inputs: Inputs) -> Call:
        x, grad, codebook = inputs
        layer = layer_class(dim=codebook.shape[1], codebook_size=codebook.shape[0]).to(x.device)
        layer.codebook = codebook
        leaf = x.detach().requires_grad_()

        def call() -> torch.Tensor | None:
            leaf.grad = None
            quantized, _, loss = layer(leaf)
            torch.autograd.backward((quantized, loss.sum()), (grad, None))
            return leaf.grad

        return call

    return prepare


def vector_quantize_pytorch(inputs: Inputs) -> Call:
    from vector_quantize_pytorch import VectorQuantize

    return train_step(VectorQuantize)(inputs)


def gradient_error(inputs: Inputs) -> Callable[[torch.Tensor], float]:
    """Relative error of the gradient of the first step; a row with a wrong codeword has a wrong gradient.

    Fifty et al. 2024, eq. 4: the gradient of the rotation that takes x to its codeword, plus that of the commitment loss.
    """
    x, grad, codebook = inputs
    q = codebook.double()[nearest(x, codebook)].reshape(x.shape)
    g, x = grad.double(), x.double()
    unit_x, unit_q = (v / v.norm(dim=-1, keepdim=True) for v in (x, q))
    half = torch.nn.functional.normalize(unit_x + unit_q, dim=-1)
    turned = g - 2 * half * (half * g).sum(-1, True) + 2 * unit_x * (unit_q * g).sum(-1, True)
    right = turned * q.norm(dim=-1, keepdim=True) / x.norm(dim=-1, keepdim=True) + 2 / x.numel() * (x - q)
    return lambda found: float((found.double() - right).norm() / right.norm())


OPS = {
    "layer": Op(
        cases=(Step(64, 1024, 256, 1024), Step(1024, 9, 512, 64)),
        smoke=Step(2, 3, 16, 5),
        inputs=gaussian,
        providers={"uefl": train_step(VectorQuantize), "vector-quantize-pytorch": vector_quantize_pytorch},
        gate=Gate("gradient error", limit=1e-5, against=gradient_error),
        # x read and codewords written, then gradient and x read and gradient written; the codebook read and written
        bytes=lambda case: 4 * (5 * case.elements + 2 * case.k * case.dim) + 8 * case.batch * case.length,
        flops=lambda case: 2 * case.elements * case.k,
        covers=("vq_backward",),
    ),
}
