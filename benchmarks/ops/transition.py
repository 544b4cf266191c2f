"""Measure losses for learning from sets, forward and backward.

These are the transition, the set probabilities, the published loss, and the set proportions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from uefl_kernels import (
    backend,
    log_transition_probs,
    set_proportion_loss,
    transition_double_softmax,
    transition_nll,
)

from ..cases import BenchmarkCase, Call, Gate, Op

OpInputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class TransitionCase(BenchmarkCase):
    """B logits of K classes, M sets."""

    b: int
    k: int
    m: int

    @property
    def bytes(self) -> int:
        """Return the least bytes: float32 logits, gradient, targets, losses and the matrix, once each."""
        return 8 * self.b * self.k + 12 * self.b + 4 * self.m * self.k

    @property
    def flops(self) -> int:
        """Return the operations of a loss and its gradient.

        Each has one exponential and two multiply-adds per logit.
        """
        return 8 * self.b * self.k


def inputs(case: TransitionCase, device: str) -> OpInputs:
    """Return the inputs of a loss of M sets of similar size.

    These are logits (a leaf), targets, log_transition, log_marginal, the priors of each set, and
    offsets.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(case.b, case.k, generator=generator)
    targets = torch.randint(case.m, (case.b,), generator=generator)
    matrix = torch.rand(case.m, case.k, generator=generator).log()
    offsets = torch.arange(case.m + 1) * case.b // case.m
    tensors = logits, targets, matrix, matrix.logsumexp(0), matrix.softmax(1), offsets
    moved = tuple(tensor.to(device) for tensor in tensors)
    moved[0].requires_grad_()
    return moved


def step(loss: Callable[..., torch.Tensor], compiled: bool = False) -> Callable[[OpInputs], Call]:
    """Compute the mean loss and the gradient of the logits, as a training step does."""

    def prepare(given: OpInputs) -> Call:
        function = torch.compile(loss, fullgraph=True) if compiled else loss

        def call() -> torch.Tensor:
            (gradient,) = torch.autograd.grad(function(*given).mean(), given[0])
            return gradient

        return call

    return prepare


def largest_error(loss: Callable[..., torch.Tensor]) -> Callable[[OpInputs], Callable[[torch.Tensor], float]]:
    """Return the largest error of a gradient against the reference, in units of the largest gradient."""

    def against(given: OpInputs) -> Callable[[torch.Tensor], float]:
        with backend("reference"):
            (truth,) = torch.autograd.grad(loss(*given).mean(), given[0])
        return lambda found: float((found - truth).abs().max() / truth.abs().max())

    return against


def nll(
    z: torch.Tensor, y: torch.Tensor, matrix: torch.Tensor, marginal: torch.Tensor, *_: torch.Tensor
) -> torch.Tensor:
    return transition_nll(z, y, matrix, log_marginal=marginal)


def eager_nll(
    z: torch.Tensor, y: torch.Tensor, matrix: torch.Tensor, marginal: torch.Tensor, *_: torch.Tensor
) -> torch.Tensor:
    """Compose a loss that is as stable as ours, in as few steps as we know."""
    return (z + marginal).logsumexp(1) - (z + matrix[y]).logsumexp(1)


def published_nll(z: torch.Tensor, y: torch.Tensor, matrix: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """Compute the loss through probabilities, as the method is published: infinite where they underflow."""
    g = z.softmax(1) @ matrix.exp().T
    return torch.nn.functional.nll_loss((g / g.sum(1, keepdim=True)).log(), y, reduction="none")


def probs(
    z: torch.Tensor, y: torch.Tensor, matrix: torch.Tensor, marginal: torch.Tensor, *_: torch.Tensor
) -> torch.Tensor:
    return log_transition_probs(z, matrix, log_marginal=marginal).square()


def eager_probs(
    z: torch.Tensor, y: torch.Tensor, matrix: torch.Tensor, marginal: torch.Tensor, *_: torch.Tensor
) -> torch.Tensor:
    """Multiply probabilities: fast, and infinite where they underflow."""
    g = z.softmax(1) @ matrix.exp().T
    return (g / g.sum(1, keepdim=True)).log().square()


def double(
    z: torch.Tensor, y: torch.Tensor, matrix: torch.Tensor, marginal: torch.Tensor, *_: torch.Tensor
) -> torch.Tensor:
    return transition_double_softmax(z, y, matrix, log_marginal=marginal)


def eager_double(z: torch.Tensor, y: torch.Tensor, matrix: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """Run the published steps.

    They may use probabilities, because the loss takes no logarithm of them.
    """
    g = z.softmax(1) @ matrix.exp().T
    return torch.nn.functional.cross_entropy(g / g.sum(1, keepdim=True), y, reduction="none")


def sets(
    z: torch.Tensor,
    y: torch.Tensor,
    m: torch.Tensor,
    s: torch.Tensor,
    shares: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    return set_proportion_loss(z, offsets, shares)


def eager_sets(
    z: torch.Tensor,
    y: torch.Tensor,
    m: torch.Tensor,
    s: torch.Tensor,
    shares: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Compute all sets at once with a segmented sum."""
    sizes = offsets.diff()
    owner = torch.repeat_interleave(sizes, output_size=len(z))
    totals = torch.zeros_like(shares).index_add(0, owner, z.softmax(1))
    return -(shares * (totals / sizes[:, None]).log()).sum(1)


def row(
    ours: Callable[..., torch.Tensor],
    peers: dict[str, Callable[..., torch.Tensor]],
    *cases: TransitionCase,
    covers: tuple[str, ...] = (),
) -> Op[TransitionCase]:
    providers = {"uefl": step(ours)} | {name: step(peer) for name, peer in peers.items()}
    return Op(
        cases=cases,
        smoke=TransitionCase(40, 7, 3),
        inputs=inputs,
        providers=providers | {"compiled": step(next(iter(peers.values())), compiled=True)},
        gate=Gate("gradient error", limit=1e-5, against=largest_error(ours)),
        bytes=lambda case: case.bytes,
        flops=lambda case: case.flops,
        covers=covers,
    )


TRAINING = (
    TransitionCase(128, 10, 10),
    TransitionCase(128, 10, 40),
    TransitionCase(4096, 10, 40),
    TransitionCase(100_000, 10, 10),
    TransitionCase(1024, 1000, 100),
)

OPS = {
    "transition_nll": row(nll, {"eager": eager_nll, "published": published_nll}, *TRAINING),
    "log_transition_probs": row(
        probs, {"eager": eager_probs}, *TRAINING[:3], covers=("log_transition_probs_backward",)
    ),
    "transition_double_softmax": row(double, {"eager": eager_double}, *TRAINING[:3]),
    "set_proportion_loss": row(
        sets,
        {"eager": eager_sets},
        TransitionCase(720, 10, 1),
        TransitionCase(7200, 10, 10),
        TransitionCase(36_000, 10, 50),
    ),
}
