"""k-means on the first batch of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .. import vq_with_sums
from . import _distributed

if TYPE_CHECKING:
    from ._codebook import Codebook

_BROKEN = "VectorQuantize: the batch for k-means initialisation holds NaN or infinity; remove or replace those rows, or mask them"


def kmeans(book: Codebook, x: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Means ``[h, K, d]`` and sizes ``[h, K, 1]`` of the rows ``[..., heads * d]``; None without a row.

    These are the peer's rounds, not those of ``kmeans``: an empty cluster stays where it is, cosine scales the means and not the rows,
    there is no early end, and processes add up their sums in every round. One op does all heads of a round. A batch that is not finite,
    of any process, is refused on the CPU.
    """
    books, k, d = book.embed.shape
    x = x[mask].float() if mask is not None else x.float()
    if x.device.type == "cpu":  # elsewhere the host would wait for the answer
        broken = x.isfinite().logical_not().any().float().view(1, 1, 1)
        broken = _distributed.all_reduce([broken], book.shared_kmeans)[0]
        torch._assert_async((broken == 0) | book.initted, _BROKEN)  # unlike an if it can be compiled
    means = _distributed.sample_rows(by_book(x, books, d), k, book.shared_kmeans)
    if means is None:
        return None
    means = book.scaled(means)
    counts = means.new_zeros(books, k, 1)
    for _ in range(book.kmeans_iters):
        out, sums = vq_with_sums(x, means[0] if books == 1 else means, metric=book.metric)
        parts = [out.counts.view(books, k, 1).float(), sums.view(books, k, d).float()]
        counts, sums = _distributed.all_reduce(parts, book.shared_kmeans)
        means = torch.where(counts > 0, book.scaled(sums / counts.clamp(min=1)), means)
    return means, counts


def by_book(x: torch.Tensor, books: int, d: int) -> torch.Tensor:
    """``[..., heads * d]`` -> ``[h, n, d]`` in the peer's order (batch, head, position): the same seed draws the same rows."""
    split: torch.Tensor = x.unflatten(-1, (x.shape[-1] // d, d))  # type: ignore[no-untyped-call]
    if books > 1:
        return split.movedim(-2, 0).reshape(books, -1, d)
    return split.movedim(-2, min(1, x.dim() - 1)).reshape(1, -1, d)
