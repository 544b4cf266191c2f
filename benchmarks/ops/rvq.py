"""Measure residual vector quantization of a few rows, as audio codecs run it while they stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from uefl_kernels import rvq, vq
from uefl_kernels.nn import ResidualVQ

from ..cases import BenchmarkCase, Call, Gate, Op
from .vq import nearest

OpInputs = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Frames(BenchmarkCase):
    """N rows of D elements, and K codewords in each of Q stages."""

    n: int
    dim: int
    k: int
    quantizers: int

    @property
    def bytes(self) -> int:
        """Return the least bytes: rows and codewords read, quantized rows and indices written."""
        return 4 * self.dim * (2 * self.n + self.quantizers * self.k) + 8 * self.n * self.quantizers

    @property
    def flops(self) -> int:
        """Return the operations of the searches."""
        return 2 * self.n * self.dim * self.k * self.quantizers


def gaussian(case: Frames, device: str) -> OpInputs:
    """Return x [N, D], standard normal, and the random codebooks [Q, K, D] of a good residual quantizer.

    The residual of a stage with K codewords is r = K^(-1/D) times as large as the input of the stage. So the
    variance of the codewords is 1 - r^2 times the variance of the input (Equitz and Cover 1991, "Successive
    Refinement of Information", theorem 3).
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.n, case.dim, generator=generator)
    codebooks = torch.randn(case.quantizers, case.k, case.dim, generator=generator)
    rest = case.k ** (-1 / case.dim)
    codebooks *= (1 - rest**2) ** 0.5 * rest ** torch.arange(case.quantizers)[:, None, None]
    return x.to(device), codebooks.to(device)


def op(inputs: OpInputs) -> Call:
    x, codebooks = inputs
    return lambda: rvq(x, codebooks).indices


def stages(inputs: OpInputs) -> Call:
    """Run one ``vq`` after the other."""
    x, codebooks = inputs

    def call() -> torch.Tensor:
        residual, total, indices = x, torch.zeros_like(x), []
        for codebook in codebooks:
            out = vq(residual, codebook)
            residual, total = residual - out.quantized, total + out.quantized
            indices.append(out.indices[..., 0])
        return torch.stack(indices, -1)

    return call


def layer(layer_class: Callable[..., Any]) -> Callable[[OpInputs], Call]:
    """Prepare a layer in evaluation mode.

    Both libraries have the same interface.
    """

    def prepare(inputs: OpInputs) -> Call:
        x, codebooks = inputs
        count, k, d = codebooks.shape
        built = layer_class(dim=d, codebook_size=k, num_quantizers=count).to(x.device).eval()
        for quantizer, codebook in zip(built.layers, codebooks, strict=True):
            quantizer.codebook = codebook
        batch = x.unsqueeze(0)

        def call() -> torch.Tensor:
            with torch.inference_mode():
                indices: torch.Tensor = built(batch)[1]
            return indices

        return call

    return prepare


def peer(inputs: OpInputs) -> Call:
    """Run the layer of vector-quantize-pytorch."""
    return layer(import_module("vector_quantize_pytorch").ResidualVQ)(inputs)


def wrong_rate(inputs: OpInputs) -> Callable[[torch.Tensor], float]:
    """Return the share of indices that are not the float64 argmin, stage by stage on the float32 residual."""
    x, codebooks = inputs
    indices = []
    for codebook in codebooks:
        indices.append(nearest(x, codebook))
        x = x - codebook[indices[-1]]
    right = torch.stack(indices, -1)
    return lambda found: float((found.view_as(right) != right).double().mean())


CODECS = ((128, 1024, 8), (8, 1024, 9), (256, 2048, 32))  # EnCodec, DAC, Mimi

OPS = {
    "rvq": Op(
        cases=tuple(Frames(n, *codec) for codec in CODECS for n in (1, 8, 64)),
        smoke=Frames(3, 8, 5, 2),
        inputs=gaussian,
        providers={
            "uefl": op,
            "uefl-layer": layer(ResidualVQ),
            "uefl-stages": stages,
            "vector-quantize-pytorch": peer,
        },
        gate=Gate("wrong indices", limit=0.0, against=wrong_rate),
        bytes=lambda case: case.bytes,
        flops=lambda case: case.flops,
    )
}
