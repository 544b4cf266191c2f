"""The definition of ``kmeans_labels`` and ``kmeans_distances``; distances are sums in the order of
``square_norms``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..kmeans_step import reference as steps
from ..vq_assign import fallback
from ..vq_assign.reference import _sqrt as square_root
from ..vq_assign.reference import search

_BLOCK_ELEMENTS = 1 << 22  # of the float64 differences that are in memory at a time


def kmeans_labels(
    x: torch.Tensor, centers: torch.Tensor, with_distances: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, d] and centers [k, d] -> labels [N] and squared distances [N], or [0]."""
    return _labels(lambda: search(x, centers, "l2")[:, 0], x, centers, with_distances)


def kmeans_labels_fallback(
    x: torch.Tensor, centers: torch.Tensor, with_distances: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same by the faster search."""
    return _labels(lambda: fallback.search(x, centers, "l2")[:, 0], x, centers, with_distances)


def kmeans_labels_around(
    vq_assign: Callable[..., torch.Tensor], x: torch.Tensor, centers: torch.Tensor, with_distances: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same by the search of a backend."""
    return _labels(lambda: vq_assign(x, centers, "l2", True)[:, 0], x, centers, with_distances)


def kmeans_distances(x: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """Rows [N, d] and centers [k, d] float64 -> distances [N, k], float64 for float64 x and float32 for all
    else."""
    steps.require_valid("kmeans_labels", x, None)
    (n, d), k = x.shape, len(centers)
    found = x.new_empty(n, k, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    step = max(1, _BLOCK_ELEMENTS // (d * k))
    for start in range(0, n, step):
        part = x[start : start + step].double()
        squares = steps.square_norms((part[:, None] - centers).reshape(-1, d))
        found[start : start + step] = square_root(squares).reshape(len(part), k)
    return found


def _labels(
    assign: Callable[[], torch.Tensor], x: torch.Tensor, centers: torch.Tensor, with_distances: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    steps.require_valid("kmeans_labels", x, None)
    labels = assign().contiguous()
    return labels, steps.distances(x, centers, labels) if with_distances else x.new_empty(
        0, dtype=torch.float64
    )
