"""``rvq``: residual vector quantization, all stages in one op, with closed-form gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..._checks import check_reverse_mode, check_search, check_weights, needs_gradient, packed
from ..._dtypes import result_dtype
from ..._kmeans_checks import unknown
from ..._library import call, define, define_autograd, define_composed, define_vmap, once_differentiable
from ..._snapshot import snapshot
from ..vq import ESTIMATORS, grad_codebook
from . import composed


class RVQOutput(NamedTuple):
    """Result of ``rvq``."""

    quantized: torch.Tensor
    """``[..., D]``, the dtype of x: the sum of the codewords of all stages; its gradient passes to x."""
    indices: torch.Tensor
    """``[..., Q]`` int64, or ``[..., S, Q]`` for S > 1 segments or codebooks ``[S, K, d]``: which
    codewords."""
    losses: torch.Tensor
    """``[Q]``, float32 (float64 for float64 x): the loss of ``vq`` of each stage."""
    counts: tuple[torch.Tensor, ...]
    """for each stage ``[K]`` or ``[S, K]`` int64: how many segments took each codeword."""


def _fake(given: composed.Arguments) -> composed.Result:
    x, codebooks = given.x, given.codebooks
    d, stages = codebooks[0].shape[-1], len(codebooks)
    count = sum(codebook.shape[:-1].numel() for codebook in codebooks)
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        x.new_empty(*x.shape[:-1], x.shape[-1] // d, stages, dtype=torch.int64),
        x.new_empty(stages, dtype=result_dtype(x)),
        x.new_empty(count, dtype=torch.int64),
        x.new_empty(count if given.with_sums else 0, d, dtype=torch.float64),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    given = composed.Arguments(*inputs)
    ctx.with_sums, ctx.rotation = given.with_sums, given.rotation
    ctx.codebook_weight, ctx.commitment_weight = given.codebook_weight, given.commitment_weight
    _, indices, _, counts, sums = output
    ctx.mark_non_differentiable(indices, counts, sums)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(given.x, indices, counts, sums, *given.codebooks)


def _backward(
    vq_backward: Callable[..., torch.Tensor],
    ctx: Any,
    grad_quantized: torch.Tensor | None,
    _i: Any,
    grad_losses: torch.Tensor | None,
    _c: Any,
    _s: Any,
) -> tuple[Any, ...]:
    x, indices, counts, sums, *codebooks = ctx.saved_tensors
    needs_x, needs_codebooks = ctx.needs_input_grad[:2]
    made_of = (x, *codebooks, grad_quantized, grad_losses)
    grad_x, grad_codebooks = None, [None] * len(codebooks)
    with torch.no_grad():
        if needs_x:
            grad_x = _grad_x(vq_backward, ctx, x, codebooks, indices, grad_quantized, grad_losses)
        if any(needs_codebooks):
            grad_codebooks = _grad_codebooks(ctx, x, codebooks, counts, sums, grad_losses, needs_codebooks)
    if grad_x is not None:
        grad_x = once_differentiable("rvq", grad_x, *made_of)
    grad_codebooks = [
        None if gradient is None else once_differentiable("rvq", gradient, *made_of)
        for gradient in grad_codebooks
    ]
    return grad_x, grad_codebooks, *[None] * (len(composed.Arguments._fields) - 2)


def _grad_x(
    vq_backward: Callable[..., torch.Tensor],
    ctx: Any,
    x: torch.Tensor,
    codebooks: Sequence[torch.Tensor],
    indices: torch.Tensor,
    grad_quantized: torch.Tensor | None,
    grad_losses: torch.Tensor | None,
) -> torch.Tensor:
    """Sum the gradients of ``vq`` over all stages, from the last to the first, as autograd adds them."""
    weight = 0.0 if grad_losses is None else ctx.commitment_weight
    if weight == 0 and grad_quantized is None:
        return torch.zeros_like(x)
    if weight == 0 and grad_quantized is not None and not ctx.rotation:
        gradients = [grad_quantized] * len(codebooks)
    else:
        losses = x.new_zeros(len(codebooks), dtype=result_dtype(x)) if grad_losses is None else grad_losses
        # in the dtype and layout that the kernels take, once for all stages
        pull = (losses * (2 * weight / max(1, x.numel()))).double()
        chosen = indices.movedim(-1, 0).contiguous()
        inputs = composed.residuals(x, codebooks, chosen.movedim(0, -1))
        gradients = [
            vq_backward(residual, codebook, taken, grad_quantized, strength, ctx.rotation)
            for residual, codebook, taken, strength in zip(inputs, codebooks, chosen, pull, strict=True)
        ]
    total = gradients.pop()
    while gradients:
        total = gradients.pop() + total
    return total


def _grad_codebooks(
    ctx: Any,
    x: torch.Tensor,
    codebooks: Sequence[torch.Tensor],
    counts: torch.Tensor,
    sums: torch.Tensor,
    grad_losses: torch.Tensor | None,
    needed: Sequence[bool],
) -> list[Any]:
    """Return the gradient of ``vq`` for each codebook that needs one."""
    if grad_losses is None or ctx.codebook_weight == 0:
        return [
            torch.zeros_like(codebook) if wanted else None
            for codebook, wanted in zip(codebooks, needed, strict=True)
        ]
    if not ctx.with_sums:
        raise RuntimeError(
            "rvq: with_sums=False does not compute the sums that the gradient of the codebooks needs; set"
            " with_sums=True, or call uefl_kernels.rvq"
        )
    factor = 2 * ctx.codebook_weight / max(1, x.numel())
    stages = zip(codebooks, _split(counts, codebooks), _split(sums, codebooks), grad_losses, strict=True)
    return [
        grad_codebook(codebook, counted, summed, grad_loss.double() * factor) if wanted else None
        for wanted, (codebook, counted, summed, grad_loss) in zip(needed, stages, strict=True)
    ]


def _split(flat: torch.Tensor, codebooks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split the counts or sums of all stages by stage, in the shape of each codebook."""
    first = codebooks[0].shape
    if all(codebook.shape == first for codebook in codebooks):
        return list(flat.view(len(codebooks), *first[:-1], *flat.shape[1:]).unbind())
    tensors = flat.split_with_sizes([codebook.shape[:-1].numel() for codebook in codebooks])
    return [
        tensor.view(*codebook.shape[:-1], *flat.shape[1:])
        for tensor, codebook in zip(tensors, codebooks, strict=True)
    ]


define(
    __name__,
    "rvq",
    composed.Arguments,
    ["quantized", "indices", "losses", "counts", "sums"],
    fake=_fake,
    fallback=composed.fallback,
)
define_composed("rvq", composed.around, kernel="vq_forward")
define_autograd("rvq", _backward, _setup, gradient="vq_backward")
define_vmap("rvq")


def rvq(
    x: torch.Tensor,
    codebooks: torch.Tensor | Sequence[torch.Tensor],
    *,
    metric: str = "l2",
    precision: str = "exact",
    codebook_weight: float = 1.0,
    commitment_weight: float = 0.25,
    estimator: str = "straight_through",
) -> RVQOutput:
    """Quantize x by Q codebooks in one call: each stage quantizes the residual of the stages before it.

    Args:
        x: ``[..., D]``, float32, bfloat16, float16 or float64; any strides. D is cut into S = D / d
            contiguous segments.
        codebooks: ``[Q, K, d]``, or ``[Q, S, K, d]`` with separate codebooks for each segment; or a sequence
            of Q codebooks ``[K, d]`` or ``[S, K, d]``, which may have different K.
        metric: ``"l2"`` or ``"cosine"``; it decides only which codeword is nearest.
        precision: ``"exact"`` (the default) or ``"fast"``; see :func:`vq_assign`.
        codebook_weight, commitment_weight, estimator: as for :func:`vq`, of every stage.

    Returns:
        :class:`RVQOutput` ``(quantized, indices, losses, counts)``, with the bits of successive calls of
        :func:`vq`. The residual and the sum of the codewords are rounded to the dtype of x after each stage.
        No gradient passes from a stage to the one before it through the residual, so x gets the gradient of
        quantized Q times, as in vector-quantize-pytorch: the gradient of every stage's codewords passes to x
        as the estimator says.

    The op has the derivatives and transforms of :func:`vq`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`vq`; ValueError if there is no codebook, or if
            codewords of two stages have different lengths or segments.

    Source: Zeghidour et al. 2021, "SoundStream", algorithm 1.

    Equivalent to (``[Q, K, d]`` with d = D)::

        residual, quantized, indices, losses = x, torch.zeros_like(x), [], []
        for codebook in codebooks:
            out = vq(residual, codebook)
            residual, quantized = residual - out.quantized.detach(), quantized + out.quantized
            indices.append(out.indices[..., 0])
            losses.append(out.loss)
        indices, losses = torch.stack(indices, -1), torch.stack(losses)
    """
    return _call(x, codebooks, metric, precision, None, codebook_weight, commitment_weight, estimator)[0]


def rvq_with_sums(
    x: torch.Tensor,
    codebooks: torch.Tensor | Sequence[torch.Tensor],
    *,
    metric: str = "l2",
    precision: str = "exact",
    codebook_weight: float = 1.0,
    commitment_weight: float = 0.25,
    estimator: str = "straight_through",
) -> tuple[RVQOutput, tuple[torch.Tensor, ...]]:
    """Compute :func:`rvq`, and for each stage the sum of the segments of each codeword.

    Returns:
        the output, and for each stage the sums of :func:`vq_with_sums`, ``[K, d]`` or ``[S, K, d]``, float64.
        No gradient.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`rvq`.

    Source: van den Oord et al. 2017, appendix A.1 (codewords as moving averages of these sums).

    Equivalent to: :func:`rvq` with :func:`vq_with_sums` instead of :func:`vq`.
    """
    return _call(x, codebooks, metric, precision, True, codebook_weight, commitment_weight, estimator)


def _call(
    x: torch.Tensor,
    codebooks: torch.Tensor | Sequence[torch.Tensor],
    metric: str,
    precision: str,
    with_sums: bool | None,
    codebook_weight: float,
    commitment_weight: float,
    estimator: str,
) -> tuple[RVQOutput, tuple[torch.Tensor, ...]]:
    stages = _checked(x, codebooks, metric, precision)
    check_weights("rvq", codebook_weight=codebook_weight, commitment_weight=commitment_weight)
    if with_sums is None:  # then only for the gradient of the codebooks, as in vq
        traced = not torch.compiler.is_compiling()
        with_sums = codebook_weight != 0 and needs_gradient(*stages, traced=traced)
    if not isinstance(estimator, str) or estimator not in ESTIMATORS:
        raise unknown("rvq", "estimator", estimator, ESTIMATORS)
    out, sums = run(
        composed.Arguments(
            x,
            [packed("rvq", "codebooks", codebook) for codebook in stages],
            metric,
            precision == "exact",
            with_sums,
            float(codebook_weight),
            float(commitment_weight),
            estimator == "rotation",
        )
    )
    if stages[0].dim() == 2 and stages[0].shape[1] == x.shape[-1]:
        out = out._replace(indices=out.indices.squeeze(-2))
    return out, sums


def run(given: composed.Arguments) -> tuple[RVQOutput, tuple[torch.Tensor, ...]]:
    """Call the op with arguments that are valid.

    Indices are ``[..., S, Q]``.
    """
    check_reverse_mode("rvq", given.x, *given.codebooks)
    differentiable = needs_gradient(given.x, *given.codebooks)
    if torch.compiler.is_compiling() and differentiable:
        # the caller may update them in place before the backward pass; eager autograd refuses that
        given = given._replace(codebooks=[snapshot(codebook) for codebook in given.codebooks])
    quantized, indices, losses, counts, sums = call("rvq", given.x, given, differentiable)
    out = RVQOutput(quantized, indices, losses, tuple(_split(counts, given.codebooks)))
    return out, tuple(_split(sums, given.codebooks)) if given.with_sums else ()


def _checked(
    x: torch.Tensor, codebooks: torch.Tensor | Sequence[torch.Tensor], metric: str, precision: str
) -> list[torch.Tensor]:
    """Return the codebooks as a list, or raise TypeError or ValueError where arguments do not fit."""
    if isinstance(codebooks, torch.Tensor):
        if codebooks.dim() not in (3, 4):
            raise ValueError(
                "rvq: codebooks must have shape [Q, K, d] or [Q, S, K, d], or be a sequence of codebooks, got"
                f" {list(codebooks.shape)}"
            )
        stages = list(codebooks.unbind())
    elif isinstance(codebooks, Iterable):
        stages = list(codebooks)
    else:
        raise TypeError(
            f"rvq: codebooks must be a tensor or a sequence of tensors, got {type(codebooks).__name__}"
        )
    if not stages:
        raise ValueError("rvq: codebooks is empty, expected at least one")
    first = stages[0]
    for place, codebook in enumerate(stages):
        check_search("rvq", x, codebook, metric, precision)
        if codebook.dim() != first.dim() or codebook.shape[-1] != first.shape[-1]:
            raise ValueError(
                f"rvq: codebook {place} has shape {list(codebook.shape)} and the first {list(first.shape)};"
                " give all codebooks the same number of segments and the same codeword length"
            )
    return stages
