"""``HierarchicalVQ``: quantize a map at a coarse scale, then its residual at finer scales."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from .._numbers import as_integer
from . import _distributed
from ._codebook import Coder
from ._shared import Layout, absent, count_of_each, counts, fixed, indices_of_each, numbers, refuse_together
from .vector_quantize import VectorQuantize

_NAME = "HierarchicalVQ"
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POOLS = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
_MODES = ("linear", "bilinear", "trilinear")


class ResidualConvolution(nn.Module):
    """Mix a map with its convolution: ``(1 - ratio) * x + ratio * conv(x)``."""

    def __init__(self, dim: int, spatial: int, ratio: float) -> None:
        super().__init__()
        self.conv = _CONVOLUTIONS[spatial - 1](dim, dim, 3, padding=1)
        self.resi_ratio = abs(float(ratio))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a map of the shape of x ``[B, dim, ...]``."""
        return x if self.resi_ratio <= 1e-8 else x.lerp(self.conv(x).to(x.dtype), self.resi_ratio)


class HierarchicalVQ(Coder):
    """Quantize a map at a coarse scale, then its residual at the next finer scale, and so on.

    The codewords of a scale are interpolated to the full size and pass a convolution; their sum over the
    scales is the output.

    Args:
        dim: length of the vectors, the channels.
        codebook_size: K, or one for each scale where ``shared_codebook`` is False.
        scales: the size of the map at each scale, coarse to fine: an int for a square, or one for each
            dimension.
        shared_codebook: one codebook for all scales.
        channel_first: ``[B, dim, ...]`` input; False for ``[B, ..., dim]``.
        sync_codebook, decay, commitment_weight, rotation_trick: as in :class:`VectorQuantize`.
        kmeans_init, kmeans_iters, threshold_ema_dead_code: as in :class:`VectorQuantize`.
        stochastic_sample_codes, sample_codebook_temp: as in :class:`VectorQuantize`.
        orthogonal_reg_weight, orthogonal_reg_max_codes: as in :class:`VectorQuantize`.
        orthogonal_reg_active_codes_only: as in :class:`VectorQuantize`.
        quant_resi: share of the convolution in the output of a scale.
        share_quant_resi: number of convolutions, spread over the scales; 1 for one, 0 for one per scale.
        nested_dropout: in training, the probability that the finest scales are left out of the output and of
            the loss.
        nested_dropout_min_levels: scales that are never left out.
        accept_image_fmap: maps have two dimensions, instead of one.
        accept_3d_fmap: maps have three dimensions.

    Attributes:
        level_shapes: the size of the map at each scale.

    Raises:
        ValueError: sizes or options that do not fit.

    Source: Tian et al. 2024, "Visual Autoregressive Modeling", algorithms 1 and 2.

    Equivalent to: ``vector_quantize_pytorch.HierarchicalVQ`` 1.32 with the same arguments, which also loads
        its state_dict.
    """

    vq: VectorQuantize | None
    vqs: nn.ModuleList | None
    phi_shared: ResidualConvolution | None
    phi_levels: nn.ModuleList | None

    def __init__(
        self,
        *,
        dim: int,
        codebook_size: int | Sequence[int],
        scales: Sequence[int | Sequence[int]],
        shared_codebook: bool = True,
        channel_first: bool = True,
        sync_codebook: bool | None = None,
        decay: float = 0.99,
        commitment_weight: float = 1.0,
        rotation_trick: bool = False,
        kmeans_init: bool = True,
        kmeans_iters: int = 10,
        threshold_ema_dead_code: float = 2,
        stochastic_sample_codes: bool = False,
        sample_codebook_temp: float = 0.1,
        orthogonal_reg_weight: float = 0.0,
        orthogonal_reg_max_codes: int | None = 128,
        orthogonal_reg_active_codes_only: bool = False,
        quant_resi: float = 0.5,
        share_quant_resi: int = 1,
        nested_dropout: float = 0.0,
        nested_dropout_min_levels: int = 1,
        accept_image_fmap: bool = False,
        accept_3d_fmap: bool = False,
    ) -> None:
        options = {name: value for name, value in locals().items() if name in _OF_EVERY_SCALE}
        super().__init__()
        refuse_together(
            _NAME,
            (accept_image_fmap and accept_3d_fmap, "accept_image_fmap and accept_3d_fmap exclude each other"),
        )
        numbers(_NAME, 1, nested_dropout=nested_dropout)
        counts(_NAME, dim=dim, nested_dropout_min_levels=nested_dropout_min_levels)
        self._spatial = 2 if accept_image_fmap else 3 if accept_3d_fmap else 1
        self._shapes = _shapes_of(scales, self._spatial)
        self._dim, self._channel_first, self._scales = dim, channel_first, tuple(scales)
        levels = len(self._shapes)
        same = as_integer(codebook_size)
        sizes = [same] * levels if same is not None else list(cast("Sequence[int]", codebook_size))
        refuse_together(
            _NAME,
            (len(sizes) != levels, f"codebook_size has {len(sizes)} sizes for {levels} scales"),
            (
                shared_codebook and len(set(sizes)) > 1,
                f"shared_codebook=True needs one codebook_size, got {codebook_size}",
            ),
        )
        self.nested_dropout, self.nested_dropout_min_levels = nested_dropout, nested_dropout_min_levels
        self.vq = VectorQuantize(codebook_size=sizes[0], **options) if shared_codebook else None
        self.vqs = None
        if not shared_codebook:
            self.vqs = nn.ModuleList(VectorQuantize(codebook_size=size, **options) for size in sizes)
        self._make_convolutions(quant_resi, share_quant_resi)

    def _make_convolutions(self, ratio: float, number: int) -> None:
        """Make one convolution for all scales, or a number of them that the scales share."""
        levels = len(self._shapes)
        made = min(levels, int(number)) if int(number) > 0 else levels
        convolutions = [ResidualConvolution(self._dim, self._spatial, ratio) for _ in range(made)]
        self.phi_shared = convolutions[0] if number == 1 else None
        self.phi_levels = None if number == 1 else nn.ModuleList(convolutions)

    # --- attributes of a built layer -----------------------------------------------------------------------

    dim = fixed("dim", lambda layer: layer._dim, "Length of the vectors.")
    scales = fixed("scales", lambda layer: layer._scales, "Sizes of the map, as they were given.")
    level_shapes = fixed("level_shapes", lambda layer: layer._shapes, "Sizes of the map at each scale.")
    num_levels = fixed("num_levels", lambda layer: len(layer._shapes), "Number of scales.")
    spatial_dims = fixed("spatial_dims", lambda layer: layer._spatial, "Dimensions of the map.")
    channel_first = fixed(
        "channel_first", lambda layer: layer._channel_first, "True if the channels come second."
    )
    codebook_sizes = fixed(
        "codebook_sizes",
        lambda layer: tuple(layer.get_vq(level).codebook_size for level in range(layer.num_levels)),
        "K of each scale.",
    )
    to_channel_first, to_channel_last, mask_to_channel, mask_from_channel = map(
        absent, ("to_channel_first", "to_channel_last", "mask_to_channel", "mask_from_channel")
    )
    flatten_spatial, flatten_indices, unflatten_spatial, indices_to_spatial = map(
        absent, ("flatten_spatial", "flatten_indices", "unflatten_spatial", "indices_to_spatial")
    )

    @property
    def bits_per_vector(self) -> float:
        """Return the bits of the indices of a map, divided by the positions of its finest scale."""
        bits = [
            math.prod(shape) * math.log2(size)
            for shape, size in zip(self._shapes, self.codebook_sizes, strict=True)
        ]
        return sum(bits) / math.prod(self._shapes[-1])

    # --- steps of a scale ----------------------------------------------------------------------------------

    def get_vq(self, level_index: int) -> VectorQuantize:
        """Return the quantizer of a scale."""
        if self.vq is not None:
            return self.vq
        return cast(VectorQuantize, cast(nn.ModuleList, self.vqs)[level_index])

    def choose_phi(self, level_index: int) -> nn.Module:
        """Return the convolution of a scale."""
        if self.phi_levels is None:
            return cast(nn.Module, self.phi_shared)
        place = level_index / max(self.num_levels - 1, 1) * (len(self.phi_levels) - 1)
        return cast(nn.Module, self.phi_levels[round(place)])

    def pool_residual(
        self, t: torch.Tensor, level_shape: tuple[int, ...], mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the mean of t ``[B, dim, ...]`` over the cells of a scale, and which cells the mask has."""
        pool: Any = _POOLS[self._spatial - 1]
        if mask is None:
            return pool(t, level_shape), None
        kept = mask.unsqueeze(1)
        share = pool(kept.to(t.dtype), level_shape)
        return pool(t.masked_fill(~kept, 0), level_shape) / share.clamp(min=1e-6), share.squeeze(1) > 0

    def upsample_to_full(
        self, q: torch.Tensor, full_shape: tuple[int, ...], level_index: int
    ) -> torch.Tensor:
        """Interpolate q ``[B, dim, ...]`` to the full size and apply the convolution of the scale."""
        if tuple(q.shape[2:]) != tuple(full_shape):
            q = F.interpolate(q, size=full_shape, mode=_MODES[self._spatial - 1], align_corners=False)
        found: torch.Tensor = self.choose_phi(level_index)(q)
        return found

    def sample_nested_cutoff(self, device: torch.device) -> int | None:
        """Draw the last scale that is kept, the same in all processes, or None to keep all scales."""
        least, levels = self.nested_dropout_min_levels, self.num_levels
        if not self.training or self.nested_dropout == 0 or least >= levels:
            return None
        seed = _distributed.drawn_on_all(0, 10_000, device)
        if seed is None:
            return None
        drawn = random.Random(seed)
        return drawn.randrange(least - 1, levels - 1) if drawn.random() < self.nested_dropout else None

    # --- forward and back ----------------------------------------------------------------------------------

    def forward(
        self,
        x: torch.Tensor,
        indices: None = None,
        mask: torch.Tensor | None = None,
        lens: torch.Tensor | None = None,
        sample_codebook_temp: float | None = None,
        return_cutoff: bool = False,
    ) -> tuple[Any, ...]:
        """Quantize x and, in training, update the codewords once for each scale.

        Args:
            x: ``[B, dim, ...]``, or ``[B, ..., dim]`` without ``channel_first``.
            indices: only None, as in the peer.
            mask: bool, the shape of x without its channels; False marks padding.
            lens: int ``[B]``, the lengths of sequences, instead of a mask.
            sample_codebook_temp: overrides the constructor's for this call.
            return_cutoff: also return the last scale that was kept, or None.

        Returns:
            ``(quantized, indices, loss)``: the shape of x, a tuple of int64 ``[B, *level_shapes[i]]``, and
            the mean of the losses of the scales that were kept.

        Raises:
            ValueError, TypeError, RuntimeError: as :class:`VectorQuantize`.
        """
        layout = Layout(_NAME, self.dim, channel_last=not self._channel_first)
        layout.check(x, mask)
        if indices is not None:
            raise ValueError(f"{_NAME}: forward takes no indices; use decode")
        if x.dim() != 2 + self._spatial:
            raise ValueError(f"{_NAME}: x must have {2 + self._spatial} dimensions, got {list(x.shape)}")
        if 0 in (x.shape[2:] if self._channel_first else x.shape[1:-1]):
            raise ValueError(f"{_NAME}: a map needs at least one position, got x {list(x.shape)}")
        mask = layout.mask_of(x, mask, lens)
        x = layout.inward(x).movedim(-1, 1)
        options = {} if sample_codebook_temp is None else {"sample_codebook_temp": sample_codebook_temp}
        residual, total, sums, chosen, losses = x, torch.zeros_like(x), [], [], []
        for level, shape in enumerate(self._shapes):
            pooled, kept = self.pool_residual(residual, shape, mask)
            quantized, found, loss = self.get_vq(level)(pooled.movedim(1, -1), mask=kept, **options)
            quantized = self.upsample_to_full(quantized.movedim(-1, 1), tuple(x.shape[2:]), level)
            total, residual = total + quantized, residual - quantized
            sums.append(total)
            chosen.append(found)
            losses.append(loss)
        cutoff = self.sample_nested_cutoff(x.device)
        last = self.num_levels - 1 if cutoff is None else cutoff
        output = sums[last]
        if mask is not None:
            output = output.masked_fill(~mask.unsqueeze(1), 0)
        output = output if self._channel_first else output.movedim(1, -1)
        result = output, tuple(chosen), torch.stack(losses[: last + 1]).mean()
        return (*result, cutoff) if return_cutoff else result

    def get_output_from_indices(
        self, indices: Sequence[torch.Tensor], full_shape: int | Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return what ``forward`` returns as quantized for these indices of all scales.

        Args:
            indices: integers of any width ``[B, *level_shapes[i]]``, one tensor for each scale.
            full_shape: the size of the map; by default the size of the finest scale.

        Raises:
            ValueError: the number of tensors is wrong.
            TypeError: the indices are not tensors of integers.
        """
        full = self._shapes[-1] if full_shape is None else _shapes_of([full_shape], self._spatial)[0]
        total = []
        for level, chosen in enumerate(indices_of_each(_NAME, indices, self.num_levels)):
            quantized = self.get_vq(level).get_output_from_indices(chosen).movedim(-1, 1)
            total.append(self.upsample_to_full(quantized, full, level))
        output = torch.stack(total).sum(0)
        return output if self._channel_first else output.movedim(1, -1)


_OF_EVERY_SCALE = (
    *("dim", "sync_codebook", "decay", "commitment_weight", "rotation_trick", "kmeans_init", "kmeans_iters"),
    *("threshold_ema_dead_code", "stochastic_sample_codes", "sample_codebook_temp", "orthogonal_reg_weight"),
    *("orthogonal_reg_max_codes", "orthogonal_reg_active_codes_only"),
)


def _shapes_of(scales: Sequence[int | Sequence[int]], spatial: int) -> tuple[tuple[int, ...], ...]:
    """Return the size of the map at each scale, or raise ValueError for sizes that do not fit."""
    if isinstance(scales, str) or not hasattr(scales, "__len__"):
        raise ValueError(f"{_NAME}: scales is {scales!r}, expected a sequence of sizes, one for each scale")
    found: list[tuple[int, ...]] = []
    for place, scale in enumerate(scales):
        name = f"scales[{place}]"
        if as_integer(scale) is None:
            found.append(tuple(count_of_each(_NAME, name, scale)))
        else:
            found.append(counts(_NAME, **{name: scale}) * spatial)
    finer = [all(a <= b for a, b in zip(*pair, strict=False)) for pair in itertools.pairwise(found)]
    refuse_together(
        _NAME,
        (not found, "scales is empty; give at least one scale"),
        (any(len(shape) != spatial for shape in found), f"scales={scales} must have {spatial} sizes each"),
        (not all(finer), f"scales={scales} must go from coarse to fine"),
    )
    return tuple(found)
