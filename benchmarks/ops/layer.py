"""A training step of a VQ layer: forward, moving averages of the codewords, backward to the input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from uefl_kernels.nn import VectorQuantize

from ..registry import Call, Case, Gate, Op
from .vq import nearest

Inputs = tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]
ESTIMATORS = ("rotation", "straight_through")


@dataclass(frozen=True)
class Step(Case):
    """A batch of sequences of D elements each, and K codewords; the estimator is both layers' default or the plain one."""

    batch: int
    length: int
    dim: int
    k: int
    estimator: str = "rotation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"estimator {self.estimator!r} is not known, expected one of {', '.join(ESTIMATORS)}")

    @property
    def elements(self) -> int:
        """Of the input."""
        return self.batch * self.length * self.dim


def gaussian(case: Step, device: str) -> Inputs:
    """The estimator; x and the gradient that comes back [B, L, D], a codebook [K, D]: standard normal, the same numbers everywhere."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((case.batch, case.length, case.dim), (case.batch, case.length, case.dim), (case.k, case.dim))
    x, grad, codebook = (torch.randn(size, generator=generator).to(device) for size in sizes)
    return case.estimator, x, grad, codebook


def train_step(layer_class: Callable[..., Any]) -> Callable[[Inputs], Call]:
    """Both layers have the same interface, the same defaults (moving averages) and the same result."""

    def prepare(inputs: Inputs) -> Call:
        estimator, x, grad, codebook = inputs
        k, d = codebook.shape
        layer = layer_class(dim=d, codebook_size=k, rotation_trick=estimator == "rotation").to(x.device)
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

    Plus that of the commitment loss, it is the gradient given, or turned by the rotation that takes x to its codeword (Fifty et al.
    2024, eq. 4).
    """
    estimator, x, grad, codebook = inputs
    q = codebook.double()[nearest(x, codebook)].reshape(x.shape)
    g, x = grad.double(), x.double()
    unit_x, unit_q = (v / v.norm(dim=-1, keepdim=True) for v in (x, q))
    half = torch.nn.functional.normalize(unit_x + unit_q, dim=-1)
    turned = g - 2 * half * (half * g).sum(-1, True) + 2 * unit_x * (unit_q * g).sum(-1, True)
    scaled = turned * q.norm(dim=-1, keepdim=True) / x.norm(dim=-1, keepdim=True)
    right = (scaled if estimator == "rotation" else g) + 2 / x.numel() * (x - q)
    return lambda found: float((found.double() - right).norm() / right.norm())


OPS = {
    "layer": Op(
        cases=(Step(64, 1024, 256, 1024), Step(1024, 9, 512, 64), Step(1024, 9, 512, 64, "straight_through")),
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
