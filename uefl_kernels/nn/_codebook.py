"""The codewords of a VQ layer and all that moves them besides a gradient: moving averages, revival, k-means.

Nothing here waits for the device, except where ``kmeans_init`` asks whether its first batch is still to come: once after every change
of the buffer ``initted``, and in that batch where a mask or other processes have a part in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from . import _affine, _distributed, _kmeans_init, _recompute, _revival
from ._float32 import Float32Module, no_autocast

Weight = torch.Tensor | Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Codebook(Float32Module):
    """``[h, K, d]`` codewords, h = 1 where all heads share them; its state has the names that vector-quantize-pytorch uses."""

    initted: torch.Tensor
    cluster_size: torch.Tensor
    embed_avg: torch.Tensor
    embed: torch.Tensor
    counts: torch.Tensor
    steps: torch.Tensor
    batch_mean: torch.Tensor | None
    batch_variance: torch.Tensor
    codebook_mean: torch.Tensor
    codebook_variance: torch.Tensor

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
        manual_ema_update: bool = False,
        shared: bool = True,
        shared_kmeans: bool = True,
        affine: _affine.Decays | None = None,
        bridge: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.decay, self.eps, self.kmeans_init, self.kmeans_iters = decay, eps, kmeans_init, kmeans_iters
        self.cosine, self.threshold = cosine, threshold
        self.ema_update, self.manual_ema_update = ema_update, manual_ema_update
        self.shared, self.shared_kmeans = shared, shared and shared_kmeans
        # Also in a process whose default is bfloat16, where averages would stop moving.
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        embed = torch.zeros(codebooks, codebook_size, dim, dtype=dtype)
        if not kmeans_init:
            nn.init.kaiming_uniform_(embed)
            embed = self.scaled(embed)
        self.register_buffer("initted", torch.tensor(not kmeans_init))
        self.register_buffer("cluster_size", torch.ones(codebooks, codebook_size, dtype=dtype))
        self.register_buffer("embed_avg", embed.clone())
        if learnable:
            self.embed = nn.Parameter(embed)
        else:
            self.register_buffer("embed", embed)
        self.vq_bridge = bridge
        self.affine = affine
        if affine is not None:
            _affine.register(self)
        self.register_buffer("counts", torch.zeros(codebooks, codebook_size, dtype=torch.int64), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        # Counts and sums of batches that wait for the next; no buffers, which DistributedDataParallel would make those of one process.
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self._known: tuple[torch.Tensor, int] | None = None  # the buffer `initted` and its version when it was seen to be True
        self.memory = _recompute.Memory()

    def extra_repr(self) -> str:
        """The sizes."""
        books, k, d = self.embed.shape
        return f"codebooks={books}, codebook_size={k}, dim={d}, learnable={isinstance(self.embed, nn.Parameter)}"

    @property
    def metric(self) -> str:
        """The metric of the search."""
        return "cosine" if self.cosine else "l2"

    @property
    def codes(self) -> torch.Tensor:
        """``[h, K, d]`` as they are searched."""
        return self.seen(self.embed)

    def seen(self, embed: torch.Tensor) -> torch.Tensor:
        """Codewords behind the bridge and the affine map, where there are any."""
        with no_autocast(embed.device):
            codes: torch.Tensor = embed if self.vq_bridge is None else self.vq_bridge(embed)
        return codes if self.affine is None else _affine.to_batch(self, codes)

    # --- the step of a batch -----------------------------------------------------------------------------------------

    def tracks(self, ema: bool | None = None) -> bool:
        """Whether training needs the counts and sums of a batch."""
        return (self.ema_update if ema is None else ema) or self.threshold > 0

    @torch.no_grad()
    def update(
        self,
        counts: torch.Tensor,
        sums: torch.Tensor,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        weight: Weight | None = None,
        accumulate: bool = False,
        ema: bool | None = None,
    ) -> None:
        """Move the averages towards this batch, the codewords with them, and put dead codewords onto rows of x.

        Args:
            counts, sums: ``[h, K]`` and ``[h, K, d]``, of the rows that the mask lets through. A codeword that got a row of NaN, whose
                sum is then NaN, sits this step out.
            x: ``[..., heads * d]``, what was quantised.
            mask: ``[...]`` bool, or None.
            weight: of this batch in the averages of each codeword, ``[K]`` or ``[h, K]``, or a function of sums and sizes that gives it.
            accumulate: only add the batch to the next one that does not accumulate.
            ema: overrides ``ema_update``.
        """
        counts, sums = counts.view_as(self.counts), sums.view_as(self.embed)
        unsound = sums.isnan().any(-1)
        counts, sums = counts.masked_fill(unsound, 0), sums.masked_fill(unsound.unsqueeze(-1), 0)
        if self.affine is not None:
            sums = _affine.to_codebook(self, sums, counts.unsqueeze(-1))
        if self.pending is not None:
            counts, sums = counts + self.pending[0], sums + self.pending[1]
            self.pending = None
        if accumulate:
            self.pending = counts, sums
            return
        batch = [counts.to(self.embed_avg.dtype).unsqueeze(-1), sums.to(self.embed_avg.dtype)]
        if self.threshold > 0:
            batch += _revival.offer(self, x, mask)
        batch = _distributed.all_reduce(batch, self.shared)
        self._move(batch[0].squeeze(-1), batch[1], weight)
        if (self.ema_update if ema is None else ema) and not self.manual_ema_update:
            self.update_ema()
        if self.threshold > 0:
            _revival.revive(self, *batch[2:])
        self.steps.add_(1)

    def _move(self, size: torch.Tensor, total: torch.Tensor, weight: Weight | None) -> None:
        step: float | torch.Tensor = 1 - self.decay
        if weight is not None:
            weight = weight if isinstance(weight, torch.Tensor) else weight(total, size)
            weight = weight.to(size).expand(size.shape)
            step = step * weight
        self.cluster_size.lerp_(size, step)
        self.embed_avg.lerp_(total, step.unsqueeze(-1) if isinstance(step, torch.Tensor) else step)

    @torch.no_grad()
    def update_ema(self) -> None:
        """Codewords = sums / sizes, where Laplace smoothing keeps a size above zero; what ``manual_ema_update`` leaves to the caller."""
        total = self.cluster_size.sum(-1, keepdim=True)
        size = (self.cluster_size + self.eps) / (total + self.cluster_size.shape[-1] * self.eps) * total
        size = size.unsqueeze(-1)  # zero only where every average is: decay 0 and a batch without rows
        self.embed.copy_(torch.where(size > 0, self.scaled(self.embed_avg / size), self.embed))

    @torch.no_grad()
    def expire(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Put dead codewords onto rows of x ``[..., heads * d]``."""
        if self.threshold > 0:
            _revival.revive(self, *_distributed.all_reduce(_revival.offer(self, x, mask), self.shared))
            self.steps.add_(1)

    @torch.no_grad()
    def assign(self, codes: torch.Tensor) -> None:
        """Set the codewords ``[h, K, d]`` and their averages, so that the next step moves them from there, and k-means leaves them."""
        self.embed.copy_(codes)
        self.embed_avg.copy_(codes * self.cluster_size.unsqueeze(-1))
        self.initted.fill_(True)

    def scaled(self, codes: torch.Tensor) -> torch.Tensor:
        """Codewords of length 1 where the metric is the angle."""
        return F.normalize(codes, dim=-1, eps=1e-6) if self.cosine else codes

    # --- k-means of the first batch ----------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether k-means may still have to come: what the buffer ``initted`` says, whoever wrote it.

        Where the host cannot ask (in a graph, on fake tensors) that is so for every buffer that it has not seen to be True; what
        :meth:`initialize` then does leaves a codebook alone that has begun.
        """
        if not self.kmeans_init:
            return False
        known = self._known
        if torch.compiler.is_dynamo_compiling():
            return known is None or known[0] is not self.initted
        if torch.compiler.is_compiling() or self.initted.is_meta or isinstance(self.initted, FakeTensor):
            return known is None  # export puts other tensors into the buffers while it traces
        if known is not None and known[0] is self.initted and known[1] == self.initted._version and self.initted.device.type != "cpu":
            return False
        if not bool(self.initted):
            return True
        self._known = (self.initted, self.initted._version)
        return False

    @torch.no_grad()
    def initialize(self, x: torch.Tensor, mask: torch.Tensor | None) -> None:
        """k-means on the rows ``[..., heads * d]`` of the first batch, for a codebook that is ``waiting``.

        A batch without a single row, over all processes, leaves it to the next one.
        """
        found = _kmeans_init.kmeans(self, x, mask)
        if found is None:
            return
        means, counts = found
        begun, embed, size, average = self.initted, self.embed.clone(), self.cluster_size.clone(), self.embed_avg.clone()
        self.embed_avg.copy_(means * counts)
        self.cluster_size.copy_(counts.squeeze(-1))
        self.update_ema()
        for buffer, before in ((self.embed, embed), (self.cluster_size, size), (self.embed_avg, average)):
            buffer.copy_(torch.where(begun, before, buffer))
        begun.fill_(True)
        self._known = (begun, 0 if torch.compiler.is_compiling() else begun._version)

    # --- state -------------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Codebook:
        known = self._known is not None and self._known[0] is self.initted
        super()._apply(fn, recurse)
        self._known = (self.initted, self.initted._version) if known else None
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: Any, *args: Any) -> None:
        if self.affine is not None:
            _affine.expect(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._known = None
        if self.initted.is_meta or isinstance(self.initted, FakeTensor):
            return
        if bool(self.initted):
            self._known = (self.initted, self.initted._version)
        else:
            self.kmeans_init = True
