"""``kmeans_labels`` around a search, and ``kmeans_distances``, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..._dtypes import result_dtype
from ..kmeans_step import composed as steps
from ..vq_assign import Arguments as VqAssignArguments
from ..vq_assign.distances import square_root
from ..vq_assign.fallback import search

_BLOCK_ELEMENTS = 1 << 22  # of the float64 differences that are in memory at a time
LabelsAndDistances = tuple[torch.Tensor, torch.Tensor]


class Arguments(NamedTuple):
    """Arguments of ``kmeans_labels``."""

    x: torch.Tensor
    """``[N, d]``"""
    centers: torch.Tensor
    """``[k, d]``"""
    with_distances: bool


class DistanceArguments(NamedTuple):
    """Arguments of ``kmeans_distances``."""

    x: torch.Tensor
    """``[N, d]``"""
    centers: torch.Tensor
    """``[k, d]`` float64"""


def fallback(given: Arguments) -> LabelsAndDistances:
    """Compute ``kmeans_labels`` where no kernel runs."""
    return compose(lambda: search(given.x, given.centers, "l2"), given)


def around(vq_assign: Callable[..., torch.Tensor], given: Arguments) -> LabelsAndDistances:
    """Compute ``kmeans_labels`` around the search of a backend."""
    return compose(lambda: vq_assign(*VqAssignArguments(given.x, given.centers, "l2", exact=True)), given)


def compose(assign: Callable[[], torch.Tensor], given: Arguments) -> LabelsAndDistances:
    """Check the rows, and compute labels and the distances to their centers.

    The sums have the order of ``square_norms``.
    """
    x, centers, with_distances = given
    steps.require_valid("kmeans_labels", x, None)
    labels = assign()[:, 0].contiguous()
    none = x.new_empty(0, dtype=torch.float64)
    return labels, steps.distances(x, centers, labels) if with_distances else none


def kmeans_distances(given: DistanceArguments) -> torch.Tensor:
    """Compute the distance of each row to each center, [N, k]."""
    x, centers = given
    steps.require_valid("kmeans_labels", x, None)
    (n, d), k = x.shape, len(centers)
    found = x.new_empty(n, k, dtype=result_dtype(x))
    step = max(1, _BLOCK_ELEMENTS // (d * k))
    for start in range(0, n, step):
        block = x[start : start + step].double()
        squares = steps.square_norms((block[:, None] - centers).reshape(-1, d))
        found[start : start + step] = square_root(squares).reshape(len(block), k)
    return found
