"""The codewords of a VQ layer and all that moves them besides a gradient: moving averages, revival, k-means.

Nothing here waits for the device, except for the first batch of ``kmeans_init`` where a mask or other processes have a part in it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import vq_with_sums
from . import _distributed as distributed
from ._float32 import Float32Module


class Codebook(Float32Module):
    """``[h, K, d]`` codewords, h = 1 where all heads share them; its state has the names that vector-quantize-pytorch uses."""

    initted: torch.Tensor
    cluster_size: torch.Tensor
    embed_avg: torch.Tensor
    embed: torch.Tensor
    counts: torch.Tensor
    steps: torch.Tensor

    def __init__(
        self,
        codebooks: int,
        codebook_size: int,
        dim: int,
        *,
        decay: float,
        eps: float,
        kmeans_init: bool,
        kmeans_iters: int,
        cosine: bool,
        threshold: float,
        learnable: bool,
        ema_update: bool,
    ) -> None:
        super().__init__()
        self.decay, self.eps, self.kmeans_iters = decay, eps, kmeans_iters
        self.cosine, self.threshold, self.ema_update = cosine, threshold, ema_update
        embed = torch.zeros(codebooks, codebook_size, dim)
        if not kmeans_init:
            nn.init.kaiming_uniform_(embed)
            embed = self._scaled(embed)
        self.register_buffer("initted", torch.tensor(not kmeans_init))
        self.register_buffer("cluster_size", torch.ones(codebooks, codebook_size))
        self.register_buffer("embed_avg", embed.clone())
        if learnable:
            self.embed = nn.Parameter(embed)
        else:
            self.register_buffer("embed", embed)
        self.register_buffer("counts", torch.zeros(codebooks, codebook_size, dtype=torch.int64), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self.waiting = kmeans_init  # the host's copy of `not initted`

    @property
    def metric(self) -> str:
        """The metric of the search."""
        return "cosine" if self.cosine else "l2"

    @property
    def tracks(self) -> bool:
        """Whether training needs the counts and sums of a batch."""
        return self.ema_update or self.threshold > 0

    @property
    def codes(self) -> torch.Tensor:
        """``[K, d]`` where the heads share them, else ``[h, K, d]``: what the ops take."""
        return self.embed[0] if len(self.embed) == 1 else self.embed

    # --- the step of a batch -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, counts: torch.Tensor, sums: torch.Tensor, x: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Move the averages towards this batch, the codewords with them, and put dead codewords onto rows of x.

        Args:
            counts, sums: ``[h, K]`` and ``[h, K, d]``, of the rows that the mask lets through.
            x: ``[..., heads * d]``, what was quantised.
            mask: ``[...]`` bool, or None.
        """
        batch = [counts.to(self.embed_avg.dtype).unsqueeze(-1), sums.to(self.embed_avg.dtype)]
        if self.threshold > 0:
            batch += self._offer(x, mask)
        batch = distributed.all_reduce(batch)
        self.cluster_size.lerp_(batch[0].squeeze(-1), 1 - self.decay)
        self.embed_avg.lerp_(batch[1], 1 - self.decay)
        if self.ema_update:
            self._average()
        if self.threshold > 0:
            self._revive(*batch[2:])
        self.steps.add_(1)

    def _average(self) -> None:
        """Codewords = sums / sizes, where Laplace smoothing keeps a size above zero."""
        total = self.cluster_size.sum(-1, keepdim=True)
        size = (self.cluster_size + self.eps) / (total + self.cluster_size.shape[-1] * self.eps) * total
        size = size.unsqueeze(-1)  # zero only where every average is: decay 0 and a batch without rows
        self.embed.copy_(torch.where(size > 0, self._scaled(self.embed_avg / size), self.embed))

    def _scaled(self, codes: torch.Tensor) -> torch.Tensor:
        return F.normalize(codes, dim=-1, eps=1e-6) if self.cosine else codes

    # --- revival -----------------------------------------------------------------------------------------------------

    def _offer(self, x: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
        """This process's share of K places for codewords: ``[h, K, 1]`` taken, ``[h, K, 1]`` priority, ``[h, K, d]`` rows of x.

        The places are dealt to the processes in turn, so the sum over processes is the offer of all of them, and each has as
        many rows to give as it has places, or all it has. Rows are distinct and spread evenly over the batch.
        """
        books, k, d = self.embed.shape
        rank, world = distributed.rank_and_size()
        priority = torch.rand(books, k, 1, device=x.device) if rank == 0 else torch.zeros(books, k, 1, device=x.device)
        if x.numel() == 0:
            return [torch.zeros_like(priority), priority, x.new_zeros(books, k, d, dtype=self.embed.dtype)]
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
        found = torch.take_along_dim(found, head[..., None, None], dim=-2).squeeze(-2).to(self.embed.dtype)
        taken = taken & found.isfinite().all(-1)  # one broken row must not break a codeword for good
        found = found.masked_fill(~taken.unsqueeze(-1), 0)
        place = torch.arange(k, device=x.device)
        mine = ((place + self.steps) % world == rank).unsqueeze(-1)  # in turn, so that no codeword depends on one process
        turn = place // world
        return [taken[:, turn].unsqueeze(-1) * mine, priority, found[:, turn] * mine]

    def _revive(self, taken: torch.Tensor, priority: torch.Tensor, rows: torch.Tensor) -> None:
        """Dead codewords, in random order, take the places that hold a row; with fewer rows than them the rest wait."""
        dead = self.cluster_size < self.threshold
        held = taken.squeeze(-1) > 0
        queue = priority.squeeze(-1).masked_fill(~dead, 2.0).argsort(dim=-1, stable=True).argsort(-1)
        place = (~held).to(torch.uint8).argsort(dim=-1, stable=True).gather(-1, queue)
        revived = dead & (queue < held.sum(-1, keepdim=True))
        new = rows.gather(1, place.unsqueeze(-1).expand_as(rows))
        self.cluster_size.masked_fill_(revived, self.threshold)
        revived = revived.unsqueeze(-1)
        self.embed.copy_(torch.where(revived, new, self.embed))
        self.embed_avg.copy_(torch.where(revived, new * self.threshold, self.embed_avg))

    # --- k-means of the first batch ----------------------------------------------------------------------------------

    @torch.no_grad()
    def initialize(self, x: torch.Tensor, mask: torch.Tensor | None) -> None:
        """k-means on the rows ``[..., heads * d]`` of the first batch; later calls do nothing.

        A batch without a single row, over all processes, leaves it to the next one. These are the peer's rounds, not those of ``kmeans``:
        an empty cluster stays where it is, cosine scales the means and not the rows, there is no early end, and processes add up their
        sums in every round. One op does all heads of a round. A batch that is not finite, of any process, is refused on the CPU.
        """
        if not self.waiting:
            return
        books, k, d = self.embed.shape
        x = x[mask].float() if mask is not None else x.float()
        if x.device.type == "cpu":  # elsewhere the host would wait for the answer
            broken = distributed.all_reduce([x.isfinite().logical_not().any().float().view(1, 1, 1)])[0]
            torch._assert_async(broken == 0, _BROKEN)  # unlike an if it can be compiled
        split = x.unflatten(-1, (-1, d))
        # Drawn in the order (batch, head, position): the same seed gives the same codewords as the peer.
        samples = split.movedim(-2, 0).reshape(books, -1, d) if books > 1 else split.movedim(-2, min(1, x.dim() - 1)).reshape(1, -1, d)
        means = distributed.sample_rows(samples, k)
        if means is None:
            return
        means = self._scaled(means)
        counts = means.new_zeros(books, k, 1)
        for _ in range(self.kmeans_iters):
            out, sums = vq_with_sums(x, means[0] if books == 1 else means, metric=self.metric)
            counts, sums = distributed.all_reduce([out.counts.view(books, k, 1).float(), sums.view(books, k, d).float()])
            means = torch.where(counts > 0, self._scaled(sums / counts.clamp(min=1)), means)
        self.embed_avg.copy_(means * counts)
        self.cluster_size.copy_(counts.squeeze(-1))
        self._average()
        self.initted.fill_(True)
        self.waiting = False

    # --- state -------------------------------------------------------------------------------------------------------

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.waiting = not bool(self.initted)


_BROKEN = "VectorQuantize: the batch for k-means initialisation holds NaN or infinity; remove or replace those rows, or mask them"


def _spread(rows: torch.Tensor, books: int, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to ``places`` distinct numbers below ``rows`` (a scalar tensor) in random order, ``[books, places]``, and which of them hold.

    One is drawn in each of min(rows, places) equal parts: the work does not grow with the number of rows, as a permutation's would.
    """
    parts = rows.clamp(max=places)
    taken = (torch.arange(places, device=rows.device) < parts).expand(books, places)
    order = torch.rand(books, places, device=rows.device).masked_fill(~taken, 2.0).argsort(-1)
    parts = parts.clamp(min=1)
    low, high = order * rows // parts, (order + 1) * rows // parts
    drawn = low + (torch.rand(books, places, device=rows.device) * (high - low)).long()
    return torch.minimum(drawn, high - 1).clamp(min=0).minimum((rows - 1).clamp(min=0)), taken


def _coordinates(position: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, ...]:
    """Flat positions as one index per dimension; torch.unravel_index copies the shape to the device and waits for that."""
    found = []
    for size in reversed(shape):
        found.append(position % size)
        position = position // size
    return tuple(reversed(found))
