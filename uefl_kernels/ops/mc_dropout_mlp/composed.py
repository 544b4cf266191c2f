"""Masks, passes and gradient of ``mc_dropout_mlp`` in plain PyTorch.

Unit ``column`` of row ``row`` is kept in pass ``pass_`` and stream ``stream`` if its 16 random bits are at
least ``threshold(p)``. The bits are half a word of Philox4x32-10 with

    counter = (pass, row, stream, column // 8)    key = (seed mod 2^32, seed div 2^32)

Columns 8 c, 8 c + 1, 8 c + 2, ... take the low half of word 0, its high half, the low half of word 1, and
so on. With ``consistent=True`` the counter has row 0 for all rows. Stream i is the dropout before layer i of
the head; the last stream is the dropout on the logits. A dropped unit counts as zero, even if it
is not finite; a kept unit is scaled so that the expectation is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from ..._philox import philox

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_UNITS = 8  # columns that share a counter
Keep = Callable[[torch.Tensor, int, int, int, int, float, bool], torch.Tensor]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
    "silu": nn.functional.silu,
    "tanh": torch.tanh,
}
aten = torch.ops.aten
# arguments: the gradient, and the input of the activation
_SLOPES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gelu": aten.gelu_backward,
    "relu": lambda gradient, z: aten.threshold_backward(gradient, z, 0),
    "silu": aten.silu_backward,
    "tanh": lambda gradient, z: aten.tanh_backward(gradient, z.tanh()),
}


class Arguments(NamedTuple):
    """Arguments of the op."""

    x: torch.Tensor
    """``[B, widths[0]]``"""
    parameters: torch.Tensor
    """weights ``[out, in]`` and bias ``[out]`` of each layer, flat, one after the other"""
    widths: Sequence[int]
    """number of elements of the input, and of the output of each layer"""
    p: Sequence[float]
    """drop rate before each layer, and on the logits"""
    passes: int
    activation: str
    consistent: bool
    seed: torch.Tensor
    """scalar, int64"""


class Gradients(NamedTuple):
    """The first arguments of the backward op."""

    grad_mean: torch.Tensor
    grad_entropy: torch.Tensor
    grad_variance: torch.Tensor
    mean: torch.Tensor
    """the result of the forward pass"""


class Mask(NamedTuple):
    """Arguments of ``dropout_mask``."""

    seed: torch.Tensor
    rows: int
    columns: int
    pass_: int
    stream: int
    p: float
    consistent: bool


def threshold(p: float) -> int:
    """Return 65536 times the probability of dropping a unit.

    This probability differs from p by at most 2^-17 (p up to 1 - 2^-17).
    """
    return min(65535, round(p * 65536))


def scale(p: float) -> float:
    """Return the factor of a kept unit."""
    return 65536 / (65536 - threshold(p))


def dropout_mask(given: Mask) -> torch.Tensor:
    """Return bool ``[rows, columns]``, True where the unit is kept."""
    seed, rows, columns, pass_, stream, p, consistent = given
    row = torch.arange(rows, device=seed.device).unsqueeze(1)
    block = torch.arange(-(-columns // _UNITS), device=seed.device)
    constant = [torch.full_like(block, value) for value in (pass_, stream)]
    words = philox([constant[0], row * 0 if consistent else row, constant[1], block], seed)
    halves = [half.broadcast_to(rows, len(block)) for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).flatten(1)[:, :columns] >= threshold(p)


def layers(parameters: torch.Tensor, widths: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return weights [out, in] and bias [out] of each layer, as views of the flat parameters."""
    sizes = [(fan_in, fan_out) for fan_in, fan_out in pairwise(widths)]
    flat = parameters.split([size for fan_in, fan_out in sizes for size in (fan_in * fan_out, fan_out)])
    return [(flat[2 * i].view(fan_out, fan_in), flat[2 * i + 1]) for i, (fan_in, fan_out) in enumerate(sizes)]


def drop(given: Arguments, value: torch.Tensor, pass_: int, stream: int, keep: Keep) -> torch.Tensor:
    """Apply the dropout of one stream in one pass."""
    p = given.p[stream]
    if threshold(p) == 0:
        return value
    rows, columns = value.shape
    mask = Mask(given.seed, rows, columns, pass_, stream, p, given.consistent)
    return torch.where(keep(*mask), value * scale(p), 0.0)


def probs_of_passes(given: Arguments, keep: Keep) -> Iterator[torch.Tensor]:
    """Yield the probabilities ``[B, C]`` of each pass, in the dtype of x and the parameters."""
    head = layers(given.parameters, given.widths)
    for t in range(given.passes):
        hidden = given.x
        for i, (weight, bias) in enumerate(head):
            hidden = ACTIVATIONS[given.activation](hidden) if i > 0 else hidden
            hidden = nn.functional.linear(drop(given, hidden, t, i, keep), weight, bias)
        yield drop(given, hidden, t, len(head), keep).softmax(-1)


def mc_dropout_mlp_backward(gradients: Gradients, given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients with respect to x and the flat parameters, in their dtypes.

    Masks are drawn again pass by pass, so the forward pass keeps nothing. With l the logits of a pass, q
    their softmax and H its entropy:

    dL/dq = (grad_mean + 2 grad_variance (q - mean)) / passes
    dL/dl = q (dL/dq - <q, dL/dq>) - grad_entropy q (ln q + H) / passes
    """
    grad_mean, grad_entropy, grad_variance, mean = gradients
    x, parameters, widths, _, passes, activation, _, _ = given
    start = x.to(parameters.dtype)
    head = layers(parameters, widths)
    grad_x, grad_parameters = torch.zeros_like(start), torch.zeros_like(parameters)
    grad_head = layers(grad_parameters, widths)  # views, summed into

    keep: Keep = torch.ops.uefl.dropout_mask.default
    for t in range(passes):
        # for each layer: the input of the activation before the layer, and the input of the layer
        sums, inputs = [start], []
        for i, (weight, bias) in enumerate(head):
            inputs.append(drop(given, ACTIVATIONS[activation](sums[i]) if i > 0 else start, t, i, keep))
            sums.append(nn.functional.linear(inputs[i], weight, bias))
        log_q = drop(given, sums[-1], t, len(head), keep).log_softmax(-1)
        q = log_q.exp()
        grad_q = (grad_mean + 2 * grad_variance * (q - mean)) / passes
        entropy = torch.special.entr(q).sum(-1, keepdim=True)
        surprise = torch.where(q > 0, q * log_q, 0.0) + q * entropy
        gradient = (
            q * (grad_q - (q * grad_q).sum(-1, keepdim=True)) - grad_entropy.unsqueeze(-1) / passes * surprise
        )
        gradient = drop(given, gradient, t, len(head), keep)
        for i in reversed(range(len(head))):
            grad_head[i][0].addmm_(gradient.T, inputs[i])
            grad_head[i][1].add_(gradient.sum(0))
            gradient = drop(given, gradient @ head[i][0], t, i, keep)
            if i > 0:
                gradient = _SLOPES[activation](gradient, sums[i])
        grad_x += gradient
    return grad_x.to(x.dtype), grad_parameters
