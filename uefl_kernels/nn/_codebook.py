"""The codewords of a VQ layer and their updates without a gradient.

The updates are moving averages, revival of dead codewords, k-means, and an affine map.

The host waits for the device only with ``kmeans_init``: when it reads the flag ``initted``, once after each
change of this flag, and in the first batch with a mask or with several processes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.parametrize import is_parametrized

from .. import vq_with_sums
from .._checks import check_reverse_mode
from .._library import call, exporting_to_onnx
from ..ops.ema_update.composed import Arguments, codewords_of, valid_batch
from . import _distributed
from ._recompute import Memory
from ._search import count_and_sum
from ._shared import (
    HALF,
    INNER,
    ConstantBuffers,
    Float32Module,
    Layer,
    absent,
    by_codebook,
    explained,
    fixed,
    no_autocast,
    no_torchscript,
    not_replaceable,
    unit_length,
)

UpdateWeight = torch.Tensor | Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_BROKEN = (
    "VectorQuantize: the batch for k-means initialization holds NaN or infinity; remove or replace those"
    " rows, or mask them"
)
_WAITS = "k-means on the first batch has not made the codebook yet; call the layer once first"
_OF_BATCH = ("batch_mean", "batch_variance")
# In the state they are bools, as the peer's; here floats: wrappers average buffers, but not bools.
_FLAGS = ("initted", "codebook_mean_needs_init", "codebook_variance_needs_init")
_OF_CODES = ("codebook_mean", "codebook_variance")
_DECODING = ("decode", "get_codes_from_indices", "get_output_from_indices", "indices_to_codes")


class Affine(NamedTuple):
    """A map that subtracts ``inner``, divides by ``ratio``, and adds ``outer``."""

    inner: torch.Tensor
    ratio: torch.Tensor
    outer: torch.Tensor


class Codebook(ConstantBuffers, Float32Module):
    """The codewords ``[h, K, d]`` of a layer, with h = 1 if all heads share the codewords.

    The class has the attributes and the state of the peer's class. The arguments mean the same as in
    :class:`VectorQuantize`. A plain attribute may be set between two calls. Setting a fixed property raises
    AttributeError.
    """

    initted: torch.Tensor
    cluster_size: torch.Tensor
    embed_avg: torch.Tensor
    embed: torch.Tensor
    counts: torch.Tensor
    steps: torch.Tensor
    batch_mean: torch.Tensor
    batch_variance: torch.Tensor
    codebook_mean_needs_init: torch.Tensor
    codebook_mean: torch.Tensor
    codebook_variance: torch.Tensor

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        num_codebooks: int,
        *,
        decay: float,
        eps: float,
        kmeans_init: bool,
        kmeans_iters: int,
        sync_kmeans: bool,
        use_cosine_sim: bool,
        cosine_search: bool,
        threshold_ema_dead_code: float,
        sample_codebook_temp: float,
        learnable_codebook: bool,
        ema_update: bool,
        manual_ema_update: bool,
        use_ddp: bool,
        affine_param: bool,
        affine_param_batch_decay: float,
        affine_param_codebook_decay: float,
        sync_affine_param: bool,
        vq_bridge: nn.Module | None,
    ) -> None:
        super().__init__()
        self.decay, self.eps = decay, eps
        self.kmeans_init, self.kmeans_iters, self.sync_kmeans = kmeans_init, kmeans_iters, sync_kmeans
        self.threshold_ema_dead_code = threshold_ema_dead_code
        self.reset_cluster_size = threshold_ema_dead_code or None  # None: the threshold
        self.sample_codebook_temp = sample_codebook_temp
        self.ema_update, self.manual_ema_update, self.use_ddp = ema_update, manual_ema_update, use_ddp
        self.affine_param_batch_decay = affine_param_batch_decay
        self.affine_param_codebook_decay = affine_param_codebook_decay
        self.sync_affine_param = sync_affine_param
        self._use_cosine_sim, self._cosine_search = use_cosine_sim, cosine_search
        # A default dtype of bfloat16 would stop the averages.
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self._affine_param, self.vq_bridge = affine_param, None if vq_bridge is None else vq_bridge.to(dtype)
        embed = torch.zeros(num_codebooks, codebook_size, dim, dtype=dtype)
        if not kmeans_init:
            nn.init.kaiming_uniform_(embed)
            embed = self.scaled(embed)
        self.register_buffer("initted", torch.tensor(float(not kmeans_init), dtype=dtype))
        self.register_buffer("cluster_size", torch.ones(num_codebooks, codebook_size, dtype=dtype))
        self.register_buffer("embed_avg", embed.clone())
        if learnable_codebook:
            self.embed = nn.Parameter(embed)
        else:
            self.register_buffer("embed", embed)
        self._register_statistics()
        self._register_constants()
        # Counts and sums of batches that wait for the next batch. They are no buffers, because
        # DistributedDataParallel would overwrite buffers with the values of one process.
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        # the tensor `initted` and its version, when the host last read True from it
        self._known: tuple[torch.Tensor, int] | None = None
        self._begun = False  # whether the host read True from `initted` since the last load
        self.memory = Memory()

    _sharded = False

    def _constants(self, device: torch.device | None = None) -> dict[str, torch.Tensor | None]:
        counts = torch.zeros(self.cluster_size.shape, dtype=torch.int64, device=device)
        return {"counts": counts, "steps": torch.zeros((), dtype=torch.int64, device=device)}

    def extra_repr(self) -> str:
        """Return the sizes."""
        return (
            f"codebooks={self.num_codebooks}, codebook_size={self.codebook_size}, dim={self.embed.shape[2]},"
            f" learnable={self.learnable_codebook}"
        )

    def forward(self, x: torch.Tensor, step: Callable[..., Any], *args: Any) -> Any:
        """Return ``step(x, *args)``, a step of the layer.

        So hooks of this module run before and after all code that uses its tensors.
        """
        leave_inference_mode([self])
        if self.embed_avg.dtype in HALF:
            self._restore_float32()
        return step(x, *args)

    # --- fixed by the constructor -------------------------------------------------------------------

    num_codebooks = fixed("num_codebooks", lambda layer: layer.embed.shape[0], "h.")
    codebook_size = fixed("codebook_size", lambda layer: layer.embed.shape[1], "K.")
    learnable_codebook = fixed(
        "learnable_codebook",
        lambda layer: "embed" not in layer._buffers,
        "True if the codewords are a parameter.",
    )
    use_cosine_sim = fixed(
        "use_cosine_sim",
        lambda layer: layer._use_cosine_sim,
        "True if codewords have length 1 and are compared by the angle.",
    )
    cosine_search = fixed(
        "cosine_search",
        lambda layer: layer._cosine_search,
        "True if codewords of any length are compared by the angle.",
    )
    affine_param = fixed(
        "affine_param",
        lambda layer: layer._affine_param,
        "True if the codewords follow the mean and variance of the batches.",
    )
    has_dead_code_replacement = fixed(
        "has_dead_code_replacement",
        lambda layer: layer.threshold_ema_dead_code > 0,
        "True if codewords are revived; follows ``threshold_ema_dead_code``.",
    )

    gumbel_sample, sample_fn, replace_sample_fn, all_reduce_fn, kmeans_all_reduce_fn = map(
        absent, ("gumbel_sample", "sample_fn", "replace_sample_fn", "all_reduce_fn", "kmeans_all_reduce_fn")
    )
    update_codebook, update_with_decay, track_cluster_size_and_embed_avg = map(
        absent, ("update_codebook", "update_with_decay", "track_cluster_size_and_embed_avg")
    )

    @property
    def metric(self) -> str:
        """Return the metric of the search."""
        return "cosine" if self._use_cosine_sim or self._cosine_search else "l2"

    # --- the codewords -------------------------------------------------------------------------------------

    @property
    def searched(self) -> torch.Tensor:
        """Return the codebook ``[h, K, d]`` as it is searched."""
        return self.transformed(self.embed)

    def transformed(self, codebook: torch.Tensor, affine: Affine | None = None) -> torch.Tensor:
        """Map a codebook by the bridge and the affine map (by default the current one)."""
        if self.vq_bridge is not None:
            with no_autocast(codebook.device):
                codebook = self.vq_bridge(codebook)
        if not self._affine_param:
            return codebook
        affine = self.affine if affine is None else affine
        assert affine is not None
        return (codebook - affine.inner) / affine.ratio + affine.outer

    @property
    def affine(self) -> Affine | None:
        """Return a copy of the current map to the mean and the variance of the batches."""
        if not self._affine_param:
            return None
        return Affine(self.codebook_mean.clone(), self._ratio(), self.batch_mean.clone())

    def scaled(self, codewords: torch.Tensor) -> torch.Tensor:
        """Scale codewords to length 1 where the metric is the angle."""
        return unit_length(codewords) if self.use_cosine_sim else codewords

    @not_replaceable
    def transform_input(self, x: torch.Tensor) -> torch.Tensor:
        """Scale rows ``[..., d]`` to length 1 where the metric is the angle."""
        return self.scaled(x)

    @torch.no_grad()
    def assign(self, codebook: torch.Tensor) -> None:
        """Set the codewords ``[h, K, d]`` and their averages.

        The next step moves the codewords from these values, and k-means does not replace them.
        """
        self._require_whole()
        self.embed.copy_(codebook)
        self.embed_avg.copy_(codebook * self.cluster_size.unsqueeze(-1))
        self.initted.fill_(True)

    def _require_whole(self) -> None:
        """Raise RuntimeError if the codewords are not a tensor of this module.

        The values that a pass writes into them would be lost.
        """
        parameter = self._parameters.get("embed")
        # with use_orig_params=True, FSDP puts the view among the parameters
        view = parameter is not None and not torch.compiler.is_compiling() and parameter._is_view()
        if (parameter is not None or "embed" in self._buffers) and not (view or self._sharded):
            return
        lost = "what the layer writes into the codewords (k-means, averages, revival, codebook = ...) is lost"
        if is_parametrized(self, "embed") or hasattr(self, "embed_orig") or hasattr(self, "embed_g"):
            raise RuntimeError(
                "VectorQuantize: a parametrization (as weight_norm, or pruning) computes the codewords, and"
                f" {lost}; remove it, or use codewords that only gradients move"
                " (learnable_codebook=True)"
            )
        # FSDP puts a view of its flat parameter among the attributes, and fully_shard sets a DTensor
        raise RuntimeError(
            f"VectorQuantize: FSDP shards the codewords, and {lost}; give FSDP"
            " ignored_states=list(layer._codebook.parameters()), or fully_shard"
            " ignored_params=set(layer._codebook.parameters())"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Remember that ``fully_shard`` shards the codewords. In a forward pass they are whole again, but as a
        copy.
        """
        super().__setattr__(name, value)
        if name == "embed" and hasattr(value, "full_tensor"):
            self._sharded = True

    def _restore_float32(self) -> None:
        """Convert buffers of half precision back to float32.

        In half precision, a step of an average can be too small to change it.
        """
        cast = [(name, buffer) for name, buffer in self.named_buffers(recurse=False) if buffer.dtype in HALF]
        for _, buffer in cast:
            buffer.data = buffer.data.float()
        warnings.warn(
            f"VectorQuantize: {', '.join(name for name, _ in cast)} were rounded to half precision, as by"
            " buffer_dtype of FSDP, and are float32 again; prevent this by"
            " ignored_modules=[layer._codebook] or buffer_dtype=torch.float32",
            stacklevel=2,
        )

    def as_model(self, codewords: torch.Tensor) -> torch.Tensor:
        """Round float32 codewords in a model of half precision, whose other layers expect its dtype."""
        return codewords.to(self._model_dtype) if self._model_dtype in HALF else codewords

    # --- moving averages -----------------------------------------------------------------------------------

    def tracks(self, ema: bool | None = None) -> bool:
        """Return True if updates need the counts and sums of a batch."""
        return (self.ema_update if ema is None else ema) or self.threshold_ema_dead_code > 0

    @torch.no_grad()
    def update(
        self,
        counts: torch.Tensor,
        sums: torch.Tensor,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        weight: UpdateWeight | None = None,
        accumulate: bool = False,
        ema: bool | None = None,
    ) -> None:
        """Move the averages towards this batch, and the codewords with them.

        Put dead codewords onto rows of x.

        Args:
            counts: ``[h, K]``, of the rows where the mask is True.
            sums: ``[h, K, d]``, of the same rows. If the sum of a codeword has NaN, its count and its sum are
                zero instead.
            x: ``[..., heads * d]``, the rows that were quantized.
            mask: ``[...]`` bool, or None.
            weight: weight of this batch in the averages of each codeword, ``[K]`` or ``[h, K]``, or a
                function that returns this weight from sums and counts.
            accumulate: keep the counts and sums for the next call without ``accumulate``.
            ema: overrides ``ema_update``.
        """
        state = self.cluster_size, self.embed_avg, self.embed
        counts, sums = counts.view_as(state[0]), sums.view_as(state[1])
        shared = _distributed.rank_and_size(self.use_ddp)[1] > 1
        if accumulate or self.pending is not None or self._affine_param or shared or callable(weight):
            counts, sums = valid_batch(counts, sums)
        if self._affine_param:  # map the sums of the rows into the space of the codewords
            size = counts.unsqueeze(-1).to(sums)
            sums = torch.addcmul(sums, size, self.batch_mean.to(sums), value=-1)
            sums.mul_(self._ratio()).addcmul_(size, self.codebook_mean.to(sums))
        if self.pending is not None:
            # in place: tensors that replace each other in turn leave gaps in the heap, which then grows
            counts, sums = self.pending[0].add_(counts), self.pending[1].add_(sums)
            self.pending = None
        if accumulate:
            self.pending = counts, sums
            return
        offered = self._offer(x, mask) if self.threshold_ema_dead_code > 0 else []
        if shared:
            counts, sums, *offered = self._of_all_processes(counts, sums, offered)
        changed = self._changed(ema)
        _copy(state[:changed], self._moved(state, counts, sums, weight)[:changed])
        if self.threshold_ema_dead_code > 0:
            self._revive(self._dead(), *offered)
            self.steps.add_(1)

    def _moved(
        self,
        state: Sequence[torch.Tensor],
        counts: torch.Tensor,
        sums: torch.Tensor,
        weight: UpdateWeight | None,
    ) -> Sequence[torch.Tensor]:
        """Return ``state`` (sizes, averages, codewords) after a batch, by the options of this codebook."""
        dtype = state[1].dtype
        if weight is not None:
            if not isinstance(weight, torch.Tensor):
                weight = weight(sums.to(dtype), counts.to(dtype))
            try:
                weight = weight.to(state[1]).expand(counts.shape)
            except (AttributeError, RuntimeError):
                got = list(weight.shape) if isinstance(weight, torch.Tensor) else type(weight).__name__
                raise ValueError(
                    f"VectorQuantize: ema_update_weight must be or return a tensor {list(counts.shape)}, got"
                    f" {got}"
                ) from None
        sizes, averages, codewords = state
        step, eps, unit = 1 - self.decay, self.eps, self._use_cosine_sim
        given = Arguments(sizes, averages, codewords, counts, sums, weight, step, eps, unit)
        moved: Sequence[torch.Tensor] = call("ema_update", averages, given, differentiable=False)
        return moved

    def _changed(self, ema: bool | None) -> int:
        """Return 3 if an update changes sizes, averages and codewords, or 2 if the codewords stay."""
        if self.manual_ema_update or not (self.ema_update if ema is None else ema):
            return 2
        self._require_whole()
        return 3

    def _of_all_processes(
        self, counts: torch.Tensor, sums: torch.Tensor, offered: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Add up counts, sums and offered rows, in one message of the dtype of the codewords."""
        dtype = self.embed_avg.dtype
        tensors = [counts.to(dtype).unsqueeze(-1), sums.to(dtype), *offered]
        counts, sums, *offered = _distributed.all_reduce(tensors, self.use_ddp)
        return [counts.squeeze(-1).long(), sums.double(), *offered]

    def _options_of_move(self) -> tuple[Any, ...] | None:
        """Return the options that codebooks must share to move in one op, or None if one op is not enough."""
        if (
            self.threshold_ema_dead_code > 0
            or self.pending is not None
            or self._affine_param
            or _distributed.rank_and_size(self.use_ddp)[1] > 1
        ):
            return None
        options = self.decay, self.eps, self._use_cosine_sim, self.ema_update, self.manual_ema_update
        return (*options, self.embed.shape, self.embed_avg.dtype)

    def skip_update(self, x: torch.Tensor, mask: torch.Tensor | None, accumulate: bool) -> None:
        """Draw the random numbers of ``update`` when a checkpointed region runs again.

        So later draws are the same as in the first run.
        """
        if self.threshold_ema_dead_code > 0 and not accumulate:
            self._offer(x, mask)

    @not_replaceable
    def update_ema(self) -> None:
        """Set codewords to sums / sizes, with Laplace smoothing.

        With ``manual_ema_update``, the user calls this method.
        """
        self.set_to_averages()

    @torch.no_grad()
    def set_to_averages(self) -> None:
        """Set codewords to sums / sizes, with Laplace smoothing."""
        self._require_whole()
        found = codewords_of(self.cluster_size, self.embed_avg, self.embed, self.eps, self.use_cosine_sim)
        self.embed.copy_(found)

    @torch.no_grad()
    def update_indices(
        self,
        x: torch.Tensor,
        embed_ind: torch.Tensor,
        mask: torch.Tensor | None = None,
        ema_update_weight: UpdateWeight | None = None,
        accum_ema_update: bool = False,
        ema_update: bool | None = None,
    ) -> None:
        """Update as if ``embed_ind`` ``[..., heads]`` had been chosen for x ``[..., heads * d]``.

        Separate codebooks also take x ``[h, B, N, d]`` and ``embed_ind`` ``[h, B, N]``. An index of -1 counts
        for codeword 0.

        Raises:
            ValueError: the shapes are others.
        """
        if not self.tracks(ema_update):
            return
        codebooks, _, d = self.embed.shape
        given = [list(x.shape), list(embed_ind.shape)]
        if codebooks > 1 and x.dim() == 4 and x.shape[-1] == d:
            x, embed_ind = _heads_last(x), embed_ind.movedim(0, -1)
        heads = x.shape[-1] // d
        if codebooks not in (1, heads) or embed_ind.numel() * d != x.numel():
            raise ValueError(
                f"VectorQuantize: update_indices: expected x [..., heads * {d}] with indices [..., heads], or"
                f" x [h, B, N, {d}] with indices [h, B, N] for h separate codebooks, h = {codebooks}; got"
                f" {given[0]} and {given[1]}"
            )
        chosen = embed_ind.reshape(*x.shape[:-1], heads).clamp(min=0)
        codebook = without_single_head(self.searched)
        kept = (x, chosen) if mask is None else (x[mask], chosen[mask])
        counts, sums = count_and_sum(kept[0], codebook, kept[1])
        self.update(
            counts, sums, x, mask, weight=ema_update_weight, accumulate=accum_ema_update, ema=ema_update
        )

    update_ema_indices = update_indices

    # --- revival of dead codewords -------------------------------------------------------------------------

    @torch.no_grad()
    def expire(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Replace dead codewords by rows of x ``[..., heads * d]``, in training."""
        if self.training and self.threshold_ema_dead_code > 0:
            self._replace(x, self._dead(), mask)

    @not_replaceable
    def expire_codes_(self, batch_samples: torch.Tensor, seq_mask: torch.Tensor | None = None) -> None:
        """Replace dead codewords by rows of ``[h, ..., d]``, in training."""
        self.expire(_heads_last(batch_samples), seq_mask)

    @not_replaceable
    def replace(
        self, batch_samples: torch.Tensor, batch_mask: torch.Tensor, seq_mask: torch.Tensor | None = None
    ) -> None:
        """Replace the codewords where ``batch_mask`` ``[h, K]`` is True by rows of ``[h, ..., d]``."""
        self._replace(self.scaled(_heads_last(batch_samples)), batch_mask, seq_mask)

    @torch.no_grad()
    def _replace(self, x: torch.Tensor, dead: torch.Tensor, mask: torch.Tensor | None) -> None:
        self._revive(dead, *_distributed.all_reduce(self._offer(x, mask), self.use_ddp))
        self.steps.add_(1)

    def _dead(self) -> torch.Tensor:
        return self.cluster_size < self.threshold_ema_dead_code

    def _offer(self, x: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
        """Offer rows of this process for dead codewords.

        Return three tensors: taken ``[h, K, 1]``, priority ``[h, K, 1]``, and rows of x ``[h, K, d]``.

        There are K places, which the processes get in turn. A process fills its places with distinct rows,
        spread evenly over its batch, until it has no more rows. All other places are zero, so the sum over
        the processes has the rows of all processes.
        """
        codebooks, k, d = self.embed.shape
        dtype = self.embed.dtype
        rank, world = _distributed.rank_and_size(self.use_ddp)
        priority = torch.zeros(codebooks, k, 1, dtype=dtype, device=x.device)
        if rank == 0:
            priority = torch.rand_like(priority)
        if x.numel() == 0:
            return [torch.zeros_like(priority), priority, x.new_zeros(codebooks, k, d, dtype=dtype)]
        heads = x.shape[-1] // d
        shared = heads // codebooks  # rows per position of x: all its heads where they share the codewords
        places = -(-k // world)
        rows = torch.full((), math.prod(x.shape[:-1]), device=x.device) if mask is None else mask.sum()
        position, taken = _spread(rows * shared, codebooks, places)
        head = position % shared
        if codebooks > 1:
            head = torch.arange(codebooks, device=x.device).unsqueeze(-1).expand_as(position)
        position = position // shared
        if mask is not None:  # the j-th row where the mask is True
            position = torch.searchsorted(mask.flatten().cumsum(0), position + 1).clamp(max=mask.numel() - 1)
        found = x[_coordinates(position, x.shape[:-1])].unflatten(-1, (heads, d))
        found = torch.take_along_dim(found, head[..., None, None], dim=-2).squeeze(-2).to(dtype)
        taken = taken & found.isfinite().all(-1)  # a row that is not finite must not make a codeword NaN
        found = found.masked_fill(~taken.unsqueeze(-1), 0)
        place = torch.arange(k, device=x.device)
        # in turn: no codeword depends on one process
        mine = ((place + self.steps) % world == rank).unsqueeze(-1)
        turn = place // world
        return [taken[:, turn].unsqueeze(-1) * mine, priority, found[:, turn] * mine]

    def _revive(
        self, dead: torch.Tensor, taken: torch.Tensor, priority: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Replace the dead codewords ``[h, K]``, in random order, by the offered rows.

        If there are too few rows, the other dead codewords wait for a later batch.
        """
        self._require_whole()
        size = self.reset_cluster_size
        size = self.threshold_ema_dead_code if size is None else size
        held = taken.squeeze(-1) > 0
        queue = priority.squeeze(-1).masked_fill(~dead, 2.0).argsort(dim=-1, stable=True).argsort(-1)
        place = (~held).to(torch.uint8).argsort(dim=-1, stable=True).gather(-1, queue)
        revived = dead & (queue < held.sum(-1, keepdim=True))
        new = rows.gather(1, place.unsqueeze(-1).expand_as(rows))
        self.cluster_size.masked_fill_(revived, size)
        revived = revived.unsqueeze(-1)
        _copy([self.embed], [torch.where(revived, new, self.embed)])
        self.embed_avg.copy_(torch.where(revived, new * size, self.embed_avg))

    # --- the affine map to the mean and the variance of the batches (Huh et al. 2023) ----------------------

    def _register_statistics(self) -> None:
        """Add the buffers of ``affine_param``, with the peer's names.

        If all of them are zero, the map is the identity.
        """
        for name in _OF_BATCH:
            self.register_buffer(name, torch.zeros_like(self.embed_avg[:, :1]) if self.affine_param else None)
        for name in _OF_CODES if self.affine_param else ():
            self.register_buffer(f"{name}_needs_init", torch.ones_like(self.initted))
            self.register_buffer(name, torch.zeros_like(self.embed_avg[:, :1]))

    def _without_statistics(self) -> torch.Tensor:
        """Return True, in a tensor, before the first batch.

        Wrappers that average a model may copy the statistics and not the flags.
        """
        return (self.codebook_mean_needs_init != 0) & ~self.codebook_variance.any()

    @torch.no_grad()
    def update_affine(self, x: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Move the statistics towards the codewords and the rows of a batch.

        Only finite rows ``[..., heads * d]`` where the mask is True count. Without such a row, the statistics
        of the rows stay; in the first batch, all statistics stay.
        """
        check_reverse_mode("VectorQuantize", x)
        embed = self.embed.detach()
        codebooks, _, d = embed.shape
        rows = by_codebook(x.to(embed.dtype), codebooks, d)
        kept = rows.new_ones(codebooks, rows.shape[1], 1)
        if mask is not None:
            kept = by_codebook(mask.unsqueeze(-1).expand(x.shape), codebooks, d)[..., :1].to(rows.dtype)
        finite = rows.isfinite().all(-1, keepdim=True)
        kept, rows = kept * finite, rows.masked_fill(~finite, 0)
        tensors = [kept.sum(1, keepdim=True), (rows * kept).sum(1, keepdim=True)]
        count, total = _distributed.all_reduce(tensors, self.sync_affine_param)
        mean = total / count.clamp(min=1)
        squares = ((rows - mean).square() * kept).sum(1, keepdim=True)
        variance = _distributed.all_reduce([squares], self.sync_affine_param)[0] / count.clamp(min=1)
        without = self._without_statistics()
        first = without & (count > 0).all()
        rest = without & ~first
        of_codewords = embed.mean(1, keepdim=True), embed.var(1, unbiased=False, keepdim=True)
        for names, decay, values, found in (
            (_OF_CODES, self.affine_param_codebook_decay, of_codewords, ~rest),
            (_OF_BATCH, self.affine_param_batch_decay, (mean, variance), (count > 0) & ~rest),
        ):
            for name, new in zip(names, values, strict=True):
                old = getattr(self, name)
                moved = torch.where(first, new, old * decay + new * (1 - decay))
                old.copy_(torch.where(found, moved, old))
        for name in _OF_CODES:
            getattr(self, f"{name}_needs_init").copy_(rest)

    def _ratio(self) -> torch.Tensor:
        """Return the standard deviation of the codewords divided by the one of the batches."""
        ratio: torch.Tensor = (
            self.codebook_variance.clamp(min=1e-5).sqrt() / self.batch_variance.clamp(min=1e-5).sqrt()
        )
        return ratio

    # --- k-means of the first batch ------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Return True while the codebook waits for k-means of its first batch.

        The buffer ``initted`` is then False. In a graph and on fake tensors, the host cannot read this
        buffer. Then the property is True, unless the host has read True from this buffer before.
        :meth:`initialize` changes nothing in a codebook that is initialized.
        """
        if not self.kmeans_init:
            return False
        known, initted = self._known, self.initted
        if torch.compiler.is_dynamo_compiling():
            return known is None or known[0] is not initted
        if torch.compiler.is_compiling() or initted.is_meta or isinstance(initted, FakeTensor):
            return known is None  # export puts other tensors into the buffers while it traces
        same = known is not None and known[0] is initted and known[1] == _version(initted)
        if same and initted.device.type != "cpu":
            return False
        if not bool(initted):
            if self._begun or not bool(self.embed.any()):
                return True
            initted.fill_(True)  # wrappers that average a model may copy the codewords and not the flag
        self._see(initted)
        return False

    def _see(self, initted: torch.Tensor) -> None:
        """Remember that the flag is True."""
        self._known, self._begun = (initted, _version(initted)), True

    @torch.no_grad()
    def initialize(self, x: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Run k-means on the rows ``[..., heads * d]`` of the first batch.

        The codebook must be ``waiting``. If no process has a row, it waits for the next batch.

        Raises:
            RuntimeError: in ``torch.onnx.export`` and ``torch.jit.trace``, which keep no change of a buffer.
        """
        if torch.jit.is_tracing() or exporting_to_onnx():  # type: ignore[attr-defined]
            raise RuntimeError(f"VectorQuantize: {_WAITS}")
        found = self._kmeans(x, mask)
        if found is None:
            return
        means, counts = found
        begun = self.initted != 0 if self._begun else (self.initted != 0) | self.embed.any()
        state = (self.embed, self.cluster_size, self.embed_avg)
        before = [buffer.clone() for buffer in state]
        self.embed_avg.copy_(means * counts)
        self.cluster_size.copy_(counts.squeeze(-1))
        self.set_to_averages()
        for buffer, kept in zip(state, before, strict=True):
            buffer.copy_(torch.where(begun, kept, buffer))
        self.initted.fill_(True)
        self._see(self.initted)

    @not_replaceable
    def init_embed_(self, data: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Run k-means on rows ``[h, ..., d]``, unless the codebook is initialized."""
        if not bool(self.initted):
            self.initialize(self.scaled(_heads_last(data)), mask)

    def _kmeans(self, x: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return means ``[h, K, d]`` and sizes ``[h, K, 1]`` of the rows ``[..., heads * d]``.

        Return None if there is no row.

        The steps follow the peer and differ from ``kmeans``: an empty cluster keeps its codeword, the cosine
        metric scales the means and not the rows, no step is skipped, and the processes add up their sums in
        every step. One op does a step for all heads. On the CPU, NaN or infinity in the batch of any process
        is an error.
        """
        codebooks, k, d = self.embed.shape
        shared = self.use_ddp and self.sync_kmeans
        x = x[mask].float() if mask is not None else x.float()
        if x.device.type == "cpu":  # on other devices the host would wait for the result
            broken = x.isfinite().logical_not().any().float().view(1, 1, 1)
            broken = _distributed.all_reduce([broken], shared)[0]
            torch._assert_async((broken == 0) | (self.initted != 0), _BROKEN)  # an if could not be compiled
        means = _distributed.sample_rows(by_codebook(x, codebooks, d), k, shared)
        if means is None:
            return None
        means = self.scaled(means)
        counts = means.new_zeros(codebooks, k, 1)
        for _ in range(self.kmeans_iters):
            out, sums = vq_with_sums(x, means[0] if codebooks == 1 else means, metric=self.metric)
            tensors = [out.counts.view(codebooks, k, 1).float(), sums.view(codebooks, k, d).float()]
            counts, sums = _distributed.all_reduce(tensors, shared)
            means = torch.where(counts > 0, self.scaled(sums / counts.clamp(min=1)), means)
        return means, counts

    # --- state ---------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Codebook:
        known = self._known is not None and self._known[0] is self.initted
        super()._apply(fn, recurse)
        self._known = (self.initted, _version(self.initted)) if known else None
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in (prefix + name for name in _FLAGS):
            if key in destination:
                destination[key] = destination[key].bool()
        if self.affine_param and _is_set(self.codebook_mean_needs_init):
            without = _is_set(self._without_statistics())
            for name in _OF_BATCH if without else ():  # the peer adds these buffers in its first batch
                del destination[prefix + name]
            for name in _OF_CODES if not without else ():
                destination[f"{prefix}{name}_needs_init"] = torch.zeros_like(
                    self.codebook_mean_needs_init, dtype=torch.bool
                )

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *args: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *args)
        flag = state_dict.get(prefix + "codebook_mean_needs_init")
        fits = isinstance(flag, torch.Tensor) and flag.numel() == 1  # torch reports others
        if self.affine_param and fits and _is_set(flag):
            # the peer saves these buffers before it initializes them
            for name in (*_OF_BATCH, *_OF_CODES):
                getattr(self, name).zero_()
                if getattr(self, name).is_meta:  # with assign=True the other buffers have a device now
                    setattr(self, name, torch.zeros_like(getattr(self, name), device=self.embed_avg.device))
                missing[:] = (key for key in missing if key != prefix + name)
        for name, buffer in [*self.named_buffers(recurse=False)]:
            if buffer.dtype == torch.bool:  # a flag of the state, which assign=True has put here
                setattr(self, name, buffer.to(self.embed_avg.dtype))
        self._known = None
        if self.initted.is_meta or isinstance(self.initted, FakeTensor):
            return
        if bool(self.initted):
            self._see(self.initted)
        else:
            self.kmeans_init, self._begun = True, False  # nonzero codewords then count as set


class Coder(Layer):
    """A layer that encodes vectors by indices and decodes them."""

    __prepare_scriptable__ = no_torchscript

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        INNER.add(cls.__name__)
        for name in ("forward", *_DECODING):
            if name in vars(cls):
                setattr(cls, name, explained(vars(cls)[name]))

    def encode(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the indices of x as ``forward`` does in evaluation mode.

        The layer does not change, even in training mode.

        Args:
            x: as for ``forward``.
            **options: options of ``forward``, such as ``mask``.

        Raises:
            RuntimeError: the codebook waits for k-means of its first batch.
        """
        with undisturbed(self):
            indices: torch.Tensor = self(x, **options)[1]
        return indices

    def decode(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the quantized vectors of ``forward`` for these indices, integers of any width."""
        output: torch.Tensor = self.get_output_from_indices(indices)  # type: ignore[operator]
        return output


@contextmanager
def undisturbed(layer: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients, and restore modes and counts at the end."""
    modes = [(module, module.training) for module in layer.modules()]
    counted = [(module, module.counts.clone()) for module in layer.modules() if isinstance(module, Codebook)]
    if any(isinstance(module, Codebook) and module.waiting for module, _ in modes):
        raise RuntimeError(f"{type(layer).__name__}: {_WAITS}")
    try:
        layer.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for codebook, before in counted:
            codebook.counts.copy_(before)


def _version(tensor: torch.Tensor) -> int:
    """Return how often the tensor was written, or -1 if this is not known.

    It is not known for inference tensors and in a compiled graph.
    """
    return -1 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


def _is_set(flag: torch.Tensor) -> bool:
    """Return True for a flag that is True, and False for one without a value."""
    return not (flag.is_meta or isinstance(flag, FakeTensor)) and bool(flag)


def _heads_last(rows: torch.Tensor) -> torch.Tensor:
    """Reshape rows ``[h, ..., d]`` of each codebook to ``[..., h * d]``."""
    return rows.movedim(0, -2).flatten(-2) if rows.dim() > 2 else rows


@torch.no_grad()
def update_all(
    codebooks: Sequence[Codebook],
    counts: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
) -> None:
    """Update each codebook by its counts, sums and rows, in one op where their options allow it."""
    alike = {codebook._options_of_move() for codebook in codebooks}
    if len(alike) > 1 or None in alike or len({id(codebook) for codebook in codebooks}) < len(codebooks):
        for codebook, counted, summed, given in zip(codebooks, counts, sums, rows, strict=True):
            codebook.update(counted, summed, given, None)
        return
    changed = min(codebook._changed(None) for codebook in codebooks)
    state = list(zip(*((each.cluster_size, each.embed_avg, each.embed) for each in codebooks), strict=True))
    stacked = [torch.cat(buffers) for buffers in state]
    moved = codebooks[0]._moved(stacked, torch.cat([*counts]), torch.cat([*sums]), None)
    values = [new.split(len(codebooks[0].embed)) for new in moved]
    _copy([*chain(*state[:changed])], [*chain(*values[:changed])])


def refuse_vmap(codebook: Codebook) -> None:
    """Raise RuntimeError if rows of ``vmap`` would change a codebook, differently for each element."""
    if not torch._C._functorch.is_batchedtensor(codebook.embed_avg):
        raise RuntimeError(
            "VectorQuantize: under torch.func.vmap a layer cannot update its codewords; call eval() or set"
            " freeze_codebook=True, and with kmeans_init call the layer once before"
        )


def leave_inference_mode(codebooks: Sequence[Codebook]) -> None:
    """Replace buffers of codebooks that were moved or copied in inference mode, so that they can change."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return
    for codebook in codebooks:
        for name, buffer in [*codebook._buffers.items()]:
            if buffer is not None and buffer.is_inference():
                setattr(codebook, name, buffer.clone())
        if codebook.pending is not None and codebook.pending[0].is_inference():
            codebook.pending = codebook.pending[0].clone(), codebook.pending[1].clone()


def set_counts(codebooks: Sequence[Codebook], counts: Sequence[torch.Tensor]) -> None:
    """Set the counts of the last pass.

    Under ``vmap`` the counts do not change, because a buffer has the counts of a single call. Exported
    programs have none.
    """
    if torch.compiler.is_exporting() or any(map(torch._C._functorch.is_batchedtensor, counts)):
        return
    _copy([codebook.counts for codebook in codebooks], counts)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target.

    ``torch._foreach_copy_`` takes one call for all. ONNX cannot export it, and ``vmap`` has no rule for it.
    """
    if torch.compiler.is_compiling() or any(map(torch._C._functorch.is_batchedtensor, sources)):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    else:
        if torch._C._is_tracing():  # a trace does not contain no_grad
            targets = [target.detach() for target in targets]
        torch._foreach_copy_(list(targets), list(sources))


def without_single_head(codebook: torch.Tensor) -> torch.Tensor:
    """Return a codebook ``[h, K, d]`` as the ops take it: ``[K, d]`` if h is 1."""
    return codebook[0] if len(codebook) == 1 else codebook


def _spread(rows: torch.Tensor, codebooks: int, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw up to ``places`` distinct numbers below ``rows``, and flag the valid ones.

    ``rows`` is a scalar tensor. The numbers are ``[codebooks, places]``.

    One number is drawn from each of min(rows, places) equal ranges. Unlike a permutation, this takes no
    longer with more rows.
    """
    ranges = rows.clamp(max=places)
    taken = (torch.arange(places, device=rows.device) < ranges).expand(codebooks, places)
    order = _uniform(codebooks, places, rows.device).masked_fill(~taken, 2.0).argsort(-1)
    ranges = ranges.clamp(min=1)
    low, high = order * rows // ranges, (order + 1) * rows // ranges
    drawn = low + (_uniform(codebooks, places, rows.device) * (high - low)).long()
    return torch.minimum(drawn, high - 1).clamp(min=0).minimum((rows - 1).clamp(min=0)), taken


def _uniform(codebooks: int, places: int, device: torch.device) -> torch.Tensor:
    return torch.rand(codebooks, places, device=device, dtype=torch.float32)


def _coordinates(position: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, ...]:
    """Convert flat positions to one index per dimension.

    ``torch.unravel_index`` would wait for the device.
    """
    found = []
    for size in reversed(shape):
        found.append(position % size)
        position = position // size
    return tuple(reversed(found))
