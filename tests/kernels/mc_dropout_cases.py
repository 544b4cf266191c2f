"""Networks, a reference that keeps all passes, and comparisons for the tests of mc_dropout_mlp."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F

from uefl_kernels import MCStats
from uefl_kernels.ops.mc_dropout_mlp import composed

from .conftest import normal

FIELDS = MCStats._fields
SHAPES = {  # B, D, then the layers
    "one layer": (5, 7, 3),
    "two layers": (37, 20, 33, 10),
    "one class": (3, 4, 5, 1),
    "many classes": (17, 9, 24, 43),
    "three layers": (50, 12, 33, 17, 10),
    "wide": (16, 8, 40, 100, 13),
    "no rows": (0, 6, 8, 4),
}


def mlp(shape, dtype=torch.float32, offset=0.0):
    x = normal(*shape[:2], dtype=dtype, offset=offset)
    fans = list(itertools.pairwise(shape[1:]))
    weights = [
        (normal(fan_out, fan_in, seed=i + 1) / math.sqrt(fan_in)).to(dtype)
        for i, (fan_in, fan_out) in enumerate(fans)
    ]
    return x, weights, [normal(fan_out, seed=i + 9, dtype=dtype) for i, (_, fan_out) in enumerate(fans)]


def stacked(
    x, weights, biases, *, p, passes, activation="gelu", logit_dropout=False, consistent=False, seed=0
):
    """Compute the formula in the docstring of mc_dropout_mlp in float64, from all passes, with a gradient."""
    act, generator = composed.ACTIVATIONS[activation], torch.tensor(seed)

    def drop(value, t, stream):
        keep = torch.ops.uefl_reference.dropout_mask(generator, *value.shape, t, stream, p, consistent)
        return torch.where(keep, value * composed.scale(p), 0.0)

    probs = []
    for t in range(passes):
        hidden = x.double()
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            hidden = drop(act(hidden), t, i - 1) if i > 0 else hidden
            hidden = F.linear(hidden, weight.double(), bias.double())
        probs.append((drop(hidden, t, len(weights) - 1) if logit_dropout else hidden).softmax(-1))
    stack = torch.stack(probs)
    mean = stack.mean(0)
    entropy, expected = torch.special.entr(mean).sum(-1), torch.special.entr(stack).sum(-1).mean(0)
    return MCStats(mean, entropy, expected, entropy - expected, (stack - mean).square().mean(0))


def assert_close(found, expected, tolerance):
    for name, got, want in zip(FIELDS, found, expected, strict=True):
        assert got.shape == want.shape, name
        assert got.dtype == want.dtype, name
        torch.testing.assert_close(
            got, want, rtol=0, atol=tolerance, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


def loss_of(stats):
    probs = stats.mean_probs
    weight = torch.arange(1, probs.shape[-1] + 1, dtype=probs.dtype, device=probs.device)
    return (
        (probs * weight).square().sum()
        + stats.entropy.sum()
        + 2 * stats.mutual_info.sum()
        + (stats.variance * weight).sum()
    )
