"""``rvq`` as one ``vq`` for each stage: its definition, and how it runs on a GPU and in Triton.

No stage waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ..._gather import gather
from ..vq import composed as vq
from ..vq.forward import composed as forward

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Arguments(NamedTuple):
    """Arguments of the op."""

    x: torch.Tensor
    """``[..., D]``"""
    codebooks: Sequence[torch.Tensor]
    """one for each stage, ``[K, d]`` or ``[S, K, d]``; K may differ"""
    metric: str
    exact: bool
    with_sums: bool
    codebook_weight: float
    commitment_weight: float
    rotation: bool


def fallback(given: Arguments) -> Result:
    """Compute ``rvq`` where no kernel runs."""
    return compose(vq.fallback, given)


def around(vq_forward: Callable[..., forward.Result], given: Arguments) -> Result:
    """Compute ``rvq`` around the ``vq_forward`` of a backend."""
    return compose(partial(vq.around, vq_forward), given)


def compose(stage: Callable[[vq.Arguments], vq.Result], given: Arguments) -> Result:
    """Compute ``rvq`` of a ``vq``.

    Counts and sums of the stages follow one another.
    """
    residual = given.x
    total = torch.zeros(residual.shape, dtype=residual.dtype, device=residual.device)
    found = []
    for place, codebook in enumerate(given.codebooks):
        quantized, *others = stage(vq.Arguments(residual, codebook, *given[2:]))
        found.append(others)
        total = total + quantized
        if place + 1 < len(given.codebooks):
            residual = residual - quantized
    indices, losses, counts, sums = zip(*found, strict=True)
    d = given.codebooks[0].shape[-1]
    return (
        total,
        torch.stack(indices, -1),
        torch.stack(losses),
        torch.cat([counted.flatten() for counted in counts]),
        torch.cat([summed.reshape(-1, d) for summed in sums]),
    )


def residuals(
    x: torch.Tensor, codebooks: Sequence[torch.Tensor], indices: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Yield the input of each stage, for x ``[..., D]`` and indices ``[..., S, Q]``.

    The bits are the same as in the op.
    """
    yield x
    for codebook, chosen in zip(codebooks[:-1], indices.unbind(-1)[:-1], strict=True):
        x = x - gather(codebook, chosen).to(x.dtype).reshape(x.shape)
        yield x
