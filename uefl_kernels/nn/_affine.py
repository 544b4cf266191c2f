"""Codewords moved and scaled to the mean and the variance of the batches (Huh et al. 2023, "Straightening Out the Straight-Through")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import _distributed
from ._kmeans_init import by_book

if TYPE_CHECKING:
    from ._codebook import Codebook


class Decays(NamedTuple):
    """Of the averaged statistics, and whether those of a batch are taken over all processes."""

    batch: float
    codebook: float
    shared: bool


_OF_BATCH = ("batch_mean", "batch_variance")
_OF_CODES = ("codebook_mean", "codebook_variance")


def register(book: Codebook) -> None:
    """Add the statistics to the state, with the peer's names; those of the batch come with the first one."""
    for name in _OF_BATCH:
        book.register_buffer(name, None)
    for name in _OF_CODES:
        book.register_buffer(f"{name}_needs_init", torch.tensor(True))
        book.register_buffer(name, torch.zeros_like(book.embed_avg[:, :1]))


def expect(book: Codebook, state: Mapping[str, Any], prefix: str) -> None:
    """Make room for the statistics of the batch, where the state to be loaded has them."""
    for name in _OF_BATCH:
        if prefix + name in state and getattr(book, name) is None:
            setattr(book, name, torch.zeros_like(book.embed_avg[:, :1]))


@torch.no_grad()
def update(book: Codebook, x: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Move the statistics towards those of the codewords and of the rows ``[..., heads * d]`` that the mask lets through."""
    decays = book.affine
    assert decays is not None
    embed = book.embed.detach()
    for name, new in zip(_OF_CODES, (embed.mean(1, keepdim=True), embed.var(1, unbiased=False, keepdim=True)), strict=True):
        old, first = getattr(book, name), getattr(book, f"{name}_needs_init")
        old.copy_(torch.where(first, new, old * decays.codebook + new * (1 - decays.codebook)))
        first.fill_(False)
    books, _, d = embed.shape
    rows = by_book(x.to(embed.dtype), books, d)
    kept = rows.new_ones(books, rows.shape[1], 1)
    if mask is not None:
        kept = by_book(mask.unsqueeze(-1).expand(x.shape), books, d)[..., :1].to(rows.dtype)
    count, total = _distributed.all_reduce([kept.sum(1, keepdim=True), (rows * kept).sum(1, keepdim=True)], decays.shared)
    mean = total / count.clamp(min=1)
    squares = ((rows - mean).square() * kept).sum(1, keepdim=True)
    variance = _distributed.all_reduce([squares], decays.shared)[0] / count.clamp(min=1)
    for name, new in zip(_OF_BATCH, (mean, variance), strict=True):
        old = getattr(book, name)
        setattr(book, name, new if old is None else old * decays.batch + new * (1 - decays.batch))


def to_batch(book: Codebook, codes: torch.Tensor) -> torch.Tensor:
    """Codewords to where the batches are; unchanged before the first batch of training."""
    if book.batch_mean is None:
        return codes
    return (codes - book.codebook_mean) / _ratio(book) + book.batch_mean


def to_codebook(book: Codebook, sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Sums of rows to what they would be for rows moved to where the codewords are."""
    if book.batch_mean is None:
        return sums
    return (sums - counts * book.batch_mean) * _ratio(book) + counts * book.codebook_mean


def _ratio(book: Codebook) -> torch.Tensor:
    ratio: torch.Tensor = book.codebook_variance.clamp(min=1e-5).sqrt() / book.batch_variance.clamp(min=1e-5).sqrt()
    return ratio
