"""``mc_dropout_mlp``: Monte Carlo dropout of a multi-layer perceptron, without storing masks or passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch

from ..._checks import check_reverse_mode, check_tensor
from ..._dtypes import result_dtype
from ..._library import define, define_autograd, define_triton, once_differentiable, resolve
from ..._numbers import as_integer, is_count, is_seed
from ...metrics import entropy
from ..linear import linear
from . import composed

_OP = "mc_dropout_mlp"
_NUMBER = (int, float, np.integer, np.floating)


class MCStats(NamedTuple):
    """Statistics of the passes, float32 (float64 for float64 x), in nats.

    ``p_t`` are the probabilities of pass t.
    """

    mean_probs: torch.Tensor
    """``[..., C]``: mean of p_t."""
    entropy: torch.Tensor
    """``[...]``: entropy of mean_probs, the total uncertainty."""
    expected_entropy: torch.Tensor
    """``[...]``: mean of the entropies of p_t."""
    mutual_info: torch.Tensor
    """``[...]``: entropy - expected_entropy, not below 0: the disagreement of the passes (BALD)."""
    variance: torch.Tensor
    """``[..., C]``: mean of (p_t - mean_probs)^2."""


def _fake(given: composed.Arguments) -> composed.Result:
    x, dtype = given.x, result_dtype(given.x)
    rows, classes = x.shape[0], given.widths[-1]
    return (
        x.new_empty(rows, classes, dtype=dtype),
        x.new_empty(rows, dtype=dtype),
        x.new_empty(rows, classes, dtype=dtype),
    )


def _fake_backward(_: composed.Gradients, given: composed.Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    return given.x.new_empty(given.x.shape), given.parameters.new_empty(given.parameters.shape)


def _fake_mask(given: composed.Mask) -> torch.Tensor:
    return given.seed.new_empty(given.rows, given.columns, dtype=torch.bool)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: composed.Result) -> None:
    x, parameters, *ctx.options, seed = inputs
    ctx.save_for_backward(output[0], x, parameters, seed)


def _backward(
    ctx: Any, grad_mean: torch.Tensor, grad_entropy: torch.Tensor, grad_variance: torch.Tensor
) -> tuple[Any, ...]:
    mean, x, parameters, seed = ctx.saved_tensors
    gradients = composed.Gradients(grad_mean, grad_entropy, grad_variance, mean)
    given = composed.Arguments._make([x, parameters, *ctx.options, seed])
    with torch.no_grad():
        results = torch.ops.uefl.mc_dropout_mlp_backward(*gradients, *given)
    grad_x, grad_parameters = (
        once_differentiable("mc_dropout_mlp", result, *gradients[:3], x, parameters) for result in results
    )
    return grad_x, grad_parameters, *[None] * (len(given) - 2)


define(__name__, "mc_dropout_mlp", composed.Arguments, ["mean", "expected_entropy", "variance"], fake=_fake)
define(
    __name__,
    "mc_dropout_mlp_backward",
    (composed.Gradients, composed.Arguments),
    ["grad_x", "grad_parameters"],
    fake=_fake_backward,
    fallback=composed.mc_dropout_mlp_backward,
)
define(__name__, "dropout_mask", composed.Mask, ["mask"], fake=_fake_mask, fallback=composed.dropout_mask)
define_triton("mc_dropout_mlp")
define_triton("dropout_mask")
define_autograd("mc_dropout_mlp", _backward, _setup)


def mc_dropout_mlp(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    p: float | Sequence[float],
    passes: int = 20,
    activation: str = "gelu",
    input_dropout: bool = False,
    logit_dropout: bool = False,
    consistent: bool = False,
    seed: int | None = None,
) -> MCStats:
    """Run Monte Carlo dropout of a multi-layer perceptron.

    Compute statistics of ``passes`` predictions of each row, with different dropout masks.

    The layers are Linear, activation, dropout, ..., Linear. A dropout on the inputs and one on the logits are
    optional; with a dropout on the inputs, x can be the values before the first dropout of a larger network.
    Layers before the first dropout are computed once. Masks come from Philox4x32-10, with counters that
    ``composed.py`` documents. They are the same on every backend and for any number of threads. Results on
    the CPU are the same for any number of threads, too. No tensor of size passes x rows is stored.

    On a GPU the CUDA C++ kernel takes the usual head: one layer with up to 32 outputs. Triton takes all other
    heads, and every head if CUDA C++ was not built. It has one launch for heads of one layer and up to 256
    classes. Other heads take a launch for each layer and pass, and store the values between two layers for
    one pass. Without Triton they are plain PyTorch. The gradient is plain PyTorch on every device, pass by
    pass.

    Args:
        x: ``[..., D]``, float32, bfloat16, float16 or float64. The masks of a row depend on its position,
            so splitting a batch changes them. The last bits of the values before the first
            dropout may depend on the number of rows (in float32 on a CPU only with AMX). Given these values,
            the bits of a row do not depend on the number of rows.
        weights: ``[out, in]`` of each layer, as in ``nn.Linear``; the first takes D, the last gives the C
            logits.
        biases: ``[out]`` or None for each layer; None for none at all.
        p: probability of dropping a unit, in [0, 1); one number for all dropouts, or a list with one for
            each: for the inputs if they have a dropout, the hidden layers, the logits if they have one. It is
            rounded to a multiple of 2^-16, at most 1 - 2^-16. Kept units are divided by one minus the rounded
            probability, so that the expectation is exact. If all are 0, all passes are equal.
        passes: T, at least 1. With one pass, variance and mutual_info are 0, up to rounding.
        activation: ``"gelu"`` (exact), ``"relu"``, ``"silu"`` or ``"tanh"``.
        input_dropout: drop inputs, too.
        logit_dropout: drop logits, too.
        consistent: one mask per pass for all rows (BatchBALD), so that a pass is one sampled network.
        seed: seed of the masks, in [0, 2^63). By default it is drawn from torch's generator of the device.

    Returns:
        :class:`MCStats`, which can be differentiated once by x, weights and biases. The backward pass draws
        the masks again. float32 results differ from the same computation in float64 with the same masks by
        the rounding of the logits: by less than 1e-5 if the logits are of order 10. The results of a row are
        NaN if one of its kept units is not finite. For float64 x every backend runs the definition, in
        float64.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices, p, passes, activation or seed that do not fit.
        RuntimeError: a forced backend is absent; forward-mode differentiation.

    Source: Gal and Ghahramani 2016, "Dropout as a Bayesian Approximation"; mutual information: Houlsby et al.
    2011 (BALD); consistent masks: Kirsch et al. 2019 (BatchBALD).

    Equivalent to (two layers, other random draws)::

        hidden = F.gelu(F.linear(x, weights[0], biases[0]))  # once
        logits = [F.linear(F.dropout(hidden, p), weights[1], biases[1]) for _ in range(passes)]
        probs = torch.stack(logits).softmax(-1)
        mean = probs.mean(0)
        entropy = torch.special.entr(mean).sum(-1)
        expected_entropy = torch.special.entr(probs).sum(-1).mean(0)
        MCStats(mean, entropy, expected_entropy, entropy - expected_entropy, probs.var(0, correction=0))
    """
    given = _arguments(
        x, weights, biases, p, passes, activation, input_dropout, logit_dropout, consistent, seed
    )
    mean, expected, variance = _overload(given.x)(*given)
    shape = x.shape[:-1]
    mean, variance, expected = (
        result.reshape(shape + result.shape[1:]) for result in (mean, variance, expected)
    )
    total = entropy(mean)
    return MCStats(mean, total, expected, (total - expected).clamp_min(0), variance)


def mc_dropout_probs(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    p: Sequence[float],
    passes: int,
    activation: str,
    consistent: bool,
    seed: int | None,
) -> torch.Tensor:
    """Return the probabilities ``[passes, ..., C]`` of :func:`mc_dropout_mlp` with the same masks.

    ``p`` has one rate for each dropout, those of the inputs and of the logits included.
    """
    given = _arguments(x, weights, biases, p, passes, activation, True, True, consistent, seed)
    given = given._replace(x=given.x.to(given.parameters.dtype))
    with torch.autocast(x.device.type, enabled=False):  # as in the op
        probs = torch.stack([*composed.probs_of_passes(given, torch.ops.uefl.dropout_mask.default)])
    return probs.expand(passes, -1, -1).reshape(passes, *x.shape[:-1], probs.shape[-1])


def _arguments(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None,
    p: float | Sequence[float],
    passes: int,
    activation: str,
    input_dropout: bool,
    logit_dropout: bool,
    consistent: bool,
    seed: int | None,
) -> composed.Arguments:
    """Return the arguments of the op: the rows before the first dropout and the layers after it.

    Without any dropout one pass is enough.
    """
    for name, given in (("weights", weights), ("biases", biases)):
        if isinstance(given, torch.Tensor) or not (
            hasattr(given, "__getitem__") or (given is None and name == "biases")
        ):
            raise TypeError(
                f"mc_dropout_mlp: {name} must be a list of tensors, one for each layer, got"
                f" {type(given).__name__}"
            )
    for name, flag in (
        ("input_dropout", input_dropout),
        ("logit_dropout", logit_dropout),
        ("consistent", consistent),
    ):
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"mc_dropout_mlp: {name} must be True or False, got {flag!r}")
    biases = [None] * len(weights) if biases is None else biases
    rates = _check(x, weights, biases, p, passes, activation, input_dropout, logit_dropout, seed)
    check_reverse_mode("mc_dropout_mlp", x, *weights, *biases)
    act = composed.ACTIVATIONS[activation]
    hidden, first = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), 0
    while first < len(weights) and rates[first] == 0:  # no dropout before this layer
        hidden = linear(act(hidden) if first > 0 else hidden, weights[first], biases[first])
        first += 1
    if 0 < first < len(weights):
        hidden = act(hidden)
    dtype = result_dtype(hidden)
    parameters = [
        tensor.to(dtype)
        for weight, bias in zip(weights[first:], biases[first:], strict=True)
        for tensor in (weight.flatten(), weight.new_zeros(len(weight)) if bias is None else bias)
    ]
    return composed.Arguments(
        hidden,
        torch.cat(parameters) if parameters else hidden.new_zeros(0, dtype=dtype),
        [hidden.shape[-1], *(len(weight) for weight in weights[first:])],
        rates[first:],
        index(passes) if any(rates) else 1,
        activation,
        bool(consistent),
        _seed(None if seed is None else as_integer(seed), x.device),
    )


def _overload(x: torch.Tensor) -> Any:
    return (
        torch.ops.uefl_reference.mc_dropout_mlp if x.dtype == torch.float64 else resolve("mc_dropout_mlp", x)
    )


def _seed(seed: int | None, device: torch.device) -> torch.Tensor:
    if seed is None:
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=device)
    return torch.full((), seed, dtype=torch.int64, device=device)


def _check(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    p: float | Sequence[float],
    passes: int,
    activation: str,
    input_dropout: bool,
    logit_dropout: bool,
    seed: int | None,
) -> list[float]:
    """Check the arguments.

    Return the drop rate before each layer and of the logits, 0 without a dropout.
    """
    _check_layers(x, weights, biases)
    rates = _rates(p, len(weights), input_dropout, logit_dropout)
    if not is_count(passes):
        raise ValueError(f"{_OP}: passes must be an integer of at least 1, got {passes!r}")
    if index(passes) >= 2**32:
        raise ValueError(
            f"{_OP}: passes must be below 2^32, because masks come from 32-bit counters; got {passes}"
        )
    if not isinstance(activation, str) or activation not in composed.ACTIVATIONS:
        raise ValueError(
            f"{_OP}: activation {activation!r} is not known, expected one of {tuple(composed.ACTIVATIONS)}"
        )
    if seed is not None and not is_seed(seed):
        raise ValueError(f"{_OP}: seed must be an integer in [0, 2^63) or None, got {seed!r}")
    # torch runs the layers before the first dropout, and needs equal dtypes
    first = next((i for i, rate in enumerate(rates) if rate > 0), len(weights))
    for i, pair in enumerate(zip(weights[:first], biases[:first], strict=True)):
        for name, own in zip((f"weights[{i}]", f"biases[{i}]"), pair, strict=True):
            if own is not None and own.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
                raise TypeError(
                    f"{_OP}: x has dtype {x.dtype} and {name} {own.dtype}, before the first dropout; convert"
                    " one of them"
                )
    return rates


def _check_layers(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> None:
    """Check that x passes the layers: their number, devices and shapes."""
    if len(weights) == 0:
        raise ValueError(f"{_OP}: weights is empty, expected at least one layer")
    if len(biases) != len(weights):
        raise ValueError(
            f"{_OP}: {len(weights)} weights and {len(biases)} biases; give one bias, or None, for each layer"
        )
    named = [("x", x)]
    named += [(f"weights[{i}]", weight) for i, weight in enumerate(weights)]
    named += [(f"biases[{i}]", bias) for i, bias in enumerate(biases) if bias is not None]
    for name, tensor in named:
        check_tensor(_OP, name, tensor)
        if tensor.device != x.device:
            raise ValueError(f"{_OP}: x is on {x.device} and {name} on {tensor.device}; move one of them")
    if x.dim() < 1 or x.shape[-1] == 0:
        raise ValueError(f"{_OP}: x must have shape [..., D] with D at least 1, got {list(x.shape)}")
    width, source = x.shape[-1], "x"
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if weight.dim() != 2 or weight.shape[1] != width or len(weight) == 0:
            raise ValueError(
                f"{_OP}: weights[{i}] must have shape [out, {width}] to follow {source}, got"
                f" {list(weight.shape)}"
            )
        if bias is not None and list(bias.shape) != [len(weight)]:
            raise ValueError(
                f"{_OP}: biases[{i}] must have shape [{len(weight)}] like the rows of weights[{i}], got"
                f" {list(bias.shape)}"
            )
        width, source = len(weight), f"weights[{i}]"


def _rates(p: float | Sequence[float], layers: int, input_dropout: bool, logit_dropout: bool) -> list[float]:
    """Return the drop rate before each layer and of the logits, 0 without a dropout."""
    dropouts = input_dropout + layers - 1 + logit_dropout
    if dropouts == 0:
        raise ValueError(
            f"{_OP}: a single layer has no hidden dropout, so all passes would be equal; set"
            " input_dropout=True or logit_dropout=True"
        )
    given = [p] * dropouts if isinstance(p, _NUMBER) else p
    if not isinstance(given, (list, tuple)) or not all(isinstance(rate, _NUMBER) for rate in given):
        raise TypeError(
            f"{_OP}: p must be a number in [0, 1), or a list with one for each dropout, got {p!r}"
        )
    rates = [float(rate) for rate in given]
    if len(rates) != dropouts:
        expected = f"one number, or a list of {dropouts}, one for each dropout, in the order of the layers"
        raise ValueError(f"{_OP}: p has {len(rates)} rates, expected {expected}")
    # without a dropout, p is not used but must be valid
    for rate in rates or ([float(p)] if isinstance(p, _NUMBER) else []):
        if not (0 <= rate < 1 and math.isfinite(rate)):
            raise ValueError(f"{_OP}: p must be in [0, 1), got {rate}")
    return [0.0] * (not input_dropout) + rates + [0.0] * (not logit_dropout)
