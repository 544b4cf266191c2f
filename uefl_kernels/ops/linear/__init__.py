"""``linear``: a product in float32 with the same bits for any number of threads.

``mc_dropout_mlp`` calls it. Users need not call it.

x [N, D], weight [M, D] and bias [M], float32 on the CPU, give x weight^T + bias [N, M]. The rounding of
torch's product may depend on the number of threads. Here each result is one chain of additions, 256 inputs at
a time, on any thread. The time is about the time of torch.

AMX multiplies bfloat16, so each value is a sum of three bfloat16 numbers, and the six larger products keep
the digits of float32. The error is 0.4 to 1.1 times the error of torch's product, measured; the time is 1.2
to 1.7 times shorter. With AMX, the op still multiplies in float32 if there are few rows, if a value is not
finite, or if all values of a row or unit are extremely large or small.

Bytes that must move: each operand once. Operations: 2 N D M; on AMX 6 times more, on a unit with 16 times the
rate of float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..._library import COMPILED, define, define_autograd, forced


class Arguments(NamedTuple):
    """Arguments of the op."""

    x: torch.Tensor
    """``[N, D]``"""
    weight: torch.Tensor
    """``[M, D]``"""
    bias: torch.Tensor
    """``[M]``"""


def _setup(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    return (
        grad @ weight if needs[0] else None,
        grad.T @ x if needs[1] else None,
        grad.sum(0) if needs[2] else None,
    )


define(__name__, "linear", Arguments, ["product"], fake=lambda given: torch.nn.functional.linear(*given))
define_autograd("linear", _backward, _setup)
torch.library.register_autocast("uefl::linear", "cpu", torch.float32)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute ``torch.nn.functional.linear`` of x ``[N, D]`` for any device, dtype and autocast.

    The op ``linear`` computes it if the input is supported.
    """
    serves = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if not serves or forced() not in ("auto", "cpu") or not COMPILED:
        return torch.nn.functional.linear(x, weight, bias)
    result: torch.Tensor = torch.ops.uefl.linear(
        x, weight, weight.new_zeros(len(weight)) if bias is None else bias
    )
    return result
