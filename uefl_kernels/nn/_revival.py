"""Codewords that hardly any row takes are put onto rows of the batch, without a wait for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import _distributed

if TYPE_CHECKING:
    from ._codebook import Codebook


def offer(book: Codebook, x: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """This process's share of K places for codewords: ``[h, K, 1]`` taken, ``[h, K, 1]`` priority, ``[h, K, d]`` rows of x.

    The places are dealt to the processes in turn, so the sum over processes is the offer of all of them, and each has as
    many rows to give as it has places, or all it has. Rows are distinct and spread evenly over the batch.
    """
    books, k, d = book.embed.shape
    dtype = book.embed.dtype
    rank, world = _distributed.rank_and_size(book.shared)
    priority = torch.zeros(books, k, 1, dtype=dtype, device=x.device)
    if rank == 0:
        priority = torch.rand_like(priority)
    if x.numel() == 0:
        return [torch.zeros_like(priority), priority, x.new_zeros(books, k, d, dtype=dtype)]
    heads = x.shape[-1] // d
    shared = heads // books  # rows per position of x: all its heads where they share the codewords
    places = -(-k // world)
    rows = torch.full((), x.shape[:-1].numel(), device=x.device) if mask is None else mask.sum()
    position, taken = _spread(rows * shared, books, places)
    head = position % shared if books == 1 else torch.arange(books, device=x.device).unsqueeze(-1).expand_as(position)
    position = position // shared
    if mask is not None:  # the j-th row that the mask lets through
        position = torch.searchsorted(mask.flatten().cumsum(0), position + 1).clamp(max=mask.numel() - 1)
    found = x[_coordinates(position, x.shape[:-1])].unflatten(-1, (heads, d))
    found = torch.take_along_dim(found, head[..., None, None], dim=-2).squeeze(-2).to(dtype)
    taken = taken & found.isfinite().all(-1)  # one broken row must not break a codeword for good
    found = found.masked_fill(~taken.unsqueeze(-1), 0)
    place = torch.arange(k, device=x.device)
    mine = ((place + book.steps) % world == rank).unsqueeze(-1)  # in turn, so that no codeword depends on one process
    turn = place // world
    return [taken[:, turn].unsqueeze(-1) * mine, priority, found[:, turn] * mine]


def revive(book: Codebook, taken: torch.Tensor, priority: torch.Tensor, rows: torch.Tensor) -> None:
    """Dead codewords, in random order, take the places that hold a row; with fewer rows than them the rest wait."""
    dead = book.cluster_size < book.threshold
    held = taken.squeeze(-1) > 0
    queue = priority.squeeze(-1).masked_fill(~dead, 2.0).argsort(dim=-1, stable=True).argsort(-1)
    place = (~held).to(torch.uint8).argsort(dim=-1, stable=True).gather(-1, queue)
    revived = dead & (queue < held.sum(-1, keepdim=True))
    new = rows.gather(1, place.unsqueeze(-1).expand_as(rows))
    book.cluster_size.masked_fill_(revived, book.threshold)
    revived = revived.unsqueeze(-1)
    book.embed.copy_(torch.where(revived, new, book.embed))
    book.embed_avg.copy_(torch.where(revived, new * book.threshold, book.embed_avg))


def _spread(rows: torch.Tensor, books: int, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to ``places`` distinct numbers below ``rows`` (a scalar tensor) in random order, ``[books, places]``, and which of them hold.

    One is drawn in each of min(rows, places) equal parts: the work does not grow with the number of rows, as a permutation's would.
    """
    parts = rows.clamp(max=places)
    taken = (torch.arange(places, device=rows.device) < parts).expand(books, places)
    order = _uniform(books, places, rows.device).masked_fill(~taken, 2.0).argsort(-1)
    parts = parts.clamp(min=1)
    low, high = order * rows // parts, (order + 1) * rows // parts
    drawn = low + (_uniform(books, places, rows.device) * (high - low)).long()
    return torch.minimum(drawn, high - 1).clamp(min=0).minimum((rows - 1).clamp(min=0)), taken


def _uniform(books: int, places: int, device: torch.device) -> torch.Tensor:
    return torch.rand(books, places, device=device, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))


def _coordinates(position: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, ...]:
    """Flat positions as one index per dimension; torch.unravel_index copies the shape to the device and waits for that."""
    found = []
    for size in reversed(shape):
        found.append(position % size)
        position = position // size
    return tuple(reversed(found))
