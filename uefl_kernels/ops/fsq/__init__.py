"""``fsq``: round each element of a vector to one of a few levels.

The op is private, and :class:`uefl_kernels.nn.FSQ` calls it. Each element is bounded, by tanh or by clamping,
and rounded to one of its levels. Both are monotone, so level k starts at a threshold::

    plain      z >= bound^-1((k - L // 2 - 1/2 + offset) / half) - shift
    symmetric  z >= bound^-1((2 k - L) / (L - 1))

with half = (L - 1) (1 + 1e-3) / 2, offset = 1/2 for an even number of levels L and else 0, and shift =
bound^-1(offset / half). A level is the number of thresholds that z reaches. Comparisons are exact, so every
device finds the same levels, and no hyperbolic tangent is computed. The quantized value is (k - L // 2) /
(L // 2), or 2 k / (L - 1) - 1 in the symmetric form.

The gradient passes the rounding unchanged, so it is the gradient of the bound::

    grad_z = grad bound'(z + shift) half / (L // 2), or grad bound'(z) in the symmetric form

Bytes that must move: z and the results once, forward; two tensors read and one written, backward. The
operations of torch read and write some fifteen tensors in one step.

Source: Mentzer et al. 2023, "Finite Scalar Quantization: VQ-VAE Made Simple", appendix A.1; the symmetric
form: Parker et al. 2024, "Scaling Transformers for Low-Bitrate High-Quality Speech Coding", section 3.2.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._checks import needs_gradient
from ..._library import call, define, define_autograd, define_triton, define_vmap, exporting_to_onnx, forced
from . import composed


def _fake(given: composed.Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    z, form = given.z, given.form
    indices = z.new_empty(z.shape[:-1] if given.indexed else (0,), dtype=form.index_dtype)
    return torch.empty_like(z, memory_format=torch.contiguous_format), indices


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    z, *ctx.form, _ = inputs
    ctx.save_for_backward(z)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(gradient: Any, ctx: Any, grad: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 5
    given = composed.FsqGradient(grad, *ctx.saved_tensors, *ctx.form)
    # create_graph=True: the gradient is differentiated again
    grad_z = composed.fsq_backward(given) if torch.is_grad_enabled() else gradient(*given)
    return grad_z, None, None, None, None


def _batched(op: Any, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """Call the op once: it takes any leading dimensions."""
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    moved = [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=False)
    ]
    found = op(*moved, *arguments[len(tensors) :])
    return found, (0, 0) if isinstance(found, tuple) else 0


define(
    __name__,
    "fsq_backward",
    composed.FsqGradient,
    ["grad_z"],
    fake=lambda given: torch.empty_like(given.z, memory_format=torch.contiguous_format),
    fallback=composed.fsq_backward,
)
define(__name__, "fsq", composed.Arguments, ["quantized", "indices"], fake=_fake, fallback=composed.fsq)
define_autograd("fsq", _backward, _setup_context, gradient="fsq_backward")
define_vmap("fsq", _batched)
define_vmap("fsq_backward", _batched)
define_triton("fsq")
define_triton("fsq_backward")


def fsq(
    z: torch.Tensor, levels: list[int], symmetric: bool, clamp: bool, indexed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each element of z to one of its levels.

    Args:
        z: ``[..., d]``, float32 or float64.
        levels: d numbers.
        symmetric: levels from -1 to 1, symmetric around zero.
        clamp: bound by clamping instead of by tanh.
        indexed: whether to compute indices.

    Returns:
        ``(quantized, indices)``: the shape and dtype of z, and ``[...]`` (empty if not ``indexed``), int32,
        or int64 for more than 2^31 codewords. NaN stays NaN and counts as level 0.
    """
    given = composed.Arguments(z, levels, symmetric, clamp, indexed)
    if exporting_to_onnx() or composed.forward_mode(z):
        return composed.formula(z, given.form, indexed)
    if forced() == "cuda":  # the kernel of GPUs is in Triton
        return torch.ops.uefl.fsq(*given)  # type: ignore[no-any-return]
    return call("fsq", z, given, needs_gradient(z))  # type: ignore[no-any-return]
