"""Measure finite scalar quantization, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch

from uefl_kernels import backend
from uefl_kernels.ops.fsq import fsq

from ..cases import BenchmarkCase, Call, Gate, Op

OpInputs = tuple[torch.Tensor, torch.Tensor, list[int]]
FsqFunction = Callable[[torch.Tensor, list[int]], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class FsqCase(BenchmarkCase):
    """N rows of d elements with the same number of levels."""

    n: int
    d: int
    levels: int

    @property
    def bytes(self) -> int:
        """Return the least bytes: z, quantized, both gradients and z again, and the indices."""
        return 20 * self.n * self.d + 4 * self.n

    @property
    def flops(self) -> int:
        """Return the operations: the comparisons, and ten for each element."""
        return self.n * self.d * (self.levels + 9)


def inputs(case: FsqCase, device: str) -> OpInputs:
    """Return z ``[N, d]`` (a leaf), a gradient, and the levels."""
    generator = torch.Generator().manual_seed(0)
    z, grad = (torch.randn(case.n, case.d, generator=generator).to(device) for _ in range(2))
    return z.requires_grad_(), grad, [case.levels] * case.d


def eager(z: torch.Tensor, levels: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the operations of the paper (appendix A.1), as vector-quantize-pytorch does."""
    counts = z.new_tensor(levels)
    half, offset = (counts - 1) * 1.001 / 2, torch.where(counts % 2 == 0, 0.5, 0.0)
    bounded = (z + (offset / half).atanh()).tanh() * half - offset
    quantized = bounded + (bounded.round() - bounded).detach()
    center = counts // 2
    factors = torch.cat([counts.new_ones(1), counts[:-1]]).cumprod(0).to(torch.int32)
    quantized = quantized / center
    return quantized, ((quantized * center + center).round().to(torch.int32) * factors).sum(-1)


def ours(z: torch.Tensor, levels: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return fsq(z, levels, symmetric=False, clamp=False, indexed=True)


def step(quantize: FsqFunction) -> Callable[[OpInputs], Call]:
    def prepare(given: OpInputs) -> Call:
        z, grad, levels = given

        def call() -> torch.Tensor:
            quantized, indices = quantize(z, levels)
            torch.autograd.grad(quantized, z, grad)
            return indices

        return call

    return prepare


def peer(given: OpInputs) -> Call:
    """Run the layer of vector-quantize-pytorch."""
    layer = import_module("vector_quantize_pytorch").FSQ(given[2])

    def quantize(z: torch.Tensor, levels: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, indices = layer(z.unsqueeze(0))
        return quantized.squeeze(0), indices.squeeze(0)

    return step(quantize)(given)


def compiled(given: OpInputs) -> Call:
    """Compile the eager form with static sizes, its best setting."""
    return step(torch.compile(eager, fullgraph=True, dynamic=False))(given)


def wrong_indices(given: OpInputs) -> Callable[[torch.Tensor], float]:
    """Count the indices that differ from the float64 definition."""
    z, _, levels = given
    with backend("reference"):
        _, expected = ours(z.detach().cpu(), levels)
    return partial(_differing, expected)


def _differing(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float((found.detach().cpu().view(-1) != expected).sum())


OPS = {
    "fsq": Op(
        cases=(FsqCase(4096, 6, 8), FsqCase(32768, 4, 8), FsqCase(262144, 5, 8)),
        smoke=FsqCase(40, 3, 5),
        inputs=inputs,
        providers={
            "uefl": step(ours),
            "eager": step(eager),
            "compiled": compiled,
            "vector-quantize-pytorch": peer,
        },
        gate=Gate("wrong indices", limit=0, against=wrong_indices),
        bytes=lambda case: case.bytes,
        flops=lambda case: case.flops,
        covers=("fsq_backward",),
    )
}
