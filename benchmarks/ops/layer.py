"""Measure a training step of a VQ layer: forward, moving averages of the codewords, backward to x.

The layers are plain, compiled and residual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from uefl_kernels.nn import ResidualVQ, VectorQuantize

from ..cases import BenchmarkCase, Call, Gate, Op
from .vq import nearest

OpInputs = tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]
ESTIMATORS = ("rotation", "straight_through")


@dataclass(frozen=True)
class LayerStep(BenchmarkCase):
    """A batch of sequences of vectors with D elements, and K codewords for each quantizer.

    The gradient estimator is ``rotation``, the default of both layers, or ``straight_through``.
    """

    batch: int
    length: int
    dim: int
    k: int
    estimator: str = "rotation"
    quantizers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimator not in ESTIMATORS:
            raise ValueError(
                f"estimator {self.estimator!r} is not known, expected one of {', '.join(ESTIMATORS)}"
            )

    @property
    def elements(self) -> int:
        """Return the number of elements of the input."""
        return self.batch * self.length * self.dim

    @property
    def bytes(self) -> int:
        """Return the least bytes that a step moves.

        These are x twice, the quantized vectors, both gradients, the codebooks twice (read and written), and
        the indices.
        """
        return (
            4 * (5 * self.elements + 2 * self.quantizers * self.k * self.dim)
            + 8 * self.quantizers * self.batch * self.length
        )

    @property
    def flops(self) -> int:
        """Return the operations of the searches."""
        return 2 * self.elements * self.k * self.quantizers


def gaussian(case: LayerStep, device: str) -> OpInputs:
    """Return the estimator, x and its upstream gradient [B, L, D], and codebooks [Q, K, D].

    Values are standard normal and seeded.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = (
        (case.batch, case.length, case.dim),
        (case.batch, case.length, case.dim),
        (case.quantizers, case.k, case.dim),
    )
    x, grad, codebooks = (torch.randn(size, generator=generator).to(device) for size in sizes)
    return case.estimator, x, grad, codebooks


def train_step(
    layer_class: Callable[..., Any], compiler: Callable[[Any], Any] = lambda layer: layer
) -> Callable[[OpInputs], Call]:
    """Prepare a training step.

    The layers of both libraries have the same interface, defaults (moving averages) and result.
    """

    def prepare(inputs: OpInputs) -> Call:
        estimator, x, grad, codebooks = inputs
        count, k, d = codebooks.shape
        several = {"num_quantizers": count} if count > 1 else {}
        layer = layer_class(dim=d, codebook_size=k, rotation_trick=estimator == "rotation", **several).to(
            x.device
        )
        for quantizer, codebook in zip(layer.layers if several else [layer], codebooks, strict=True):
            quantizer.codebook = codebook
        run, leaf = compiler(layer), x.detach().requires_grad_()

        def call() -> torch.Tensor | None:
            leaf.grad = None
            quantized, _, loss = run(leaf)
            torch.autograd.backward((quantized, loss.sum()), (grad, None))
            return leaf.grad

        return call

    return prepare


def vector_quantize_pytorch(
    name: str, compiler: Callable[[Any], Any] = lambda layer: layer
) -> Callable[[OpInputs], Call]:
    """Return the peer's layer of that name."""

    def prepare(inputs: OpInputs) -> Call:
        return train_step(getattr(import_module("vector_quantize_pytorch"), name), compiler)(inputs)

    return prepare


def gradient_error(inputs: OpInputs) -> Callable[[torch.Tensor], float]:
    """Return the relative error of the gradient of the first step.

    A row with a wrong codeword has a wrong gradient.

    The gradient is the sum of two terms: the gradient of the commitment loss, and the incoming gradient,
    possibly rotated by the rotation from x to its codeword (Fifty et al. 2024, eq. 4). With several
    quantizers the terms are summed over all of them. The x of each one is the float32 residual of the
    quantizers before it.
    """
    estimator, x, grad, codebooks = inputs
    right = torch.zeros_like(x, dtype=torch.float64)
    for codebook in codebooks:
        q = codebook[nearest(x, codebook)].reshape(x.shape)
        right += (
            _turned(grad.double(), x.double(), q.double()) if estimator == "rotation" else grad
        ) + 2 / x.numel() * (x - q).double()
        x = x - q
    return lambda found: float((found.double() - right).norm() / right.norm())


def _turned(g: torch.Tensor, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    unit_x, unit_q = (v / v.norm(dim=-1, keepdim=True) for v in (x, q))
    half = torch.nn.functional.normalize(unit_x + unit_q, dim=-1)
    turned = g - 2 * half * (half * g).sum(-1, True) + 2 * unit_x * (unit_q * g).sum(-1, True)
    return turned * q.norm(dim=-1, keepdim=True) / x.norm(dim=-1, keepdim=True)


def row(
    cases: tuple[LayerStep, ...],
    smoke: LayerStep,
    providers: dict[str, Callable[[OpInputs], Call]],
    covers: tuple[str, ...] = (),
) -> Op[LayerStep]:
    return Op(
        cases=cases,
        smoke=smoke,
        inputs=gaussian,
        providers=providers,
        gate=Gate("gradient error", limit=1e-5, against=gradient_error),
        bytes=lambda case: case.bytes,
        flops=lambda case: case.flops,
        covers=covers,
    )


PEER = "vector-quantize-pytorch"
OPS = {
    "layer": row(
        cases=(
            LayerStep(64, 1024, 256, 1024),
            LayerStep(1024, 9, 512, 64),
            LayerStep(1024, 9, 512, 64, "straight_through"),
        ),
        smoke=LayerStep(2, 3, 16, 5),
        providers={"uefl": train_step(VectorQuantize), PEER: vector_quantize_pytorch("VectorQuantize")},
        covers=("vq_backward", "ema_update"),
    ),
    "layer_compiled": row(  # torch.compile with the default backend; the peer has graph breaks
        cases=(LayerStep(64, 1024, 256, 1024), LayerStep(1024, 9, 512, 64)),
        smoke=LayerStep(2, 3, 16, 5),
        providers={
            "uefl": train_step(VectorQuantize, partial(torch.compile, fullgraph=True)),
            PEER: vector_quantize_pytorch("VectorQuantize", torch.compile),
        },
    ),
    "residual_vq": row(  # frames of eight seconds of an audio codec
        cases=(LayerStep(16, 600, 128, 1024, quantizers=8),),
        smoke=LayerStep(2, 3, 16, 5, quantizers=3),
        providers={"uefl": train_step(ResidualVQ), PEER: vector_quantize_pytorch("ResidualVQ")},
    ),
}
