"""The ops of quantizers in plain PyTorch, for exporters that know no custom ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _snapshot  # noqa: F401  defines the op
from ._gather import flat_indices, gather
from ._library import plain
from .ops import fsq as _fsq  # noqa: F401
from .ops import rvq as _rvq  # noqa: F401
from .ops import vq as _vq  # noqa: F401  defines the op
from .ops import vq_assign as _vq_assign  # noqa: F401
from .ops.fsq import composed as fsq_composed
from .ops.rvq import composed


def vq_assign(x: torch.Tensor, codebook: torch.Tensor, metric: str, exact: bool) -> torch.Tensor:
    """Return indices ``[..., S]`` for x ``[..., D]`` and codebook ``[K, d]`` or ``[S, K, d]``."""
    rows, codewords = _segments(x, codebook).double(), codebook.double()
    if metric == "cosine":
        length = codewords.norm(dim=-1, keepdim=True)
        codewords = torch.where(length == 0, 0.0, codewords / length)
    one = codewords.dim() == 2  # codebook for all segments
    near = rows @ codewords.mT if one else (rows.unsqueeze(-2) @ codewords.mT).squeeze(-2)  # [..., S, K]
    if metric == "l2":  # a row with an infinity or NaN is equally far from all codewords
        near = torch.where(rows.isfinite().all(-1, keepdim=True), 2 * near - codewords.square().sum(-1), 0.0)
    return torch.where(near.isnan(), -torch.inf, near).argmax(-1)


def vq(
    x: torch.Tensor,
    codebook: torch.Tensor,
    metric: str,
    exact: bool,
    with_sums: bool,
    codebook_weight: float,
    commitment_weight: float,
    rotation: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return quantized, indices, loss, counts and sums, without gradients."""
    indices = vq_assign(x, codebook, metric, exact)
    rows, codewords = _segments(x, codebook).double(), gather(codebook, indices)
    # ONNX has no size of all dimensions
    loss = (rows - codewords.double()).square().mean() * (codebook_weight + commitment_weight)
    flat = flat_indices(codebook, indices)
    counts = torch.zeros(codebook.shape[:-1].numel(), dtype=torch.int64, device=x.device).index_add(
        0, flat, torch.ones_like(flat)
    )
    sums = rows.new_zeros(0)
    if with_sums:
        sums = rows.new_zeros(len(counts), codebook.shape[-1]).index_add(
            0, flat, rows.reshape(-1, codebook.shape[-1])
        )
        sums = sums.view(codebook.shape)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        codewords.to(x.dtype).reshape(x.shape),
        indices,
        loss.to(dtype),
        counts.view(codebook.shape[:-1]),
        sums,
    )


def rvq(
    x: torch.Tensor, codebooks: Sequence[torch.Tensor], *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return quantized, indices, losses, counts and sums of all stages, without gradients."""
    return composed.compose(lambda given: vq(*given), composed.Arguments(x, codebooks, *options))


def fsq(z: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return quantized and indices."""
    given = fsq_composed.Arguments(z, *options)
    return fsq_composed.formula(z, given.form, given.indexed)


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy."""
    return tensor.clone()


def _segments(x: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Cut x ``[..., D]`` into segments ``[..., S, d]``."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // codebook.shape[-1], codebook.shape[-1])


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the ops of quantizers as plain PyTorch, for ``ExportedProgram.run_decompositions``.

    ``torch.onnx.export(layer.eval(), (x,), dynamo=True)`` uses them by itself. Other exporters, and
    ``torch.onnx.export`` of a program, do not know custom ops. In a program with these decompositions a
    search is the argmin of distances from float64 products: indices agree with the ops unless two codewords
    are equally near to some 15 digits.

    Returns:
        a dictionary from ops to functions: ``torch.export.default_decompositions()`` and the ops here, such
        as ``uefl::vq``, of x ``[..., D]`` and a codebook ``[K, d]`` or ``[S, K, d]``.

    Raises: nothing.

    Source: as :func:`vq_assign`.

    Equivalent to: nothing in PyTorch.

    Example::

        program = torch.export.export(layer.eval(), (x,)).run_decompositions(uefl_kernels.decompositions())
        torch.onnx.export(program, dynamo=True).save("layer.onnx")
    """
    own = {getattr(torch.ops.uefl, name).default: function for name, function in plain.items()}
    return {**torch.export.default_decompositions(), **own}


plain.update(vq_assign=vq_assign, vq=vq, rvq=rvq, fsq=fsq, snapshot=snapshot)
