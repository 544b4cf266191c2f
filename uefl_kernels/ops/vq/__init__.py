"""``vq``: vector quantization in one op (search, gather, loss, usage), with closed-form gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..._checks import check_reverse_mode, check_search, check_weights, needs_gradient, packed
from ..._dtypes import result_dtype
from ..._gather import gather
from ..._kmeans_checks import unknown
from ..._library import (
    call,
    define,
    define_autograd,
    define_composed,
    define_vmap,
    once_differentiable,
    one_by_one,
)
from ..._snapshot import snapshot
from .. import vq_backward as _vq_backward  # noqa: F401
from . import composed
from . import forward as _vq_forward  # noqa: F401

ESTIMATORS = ("straight_through", "rotation")


class VQOutput(NamedTuple):
    """Result of ``vq``."""

    quantized: torch.Tensor
    """``[..., D]``, the dtype of x: every segment replaced by its codeword; its gradient passes to x."""
    indices: torch.Tensor
    """``[..., S]`` int64: the index of the codeword of each segment."""
    loss: torch.Tensor
    """scalar, float32 (float64 for float64 x): (codebook_weight + commitment_weight) * mean((x -
    quantized)^2)."""
    counts: torch.Tensor
    """``[K]`` or ``[S, K]`` int64: how many segments took each codeword."""


def _fake(given: composed.Arguments) -> composed.Result:
    x, codebook = given.x, given.codebook
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        x.new_empty(*x.shape[:-1], x.shape[-1] // codebook.shape[-1], dtype=torch.int64),
        x.new_empty((), dtype=result_dtype(x)),
        x.new_empty(codebook.shape[:-1], dtype=torch.int64),
        x.new_empty(codebook.shape if given.with_sums else (0,), dtype=torch.float64),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    given = composed.Arguments(*inputs)
    x, codebook = given.x, given.codebook
    ctx.with_sums, ctx.rotation = given.with_sums, given.rotation
    ctx.codebook_weight, ctx.commitment_weight = given.codebook_weight, given.commitment_weight
    _, indices, _, counts, sums = output
    ctx.mark_non_differentiable(indices, counts, sums)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, codebook, indices, counts, sums)


def _backward(
    vq_backward: Callable[..., torch.Tensor],
    ctx: Any,
    grad_quantized: torch.Tensor | None,
    _i: Any,
    grad_loss: torch.Tensor | None,
    _c: Any,
    _s: Any,
) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: non-reentrant checkpointing unpacks them a single time
    given = vq_backward, ctx, saved, grad_quantized, grad_loss
    if not torch.is_grad_enabled():
        return *_gradients(*given), *_NO_GRADIENTS
    with torch.no_grad():  # the caller has set create_graph=True
        gradients = _gradients(*given)
    made_of = (*saved[:2], grad_quantized, grad_loss)
    once = [
        None if gradient is None else once_differentiable("vq", gradient, *made_of) for gradient in gradients
    ]
    return *once, *_NO_GRADIENTS


def _gradients(
    vq_backward: Callable[..., torch.Tensor],
    ctx: Any,
    saved: tuple[torch.Tensor, ...],
    grad_quantized: torch.Tensor | None,
    grad_loss: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x and of the codebook that are needed."""
    needs_x, needs_codebook, *_ = ctx.needs_input_grad
    return (
        _grad_x(vq_backward, ctx, saved, grad_quantized, grad_loss) if needs_x else None,
        _grad_codebook(ctx, saved, grad_loss) if needs_codebook else None,
    )


_NO_GRADIENTS = (None,) * (len(composed.Arguments._fields) - 2)


def _grad_x(
    vq_backward: Callable[..., torch.Tensor],
    ctx: Any,
    saved: tuple[torch.Tensor, ...],
    grad_quantized: torch.Tensor | None,
    grad_loss: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient of x: the gradient of quantized plus the gradient of the loss.

    The gradient of quantized is passed unchanged or rotated. The gradient of the loss is grad_loss * 2 *
    commitment_weight / M * (x - q), with M = x.numel().
    """
    x, codebook, indices, _, _ = saved
    weight = 0.0 if grad_loss is None else ctx.commitment_weight
    if weight == 0 and (grad_quantized is None or not ctx.rotation):
        return torch.zeros_like(x) if grad_quantized is None else grad_quantized
    loss = x.new_zeros((), dtype=result_dtype(x)) if grad_loss is None else grad_loss
    pull = loss * (2 * weight / max(1, x.numel()))
    return vq_backward(x, codebook, indices, grad_quantized, pull, ctx.rotation)


def _grad_codebook(ctx: Any, saved: tuple[torch.Tensor, ...], grad_loss: torch.Tensor | None) -> torch.Tensor:
    """Return grad_loss * 2 * codebook_weight / M * (n c - S).

    Here n and S are the count and the sum of each codeword's rows.
    """
    x, codebook, _, counts, sums = saved
    if grad_loss is None or ctx.codebook_weight == 0:
        return torch.zeros_like(codebook)
    if not ctx.with_sums:
        raise RuntimeError(
            "vq: with_sums=False does not compute the sums that the gradient of the codebook needs; set"
            " with_sums=True, or call uefl_kernels.vq"
        )
    return grad_codebook(
        codebook, counts, sums, grad_loss.double() * (2 * ctx.codebook_weight / max(1, x.numel()))
    )


def grad_codebook(
    codebook: torch.Tensor, counts: torch.Tensor, sums: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the squared error of the rows of a codebook.

    It is multiplied by ``scale``, a float64 scalar.
    """
    gradient: torch.Tensor = (counts.unsqueeze(-1) * codebook.double() - sums) * scale
    return gradient.to(codebook.dtype)


_JOINED_ON = ("cuda",)
"""devices where one call for a batch is faster than a call for each element"""


def _vmap(
    op: Callable[..., composed.Result], info: Any, in_dims: tuple[Any, ...], *arguments: Any
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Search all elements of a batch in one call, as segments with codebooks of their own."""
    given, (of_x, of_codebook, *_) = composed.Arguments(*arguments), in_dims
    if of_x is None or of_codebook is None or given.x.device.type not in _JOINED_ON:
        return one_by_one(op, info, in_dims, *arguments)
    x, codebooks = given.x.movedim(of_x, 0), given.codebook.movedim(of_codebook, 0)
    n, d = len(x), codebooks.shape[-1]
    segments = x.shape[-1] // d
    shared = codebooks.dim() == 3  # [n, K, d]: the segments of an element have one codebook
    each = codebooks.unsqueeze(1).expand(-1, segments, -1, -1) if shared else codebooks
    each = each.flatten(0, 1)
    joined = x.movedim(0, -2).flatten(-2)
    found = op(joined, each, given.metric, given.exact, given.with_sums, 0.0, 0.0, given.rotation)
    indices = found[1].unflatten(-1, (n, segments)).movedim(-2, 0)
    codewords = gather(each, found[1]).reshape(joined.shape).unflatten(-1, (n, -1)).movedim(-2, 0)
    counts, sums = found[3].unflatten(0, (n, segments)), found[4]
    if given.with_sums:
        sums = sums.unflatten(0, (n, segments))
        sums = sums.sum(1) if shared else sums
    else:
        sums = sums.expand(n, -1)
    return (
        found[0].unflatten(-1, (n, -1)).movedim(-2, 0),
        indices,
        _losses(x, codewords, given.codebook_weight, given.commitment_weight),
        counts.sum(1) if shared else counts,
        sums,
    ), (0,) * 5


def _losses(
    x: torch.Tensor, codewords: torch.Tensor, codebook_weight: float, commitment_weight: float
) -> torch.Tensor:
    """Return the loss ``[n]`` of each element of ``x [n, ..., D]``."""

    def error(x: torch.Tensor, codewords: torch.Tensor) -> torch.Tensor:
        squares = (x.to(result_dtype(x)) - codewords).square().flatten(1)
        return squares.sum(1) / max(1, squares.shape[1])

    losses = commitment_weight * error(x, codewords.detach())
    return losses + codebook_weight * error(x.detach(), codewords) if codebook_weight else losses


define(
    __name__,
    "vq",
    composed.Arguments,
    ["quantized", "indices", "loss", "counts", "sums"],
    fake=_fake,
    fallback=composed.fallback,
)
define_composed("vq", composed.around, kernel="vq_forward")
define_autograd("vq", _backward, _setup, gradient="vq_backward")
define_vmap("vq", _vmap)


def vq(
    x: torch.Tensor,
    codebook: torch.Tensor,
    *,
    metric: str = "l2",
    precision: str = "exact",
    codebook_weight: float = 1.0,
    commitment_weight: float = 0.25,
    estimator: str = "straight_through",
) -> VQOutput:
    """Replace every segment of x by its nearest codeword.

    This is the whole VQ layer in one call.

    Args:
        x: ``[..., D]``, float32, bfloat16, float16 or float64; any strides. D is cut into S = D / d
            contiguous segments.
        codebook: ``[K, d]`` shared by all segments, or ``[S, K, d]``; keep it in float32 when x is bfloat16
            or float16.
        metric: ``"l2"`` or ``"cosine"``; it decides only which codeword is nearest.
        precision: ``"exact"`` (the default) or ``"fast"``; see :func:`vq_assign`.
        codebook_weight: weight of mean((sg[x] - q)^2), which moves the codewords.
        commitment_weight: weight of mean((x - sg[q])^2), which moves x (the beta of the papers).
        estimator: how the gradient of quantized reaches x. ``"straight_through"``: unchanged. ``"rotation"``:
            multiplied by lambda R^T, where the rotation R and the factor lambda map the segment to its
            codeword, q = lambda R x. Here lambda = |q| / |x|, and R = 1 - 2 w w^T + 2 v u^T with the unit
            vectors u, v, w of x, q and u + v. lambda and R count as constants.

    Returns:
        :class:`VQOutput` ``(quantized, indices, loss, counts)``. Gradients: quantized passes its gradient to
        x as the estimator says and none to the codebook; loss has the closed forms of the two terms above. A
        row with NaN gets codeword 0 and makes the loss NaN. A row with an infinity gets the index of
        :func:`vq_assign` and makes the loss infinite. Both make only the gradient of their codeword NaN. N =
        0 gives a loss of 0.

    Only first derivatives in reverse mode exist. Second derivatives, forward mode, and ``torch.func.grad``
    and similar functions raise RuntimeError. ``torch.func.vmap`` calls the op once for each element of the
    batch. On a GPU it calls the op once for all elements if x and the codebook are batched.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`vq_assign`; ValueError for an estimator that is not one
            of the two and for a weight that is not finite.

    Source: van den Oord et al. 2017, "Neural Discrete Representation Learning", eqs. 1-3 (means instead of
    norms); Fifty et al. 2024, "Restructuring Vector Quantization with the Rotation Trick", section 4.2.

    Equivalent to (``[K, d]``, "l2")::

        indices = vq_assign(x, codebook)
        q = codebook[indices].reshape(x.shape)
        loss = codebook_weight * F.mse_loss(q, x.detach()) + commitment_weight * F.mse_loss(x, q.detach())
        quantized = x + (q - x).detach()   # exactly q; "rotation": lambda.detach() * (R.detach() @ x)
        counts = torch.bincount(indices.flatten(), minlength=K)
    """
    return _call(x, codebook, metric, precision, None, codebook_weight, commitment_weight, estimator)[0]


def vq_with_sums(
    x: torch.Tensor,
    codebook: torch.Tensor,
    *,
    metric: str = "l2",
    precision: str = "exact",
    codebook_weight: float = 1.0,
    commitment_weight: float = 0.25,
    estimator: str = "straight_through",
) -> tuple[VQOutput, torch.Tensor]:
    """Compute :func:`vq`, and the sum of the segments of each codeword, for a moving average or k-means.

    Returns:
        the output, and sums in the shape of the codebook, float64: exact to the unit of a 64-bit fixed point,
        the same on every backend and for any number of threads; NaN for a codeword that got a row with NaN or
        an infinity. No gradient.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`vq_assign`.

    Source: van den Oord et al. 2017, appendix A.1 (codewords as moving averages of these sums).

    Equivalent to (``[K, d]``)::

        out = vq(x, codebook)
        sums = torch.zeros(K, d, dtype=torch.float64)
        sums.index_add_(0, out.indices.flatten(), x.reshape(-1, d).double())
    """
    return _call(x, codebook, metric, precision, True, codebook_weight, commitment_weight, estimator)


def _call(
    x: torch.Tensor,
    codebook: torch.Tensor,
    metric: str,
    precision: str,
    with_sums: bool | None,
    codebook_weight: float,
    commitment_weight: float,
    estimator: str,
) -> tuple[VQOutput, torch.Tensor]:
    check_search("vq", x, codebook, metric, precision)
    check_weights("vq", codebook_weight=codebook_weight, commitment_weight=commitment_weight)
    compiling = torch.compiler.is_compiling()
    if with_sums is None:  # only the gradient of the codebook needs the sums
        with_sums = codebook_weight != 0 and needs_gradient(codebook, traced=not compiling)
    if not isinstance(estimator, str) or estimator not in ESTIMATORS:
        raise unknown("vq", "estimator", estimator, ESTIMATORS)
    check_reverse_mode("vq", x, codebook)
    differentiable = needs_gradient(x, codebook)
    if compiling and differentiable:
        # the caller may update it in place before the backward pass; eager autograd refuses that
        codebook = snapshot(codebook)
    if compiling or not codebook.is_contiguous():
        codebook = packed("vq", "codebook", codebook)
    given = composed.Arguments(
        x,
        codebook,
        metric,
        precision == "exact",
        with_sums,
        float(codebook_weight),
        float(commitment_weight),
        estimator == "rotation",
    )
    *out, sums = call("vq", x, given, differentiable)
    return VQOutput(*out), sums
