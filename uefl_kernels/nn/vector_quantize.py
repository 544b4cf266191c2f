"""``VectorQuantize``: a VQ layer with moving-average or learned codewords, a drop-in for vector-quantize-pytorch's."""

from __future__ import annotations

from numbers import Real
from operator import index
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import VQOutput, vq, vq_with_sums
from .._checks import check_tensor
from .._gather import flat_indices, gather
from .._hold import hold
from .._numbers import is_count
from . import _peer
from ._codebook import Codebook


class LossBreakdown(NamedTuple):
    """The terms of the loss, unweighted; those of options that this layer does not have are zero."""

    commitment: torch.Tensor
    codebook_diversity: torch.Tensor
    orthogonal_reg: torch.Tensor
    inplace_optimize: torch.Tensor


class VectorQuantize(nn.Module):
    """Replace every vector by its nearest codeword, and learn the codewords from what they replace.

    Same constructor names, forward result and state_dict as ``vector_quantize_pytorch.VectorQuantize`` 1.32, on exact fused
    ops: nothing of size N x K, no wait for the device in a step, one message per step under ``torch.distributed``.

    Args:
        dim: length of the vectors.
        codebook_size: K, the number of codewords.
        codebook_dim: d, the length of a codeword; where heads * d is not ``dim``, ``project_in`` and ``project_out`` are linear.
        heads: codewords per vector; each head quantises its d of the heads * d elements.
        separate_codebook_per_head: a codebook of its own for each head instead of one for all.
        decay: of the moving averages; a batch enters with 1 - decay.
        eps: Laplace smoothing of the averaged cluster sizes.
        freeze_codebook: never update the codewords; ``forward`` can override it.
        kmeans_init: make the codewords by ``kmeans_iters`` rounds of k-means on the first batch (which waits for the device
            if there is a mask, or another process), which must be finite: checked on the CPU; on a GPU codewords become NaN.
        kmeans_iters: see there; at least 1 (of the peer, 0 fails in the first batch).
        use_cosine_sim: quantise unit vectors by the angle; the codewords are unit vectors too.
        threshold_ema_dead_code: codewords whose averaged cluster size falls below it are put onto random rows of the batch; 0 = off.
        channel_last: False for ``[B, D, N]`` input.
        accept_image_fmap: ``[B, D, H, W]`` input, read in place.
        commitment_weight: of the mean squared distance between the input and its codeword; with ``learnable_codebook`` its
            gradient also moves the codewords.
        rotation_trick: send the gradient to the input turned and scaled as the codeword is, instead of unchanged; the default
            None means True for ``dim`` > 1. The output is the codeword to the bit either way.
        learnable_codebook: the codewords are a parameter, moved by the gradient of the loss.
        ema_update: move the codewords by averages; the default None means unless they are learned.
        **other: the remaining arguments of the peer, accepted at their defaults only.

    Attributes:
        codebook: ``[K, d]``, or ``[heads, K, d]`` with ``separate_codebook_per_head``; assign to it to set the codewords.
        counts: how often the last forward pass of this process chose each codeword, the shape of the codebook less d, int64.
        perplexity: exp of the entropy of ``counts``; a scalar, or ``[heads]``.
        usage: the share of codewords that ``counts`` holds at least once; likewise.

    Raises:
        ValueError: an argument of the peer that is not supported, sizes that do not fit, options that exclude each other.
        TypeError: an argument that nobody knows.

    Departures from the peer, all of them where its result is not what one would want: indices are exact; the output is the
    codeword without the rounding of the rotation, also where the input is zero; ``project_in`` gets its gradient also when
    the input needs none; a mask works with heads and projections; codewords stay float32 in a model cast to half precision.

    Source: van den Oord et al. 2017, "Neural Discrete Representation Learning", eqs. 1-3 and appendix A.1 (moving averages);
    Dhariwal et al. 2020, "Jukebox" (revival); Fifty et al. 2024 (rotation).

    Equivalent to: ``vector_quantize_pytorch.VectorQuantize`` with the same arguments.
    """

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        codebook_dim: int | None = None,
        heads: int = 1,
        separate_codebook_per_head: bool = False,
        decay: float = 0.8,
        eps: float = 1e-5,
        freeze_codebook: bool = False,
        kmeans_init: bool = False,
        kmeans_iters: int = 10,
        *,
        use_cosine_sim: bool = False,
        threshold_ema_dead_code: float = 0,
        channel_last: bool = True,
        accept_image_fmap: bool = False,
        commitment_weight: float = 1.0,
        rotation_trick: bool | None = None,
        learnable_codebook: bool | None = None,
        ema_update: bool | None = None,
        **other: Any,
    ) -> None:
        super().__init__()
        _peer.refuse("VectorQuantize", other, _peer.VECTOR_QUANTIZE)
        codebook_dim = dim if codebook_dim is None else codebook_dim
        learnable = bool(learnable_codebook)
        ema_update = not learnable if ema_update is None else ema_update
        counts = {"dim": dim, "codebook_size": codebook_size, "codebook_dim": codebook_dim, "heads": heads, "kmeans_iters": kmeans_iters}
        for name, value in counts.items():
            if not is_count(value):
                raise ValueError(f"VectorQuantize: {name} is {value!r}, expected an int of at least 1")
        dim, codebook_size, codebook_dim, heads, kmeans_iters = map(index, counts.values())
        numbers = {"decay": decay, "eps": eps, "commitment_weight": commitment_weight, "threshold_ema_dead_code": threshold_ema_dead_code}
        for name, number in numbers.items():
            most = 1 if name == "decay" else float("inf")
            if not isinstance(number, Real) or not 0 <= number <= most or number == float("inf"):
                raise ValueError(
                    f"VectorQuantize: {name} is {number!r}, expected a number {'from 0 to 1' if most == 1 else 'of at least 0'}"
                )
        if learnable and (ema_update or use_cosine_sim):
            reason = "ema_update=True" if ema_update else "use_cosine_sim=True"
            raise ValueError(f"VectorQuantize: learnable_codebook=True excludes {reason}; use one of them")
        if accept_image_fmap and not channel_last:
            raise ValueError("VectorQuantize: accept_image_fmap=True says where the channels are; leave channel_last at True")
        self.dim, self.codebook_size, self.codebook_dim, self.heads = dim, codebook_size, codebook_dim, heads
        self.separate_codebook_per_head = separate_codebook_per_head
        self.freeze_codebook = freeze_codebook
        self.channel_last, self.accept_image_fmap = channel_last, accept_image_fmap
        self.commitment_weight = commitment_weight
        self.rotation_trick = dim > 1 if rotation_trick is None else rotation_trick
        self.learnable_codebook = learnable

        inner = codebook_dim * heads
        self.has_projections = inner != dim
        self.project_in: nn.Module = nn.Linear(dim, inner) if self.has_projections else nn.Identity()
        self.project_out: nn.Module = nn.Linear(inner, dim) if self.has_projections else nn.Identity()
        self._codebook = Codebook(
            heads if separate_codebook_per_head else 1,
            codebook_size,
            codebook_dim,
            decay=decay,
            eps=eps,
            kmeans_init=kmeans_init,
            kmeans_iters=kmeans_iters,
            cosine=use_cosine_sim,
            threshold=threshold_ema_dead_code,
            learnable=learnable,
            ema_update=ema_update,
        )

    # --- codewords ---------------------------------------------------------------------------------------------------

    @property
    def codebook(self) -> torch.Tensor:
        """See the class."""
        return self._codebook.embed if self.separate_codebook_per_head else self._codebook.embed[0]

    @codebook.setter
    def codebook(self, codes: torch.Tensor) -> None:
        if not isinstance(codes, torch.Tensor):
            raise TypeError(f"VectorQuantize: codebook must be a torch.Tensor, got {type(codes).__name__}")
        if codes.shape != self.codebook.shape:
            raise ValueError(f"VectorQuantize: codebook must have shape {list(self.codebook.shape)}, got {list(codes.shape)}")
        with torch.no_grad():
            self.codebook.copy_(codes)

    @property
    def counts(self) -> torch.Tensor:
        """See the class."""
        return self._codebook.counts if self.separate_codebook_per_head else self._codebook.counts[0]

    @property
    def perplexity(self) -> torch.Tensor:
        """See the class; 1 when one codeword takes all, K when all are used alike, and 1 for an empty batch."""
        share = self.counts / self.counts.sum(-1, keepdim=True).clamp(min=1)
        entropy: torch.Tensor = torch.special.entr(share).sum(-1)
        return entropy.exp()

    @property
    def usage(self) -> torch.Tensor:
        """See the class; between 0 and 1."""
        return (self.counts > 0).float().mean(-1)

    def get_codes_from_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """The codewords of indices as ``forward`` returns them; zeros for the index -1 of a masked position.

        Args:
            indices: int64 ``[...]``, or ``[..., heads]``.

        Returns:
            ``[..., d]``; ``[..., heads, d]`` for heads that share a codebook, ``[..., heads * d]`` where each has its own;
            channels in the second dimension where the input has them there.
        """
        codes = self._gather(indices)
        if self.heads > 1 and not self.separate_codebook_per_head:
            codes = codes.unflatten(-1, (self.heads, -1))
        return codes.movedim(-1, 1) if self._channels_second and codes.dim() > 2 else codes

    def get_output_from_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """What ``forward`` returns as quantized for these indices, also behind projections and for several heads."""
        output: torch.Tensor = self.project_out(self._gather(indices))
        masked = (indices if self.heads == 1 else indices[..., 0]) < 0
        output = output.masked_fill(masked.unsqueeze(-1), 0)
        return output.movedim(-1, 1) if self._channels_second and output.dim() > 2 else output

    def _gather(self, indices: torch.Tensor) -> torch.Tensor:
        """int64 indices as returned -> codewords ``[..., heads * d]``."""
        if indices.dtype != torch.int64:
            raise TypeError(f"VectorQuantize: indices have dtype {indices.dtype}, expected torch.int64")
        if self.heads == 1:
            indices = indices.unsqueeze(-1)
        elif indices.dim() == 0 or indices.shape[-1] != self.heads:
            raise ValueError(
                f"VectorQuantize: indices must have shape [..., {self.heads}] for {self.heads} heads, got {list(indices.shape)}"
            )
        return gather(self._codebook.codes, indices.clamp(min=0)).masked_fill((indices < 0).unsqueeze(-1), 0).flatten(-2)

    @property
    def _channels_second(self) -> bool:
        return self.accept_image_fmap or not self.channel_last

    # --- forward -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        x: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        freeze_codebook: bool | None = None,
        return_loss_breakdown: bool = False,
        **other: Any,
    ) -> Any:
        """Quantise x and, in training, update the codewords (not under ``freeze_codebook``).

        Args:
            x: ``[..., dim]`` with at least two dimensions, ``[B, dim, ...]`` for ``channel_last=False``, or ``[B, dim, H, W]`` for
                ``accept_image_fmap``; float32, bfloat16, float16 or float64, any strides.
            mask: bool, the shape of x less its channels; False marks padding: quantized is 0 there and the index -1, and neither
                loss nor codewords see it. Not for images.
            freeze_codebook: overrides the constructor's for this call.
            return_loss_breakdown: also return the unweighted terms of the loss.
            **other: the remaining arguments of the peer, accepted at their defaults only.

        Returns:
            ``(quantized, indices, loss)``, and a :class:`LossBreakdown` when asked. quantized has the shape and dtype of x (behind
            projections the dtype that they give); indices are int64, ``[...]`` or ``[..., heads]``; loss is a scalar, float32
            (float64 for float64 x), zero outside training.

        Raises:
            ValueError: a shape that does not fit, or an argument that is not supported.
            TypeError: x is not floating point or the mask not bool, or an argument that nobody knows.
            RuntimeError: the codewords, or the first batch of ``kmeans_init``, are not finite (checked on the CPU).
        """
        _peer.refuse("VectorQuantize.forward", other, _peer.VECTOR_QUANTIZE_FORWARD)
        self._check(x, mask)
        moved = self._channels_second and x.dim() > 2
        given = self.project_in(x.movedim(1, -1) if moved else x)
        frozen = self.freeze_codebook if freeze_codebook is None else freeze_codebook
        quantized, indices, commitment = self._quantize(given, mask, frozen)
        quantized = self.project_out(quantized)
        if self.heads == 1:
            indices = indices.squeeze(-1)
        if mask is not None:
            quantized = quantized.masked_fill(~mask.unsqueeze(-1), 0)
            indices = indices.masked_fill(~(mask if self.heads == 1 else mask.unsqueeze(-1)), -1)
        quantized = quantized.movedim(-1, 1) if moved else quantized
        loss = commitment * self.commitment_weight
        if return_loss_breakdown:
            zero = torch.zeros_like(loss)
            return quantized, indices, loss, LossBreakdown(commitment, zero, zero, zero)
        return quantized, indices, loss

    def _quantize(self, given: torch.Tensor, mask: torch.Tensor | None, frozen: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[..., heads * d]`` -> quantized of the same shape, indices ``[..., heads]``, the commitment loss."""
        book = self._codebook
        rows = self._unit(given) if book.cosine else given
        if mask is not None:  # whatever the padding holds, NaN included, nothing below sees it
            rows = rows.masked_fill(~mask.unsqueeze(-1), 0)
        book.initialize(rows, mask)
        updating = self.training and not frozen and book.tracks
        learning = self.training and not frozen and self.learnable_codebook and self.commitment_weight > 0
        # A copy where the codewords are updated in place below: the backward pass still needs the ones that were chosen.
        codes = hold(book.codes) if updating else book.codes
        chosen_from = codes if learning else codes.detach()
        options: dict[str, Any] = {
            "metric": book.metric,
            "codebook_weight": float(learning and mask is None),
            "commitment_weight": 1.0,
            "estimator": "rotation" if self.rotation_trick else "straight_through",
        }
        out, sums = vq_with_sums(rows, chosen_from, **options) if updating else (vq(rows, chosen_from, **options), None)
        counts = out.counts if mask is None else out.counts - _chosen_by_padding(out.indices, codes, mask)
        book.counts.copy_(counts.view_as(book.counts))
        if sums is not None:  # the zeros of the padding have added nothing; a codeword that got a row of NaN sits this step out
            sums = sums.view_as(book.embed)
            unsound = sums.isnan().any(-1, keepdim=True)
            counts = counts.view_as(book.counts).masked_fill(unsound.view_as(book.counts), 0)
            book.update(counts, sums.masked_fill(unsound, 0), rows.detach(), mask)
        return (
            self._route(rows, codes, out).to(given.dtype),
            out.indices,
            self._commitment(given, codes, out, mask, learning),
        )

    def _route(self, rows: torch.Tensor, codes: torch.Tensor, out: VQOutput) -> torch.Tensor:
        """Choose where the gradient of quantized goes: in training to the input, else to codewords that are learned."""
        if self.training and rows.requires_grad:
            return out.quantized
        return gather(codes, out.indices).flatten(-2) if codes.requires_grad else out.quantized.detach()

    def _commitment(
        self, given: torch.Tensor, codes: torch.Tensor, out: VQOutput, mask: torch.Tensor | None, learning: bool
    ) -> torch.Tensor:
        """Mean squared distance to the codewords, over what the mask lets through; zero where it would not be used."""
        loss: torch.Tensor = out.loss
        if not self.training or self.commitment_weight == 0:
            return torch.zeros_like(loss)
        if mask is None:
            # The op adds one such mean per weight; the peer's loss is a single one whose gradient goes both ways.
            return loss - loss.detach() / 2 if learning else loss
        # With a mask the peer measures to the input as it was given, also where unit vectors are what is quantised.
        target = gather(codes, out.indices).flatten(-2) if learning else out.quantized.detach()
        error = (given.to(loss.dtype) - target.to(loss.dtype)).masked_fill(~mask.unsqueeze(-1), 0)
        return error.square().sum() / (mask.sum() * given.shape[-1]).clamp(min=1)

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        """Every head's vector scaled to length 1, in float32: half precision would leave it off by 2^-9."""
        split = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (self.heads, self.codebook_dim))
        return nn.functional.normalize(split, dim=-1, eps=1e-6).flatten(-2)

    def _check(self, x: torch.Tensor, mask: torch.Tensor | None) -> None:
        check_tensor("VectorQuantize", "x", x)
        second = self._channels_second and x.dim() > 2
        expected = f"[B, {self.dim}, H, W]" if self.accept_image_fmap else f"[B, {self.dim}, ...]" if second else f"[..., {self.dim}]"
        if x.dim() < 2 or (self.accept_image_fmap and x.dim() != 4) or x.shape[1 if second else -1] != self.dim:
            raise ValueError(f"VectorQuantize: x must have shape {expected}, got {list(x.shape)}")
        if mask is None:
            return
        if self.accept_image_fmap:
            raise ValueError("VectorQuantize: mask is for sequences; images (accept_image_fmap=True) take none")
        check_tensor("VectorQuantize", "mask", mask, (torch.bool,))
        shape = [*x.shape[:1], *x.shape[2:]] if second else [*x.shape[:-1]]
        if list(mask.shape) != shape:
            raise ValueError(f"VectorQuantize: mask must have shape {shape} for x {list(x.shape)}, got {list(mask.shape)}")


def _chosen_by_padding(indices: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """How many masked positions each codeword was chosen by, the shape of the op's counts."""
    padding = (~mask).unsqueeze(-1).expand_as(indices).reshape(-1).long()
    chosen = torch.zeros(codes.shape[:-1].numel(), dtype=torch.int64, device=indices.device)
    return chosen.scatter_add_(0, flat_indices(codes, indices), padding).view(codes.shape[:-1])
