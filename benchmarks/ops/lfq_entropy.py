"""Measure the entropies of lookup-free quantization, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from uefl_kernels import backend
from uefl_kernels.ops.lfq_entropy import lfq_entropy

from ..cases import BenchmarkCase, Call, Gate, Op

OpInputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class LfqCase(BenchmarkCase):
    """N rows of d bits, so 2^d codes."""

    n: int
    bits: int

    @property
    def bytes(self) -> int:
        """Return the least bytes: float32 rows and gradient, and the mean of each code and its gradient."""
        return 8 * self.n * self.bits + 8 * 2**self.bits

    @property
    def flops(self) -> int:
        """Return the operations: ten for each pair of a row and a code, forward and backward."""
        return 10 * self.n * 2**self.bits


def inputs(case: LfqCase, device: str) -> OpInputs:
    """Return rows ``[N, 1, d]`` (a leaf) and the codes ``[2^d, d]``."""
    generator = torch.Generator().manual_seed(0)
    rows = 20 * torch.randn(case.n, 1, case.bits, generator=generator)
    bits = torch.arange(2**case.bits).unsqueeze(-1) >> torch.arange(case.bits - 1, -1, -1) & 1
    return rows.to(device).requires_grad_(), (2.0 * bits - 1).to(device)


def eager(rows: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute all probabilities, as vector-quantize-pytorch does."""
    probs = (rows @ codes.t()).softmax(-1)
    return -(probs * probs.clamp(min=1e-5).log()).sum(-1).mean(), probs.mean(0)


def step(entropies: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[[OpInputs], Call]:
    def prepare(given: OpInputs) -> Call:
        rows, codes = given

        def call() -> torch.Tensor:
            entropy, mean = entropies(rows, codes)
            loss = entropy + (mean * mean.clamp(min=1e-5).log()).sum()
            (gradient,) = torch.autograd.grad(loss, rows)
            return gradient

        return call

    return prepare


def ours(rows: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return lfq_entropy(rows)


def largest_error(given: OpInputs) -> Callable[[torch.Tensor], float]:
    """Compare a gradient with the float64 reference, relative to its largest element."""
    rows, codes = given
    leaf = rows.detach().cpu().double().requires_grad_()
    with backend("reference"):
        expected = step(ours)((leaf, codes.cpu().double()))()
    size = float(expected.abs().max())
    return lambda found: float((found.cpu().double() - expected).abs().max()) / size


OPS = {
    "lfq_entropy": Op(
        cases=(LfqCase(4096, 10), LfqCase(1024, 14), LfqCase(256, 16)),
        smoke=LfqCase(40, 5),
        inputs=inputs,
        providers={"uefl": step(ours), "eager": step(eager)},
        gate=Gate("gradient error", limit=1e-5, against=largest_error),
        bytes=lambda case: case.bytes,
        flops=lambda case: case.flops,
        covers=("lfq_entropy_backward",),
    )
}
