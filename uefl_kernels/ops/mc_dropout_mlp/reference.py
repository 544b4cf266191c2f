"""The definition of ``mc_dropout_mlp`` and of its masks, in plain PyTorch: float64, and integers that hold
32-bit words.

Unit ``column`` of row ``row`` is kept in pass ``pass_`` and stream ``stream`` when its 16 random bits are not
below ``threshold(p)``. The bits are a half of a word of Philox4x32-10 with

    counter = (pass, row, stream, column // 8)    key = (seed mod 2^32, seed div 2^32)

columns 8 c, 8 c + 1, 8 c + 2, ... taking the low half of word 0, its high half, the low half of word 1, and
so on. With ``consistent=True`` the row of the counter is 0 for all rows. Stream i is the dropout before layer
i of the head, and the last stream that on the logits. A unit that is dropped counts as zero, even if it is
not finite; one that is kept is scaled so that the expectation is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import nn

from ..._philox import philox

UNITS = 8
Stats = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Keep = Callable[[torch.Tensor, int, int, int, int, float, bool], torch.Tensor]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
    "silu": nn.functional.silu,
    "tanh": torch.tanh,
}


def threshold(p: float) -> int:
    """A unit is dropped with probability ``threshold(p) / 65536``, which differs from p by at most 2^-17 (p
    up to 1 - 2^-17)."""
    return min(65535, round(p * 65536))


def scale(p: float) -> float:
    """What a kept unit is multiplied by."""
    return 65536 / (65536 - threshold(p))


def dropout_mask(
    seed: torch.Tensor, rows: int, columns: int, pass_: int, stream: int, p: float, consistent: bool
) -> torch.Tensor:
    """bool ``[rows, columns]``, True where the unit is kept."""
    row = torch.arange(rows, device=seed.device).unsqueeze(1)
    block = torch.arange(-(-columns // UNITS), device=seed.device)
    constant = [torch.full_like(block, value) for value in (pass_, stream)]
    words = philox([constant[0], row * 0 if consistent else row, constant[1], block], seed)
    halves = [half.broadcast_to(rows, len(block)) for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).flatten(1)[:, :columns] >= threshold(p)


def layers(parameters: torch.Tensor, widths: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights [out, in] and bias [out] of each layer, as views of the flat parameters."""
    sizes = [(fan_in, fan_out) for fan_in, fan_out in pairwise(widths)]
    parts = parameters.split([size for fan_in, fan_out in sizes for size in (fan_in * fan_out, fan_out)])
    return [
        (parts[2 * i].view(fan_out, fan_in), parts[2 * i + 1]) for i, (fan_in, fan_out) in enumerate(sizes)
    ]


def drop(
    x: torch.Tensor, seed: torch.Tensor, pass_: int, stream: int, p: float, consistent: bool, keep: Keep
) -> torch.Tensor:
    """Dropout of one stream in one pass."""
    if threshold(p) == 0:
        return x
    rows, columns = x.shape
    return torch.where(keep(seed, rows, columns, pass_, stream, p, consistent), x * scale(p), 0.0)


def probs_of_passes(
    x: torch.Tensor,
    parameters: torch.Tensor,
    widths: Sequence[int],
    p: Sequence[float],
    passes: int,
    activation: str,
    consistent: bool,
    seed: torch.Tensor,
    keep: Keep = dropout_mask,
) -> Iterator[torch.Tensor]:
    """The probabilities ``[B, C]`` of one pass after the other, in the dtype of x and the parameters."""
    head = layers(parameters, widths)
    for t in range(passes):
        hidden = x
        for i, (weight, bias) in enumerate(head):
            hidden = ACTIVATIONS[activation](hidden) if i > 0 else hidden
            hidden = nn.functional.linear(drop(hidden, seed, t, i, p[i], consistent, keep), weight, bias)
        yield drop(hidden, seed, t, len(head), p[-1], consistent, keep).softmax(-1)


def mc_dropout_mlp(
    x: torch.Tensor,
    parameters: torch.Tensor,
    widths: Sequence[int],
    p: Sequence[float],
    passes: int,
    activation: str,
    consistent: bool,
    seed: torch.Tensor,
) -> Stats:
    """x ``[B, widths[0]]`` -> mean ``[B, C]``, expected entropy ``[B]``, variance ``[B, C]`` of the softmax
    over the passes."""
    wide = x.double()
    mean = wide.new_zeros(len(x), widths[-1])
    moment, entropy = torch.zeros_like(mean), wide.new_zeros(len(x))
    for t, probs in enumerate(
        probs_of_passes(wide, parameters.double(), widths, p, passes, activation, consistent, seed)
    ):
        deviation = probs - mean
        mean = mean + deviation / (t + 1)
        moment = moment + deviation * (probs - mean)
        entropy = entropy + torch.special.entr(probs).sum(-1)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return mean.to(dtype), (entropy / passes).to(dtype), (moment / passes).to(dtype)
