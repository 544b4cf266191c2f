"""Compare Monte Carlo dropout of a head (``mc_dropout_mlp``) and of a classifier (``MCDropout``) with loops.

``linear`` is the product before the first dropout of a head.

No two providers draw the same masks. The gate compares our result with the float64 definition on the same
seed. The error of a peer is the distance of its mean probabilities from the mean probabilities of the
definition. This distance is sampling noise, of order 1 / sqrt(passes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet18

from uefl_kernels import MCStats, backend, mc_dropout_mlp
from uefl_kernels.nn import MCDropout
from uefl_kernels.ops.linear import linear

from ..cases import BenchmarkCase, Call, Gate, Op, needs

OpInputs = tuple["HeadCase", torch.Tensor, list[torch.Tensor], list[torch.Tensor]]
CHECKED_ROWS = 200


@dataclass(frozen=True)
class HeadCase(BenchmarkCase):
    """B rows, Linear to H units, GELU, dropout 0.1, Linear to C classes, T passes."""

    batch: int
    inputs: int
    hidden: int
    classes: int
    passes: int

    @property
    def bytes(self) -> int:
        """Return the bytes of rows and weights read once and statistics written once, in float32."""
        weights = self.hidden * (self.inputs + 1) + self.classes * (self.hidden + 1)
        return 4 * (self.batch * self.inputs + weights + self.batch * (2 * self.classes + 3))

    @property
    def flops(self) -> int:
        """Return the operations of the first layer once and of the second layer for every pass.

        Random bits are not counted.
        """
        return 2 * self.batch * self.hidden * (self.inputs + self.passes * self.classes)


def gaussian(case: HeadCase, device: str) -> OpInputs:
    """Return rows and weights of a head, the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    fans = ((case.inputs, case.hidden), (case.hidden, case.classes))
    x = torch.randn(case.batch, case.inputs, generator=generator)
    weights = [torch.randn(fan_out, fan_in, generator=generator) * fan_in**-0.5 for fan_in, fan_out in fans]
    biases = [torch.zeros(fan_out) for _, fan_out in fans]
    return case, x.to(device), [weight.to(device) for weight in weights], [bias.to(device) for bias in biases]


def against(inputs: OpInputs, consistent: bool = False) -> Callable[[MCStats], float]:
    """Return the largest deviation of the mean probabilities of the first rows from the definition.

    Both use the same masks.
    """
    case, x, weights, biases = inputs
    hidden = F.gelu(F.linear(x[:CHECKED_ROWS], weights[0], biases[0]))
    with backend("reference"):
        options = {"passes": case.passes, "input_dropout": True, "consistent": consistent, "seed": 0}
        truth = mc_dropout_mlp(hidden, weights[1:], biases[1:], p=0.1, **options).mean_probs
    return lambda found: float((found.mean_probs[:CHECKED_ROWS].double() - truth.double()).abs().max())


def ours(consistent: bool = False) -> Callable[[OpInputs], Call]:
    """Prepare our kernel, with one mask per row or one for all rows."""

    def prepare(inputs: OpInputs) -> Call:
        case, x, weights, biases = inputs
        return lambda: mc_dropout_mlp(
            x, weights, biases, p=0.1, passes=case.passes, consistent=consistent, seed=0
        )

    return prepare


def deterministic(inputs: OpInputs) -> Call:
    """Run one pass of the head with dropout off, and its softmax: a lower bound."""
    _, x, weights, biases = inputs

    def call() -> None:
        F.linear(F.gelu(F.linear(x, weights[0], biases[0])), weights[1], biases[1]).softmax(-1)

    return call


def _statistics(probs: list[torch.Tensor]) -> MCStats:
    stack = torch.stack(probs)
    mean = stack.mean(0)
    entropy, expected = torch.special.entr(mean).sum(-1), torch.special.entr(stack).sum(-1).mean(0)
    return MCStats(mean, entropy, expected, entropy - expected, stack.var(0, correction=0))


def shared_prefix(inputs: OpInputs) -> Call:
    """Run a torch loop that computes the part before the dropout once."""
    case, x, weights, biases = inputs

    def call() -> MCStats:
        hidden = F.gelu(F.linear(x, weights[0], biases[0]))
        return _statistics(
            [F.linear(F.dropout(hidden, 0.1), weights[1], biases[1]).softmax(-1) for _ in range(case.passes)]
        )

    return call


def whole_passes(inputs: OpInputs) -> Call:
    """Run a torch loop over whole passes, the usual way."""
    case, x, weights, biases = inputs

    def head() -> torch.Tensor:
        return F.linear(
            F.dropout(F.gelu(F.linear(x, weights[0], biases[0])), 0.1), weights[1], biases[1]
        ).softmax(-1)

    return lambda: _statistics([head() for _ in range(case.passes)])


def on_gpu(name: str) -> Callable[[OpInputs], Call]:
    """Run our kernel on one backend of the GPU."""

    def prepare(inputs: OpInputs) -> Call:
        needs("cuda", inputs[1])
        call = ours()(inputs)

        def forced() -> MCStats:
            with backend(name):
                return call()

        return forced

    return prepare


@dataclass(frozen=True)
class ImageCase(BenchmarkCase):
    """B square images into a ResNet-18 with dropout 0.1 before its last layer, T passes."""

    batch: int
    pixels: int
    passes: int

    @property
    def bytes(self) -> int:
        """Return the bytes of images and weights read once, in float32."""
        return 4 * (self.batch * 3 * self.pixels**2 + 11_181_642)

    @property
    def flops(self) -> int:
        """Return the operations of the convolutions once and of the last layer for every pass.

        The convolutions have 1.81 GMAC at 224 x 224.
        """
        return 2 * self.batch * (1_810_000_000 * self.pixels**2 // 224**2 + self.passes * 512 * 10)


def images(case: ImageCase, device: str) -> tuple[ImageCase, nn.Module, torch.Tensor]:
    """Return weights and images, the same on every device."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = resnet18(num_classes=10)
        model.fc = nn.Sequential(nn.Dropout(0.1), model.fc)
        x = torch.randn(case.batch, 3, case.pixels, case.pixels)
    return case, model.to(device).eval(), x.to(device)


def around(inputs: tuple[ImageCase, nn.Module, torch.Tensor]) -> Call:
    """Return MCDropout around the model."""
    case, model, x = inputs
    wrapped = MCDropout(model, case.passes)
    return lambda: torch.no_grad()(wrapped)(x, seed=0)


def against_reference(inputs: tuple[ImageCase, nn.Module, torch.Tensor]) -> Callable[[MCStats], float]:
    """Return the largest error of the mean probabilities against the float64 definition.

    Both use the same features.
    """
    with backend("reference"):
        truth = around(inputs)().mean_probs
    return lambda found: float((found.mean_probs.double() - truth.double()).abs().max())


def one_forward_pass(inputs: tuple[ImageCase, nn.Module, torch.Tensor]) -> Call:
    """Run one pass of the model with dropout off, and its softmax: a lower bound."""
    _, model, x = inputs

    def call() -> None:
        with torch.no_grad():
            model(x).softmax(-1)

    return call


def every_pass(inputs: tuple[ImageCase, nn.Module, torch.Tensor]) -> Call:
    """Run a torch loop over forward passes with dropout on and batch norm in evaluation mode."""
    case, model, x = inputs

    @torch.no_grad()
    def call() -> MCStats:
        model.get_submodule("fc").train()
        stats = _statistics([model(x).softmax(-1) for _ in range(case.passes)])
        model.eval()
        return stats

    return call


@dataclass(frozen=True)
class Product(BenchmarkCase):
    """N rows of D inputs to M units: what comes before the first dropout of a head."""

    rows: int
    inputs: int
    units: int


def operands(case: Product, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, weights and bias, the same numbers on every device."""
    _, x, (weight, _), (bias, _) = gaussian(HeadCase(case.rows, case.inputs, case.units, 1, 1), device)
    return x, weight, bias


def by_our_product(inputs: tuple[torch.Tensor, ...]) -> Call:
    """Run our kernel, with AMX if the CPU has it."""
    x, weight, bias = inputs
    needs("cpu", x)
    return lambda: linear(x, weight, bias)


def by_torch(inputs: tuple[torch.Tensor, ...]) -> Call:
    """Run torch's product in float32."""
    return lambda: F.linear(*inputs)


def against_float64(inputs: tuple[torch.Tensor, ...]) -> Callable[[torch.Tensor], float]:
    """Return the largest error of the first rows relative to the sum of the magnitudes of the terms."""
    x, weight, bias = (operand.double() for operand in inputs)
    truth = F.linear(x[:CHECKED_ROWS], weight, bias)
    size = F.linear(x[:CHECKED_ROWS].abs(), weight.abs(), bias.abs())
    return lambda found: float(((found[:CHECKED_ROWS] - truth).abs() / size).max())


OPS = {
    "linear": Op(
        cases=(Product(10_000, 512, 512), Product(2_000, 4_608, 512)),
        smoke=Product(520, 130, 65),
        inputs=operands,
        providers={"uefl": by_our_product, "torch": by_torch},
        gate=Gate("largest error by the size of the terms", limit=1e-6, against=against_float64),
        bytes=lambda case: (
            4 * (case.rows * case.inputs + case.units * (case.inputs + 1) + case.rows * case.units)
        ),
        flops=lambda case: 2 * case.rows * case.inputs * case.units,
    ),
    "mc_dropout": Op(
        cases=(ImageCase(64, 64, 20),),
        smoke=ImageCase(2, 32, 3),
        inputs=images,
        providers={"uefl": around, "one-forward-pass": one_forward_pass, "torch-whole-passes": every_pass},
        gate=Gate("largest error of mean_probs", limit=1e-5, against=against_reference),
        bytes=lambda case: case.bytes,
        flops=lambda case: case.flops,
    ),
    "mc_dropout_mlp": Op(
        cases=(
            HeadCase(10_000, 512, 512, 10, 100),
            HeadCase(10_000, 512, 512, 10, 20),
            HeadCase(2_000, 4_608, 512, 10, 20),
        ),
        smoke=HeadCase(40, 16, 24, 10, 4),
        inputs=gaussian,
        providers={
            "uefl": ours(),
            "uefl-consistent": ours(consistent=True),
            "uefl-cuda": on_gpu("cuda"),
            "uefl-triton": on_gpu("triton"),
            "one-deterministic-pass": deterministic,
            "torch-shared-prefix": shared_prefix,
            "torch-whole-passes": whole_passes,
        },
        gate=Gate(
            "largest error of mean_probs",
            limit=1e-5,
            against=against,
            own={"uefl-consistent": partial(against, consistent=True)},
        ),
        covers=("dropout_mask", "mc_dropout_mlp_backward"),
        bytes=lambda case: case.bytes,
        flops=lambda case: case.flops,
    ),
}
