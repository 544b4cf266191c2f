"""``ResidualVQ``: several quantisers in a row, each on what the ones before left over."""

from __future__ import annotations

import random
from collections.abc import Sequence
from operator import index
from typing import Any, cast

import torch
from torch import nn

from .._checks import check_tensor
from .._numbers import as_integer
from . import _distributed as distributed
from . import _peer
from .vector_quantize import VectorQuantize


class ResidualVQ(nn.Module):
    """Quantise x, then the rest, then the rest of that: a vector becomes one codeword per quantiser, and their sum.

    Args:
        dim: length of the vectors.
        num_quantizers: how many; may be left out when ``codebook_size`` names a size for each.
        codebook_size: K of all quantisers, or one for each.
        codebook_dim: length of the codewords; where it is not ``dim``, ``project_in`` and ``project_out`` are linear.
        quantize_dropout: in training, leave out the quantisers behind a random one, so that fewer indices also decode. Under
            ``torch.distributed`` all processes leave out the same, which costs a message and a wait for the device.
        quantize_dropout_cutoff_index: the first quantiser behind which they may be left out.
        quantize_dropout_multiple_of: keep a multiple of this many.
        accept_image_fmap: ``[B, D, H, W]`` input.
        quant_grad_frac: the share of a quantiser's gradient that reaches the ones before it through the rest.
        **vq_kwargs: of every :class:`VectorQuantize`, with one head; or the remaining arguments of the peer at their defaults.

    Attributes:
        codebook_sizes: K of each quantiser.
        layers: the quantisers, whose ``perplexity`` and ``usage`` say how each of them is used.
        codebooks: ``[Q, K, d]``, or a tuple of ``[K, d]`` where sizes differ.

    Raises:
        ValueError: an argument of the peer that is not supported, or sizes that do not fit.
        TypeError: an argument that nobody knows.

    Source: Zeghidour et al. 2021, "SoundStream", algorithm 1.

    Equivalent to: ``vector_quantize_pytorch.ResidualVQ`` 1.32 with the same arguments, which also loads its state_dict; images, where
    that class fails, work.
    """

    def __init__(
        self,
        *,
        dim: int,
        num_quantizers: int | None = None,
        codebook_size: int | Sequence[int],
        codebook_dim: int | None = None,
        quantize_dropout: bool = False,
        quantize_dropout_cutoff_index: int = 0,
        quantize_dropout_multiple_of: int = 1,
        accept_image_fmap: bool = False,
        quant_grad_frac: float = 0.0,
        **vq_kwargs: Any,
    ) -> None:
        super().__init__()
        peer = {name: vq_kwargs.pop(name) for name in list(vq_kwargs) if name in _peer.RESIDUAL_VQ}
        _peer.refuse("ResidualVQ", peer, _peer.RESIDUAL_VQ)
        same = as_integer(codebook_size)
        if num_quantizers is None and same is not None:
            raise ValueError("ResidualVQ: name num_quantizers, or one codebook_size for each of them")
        count = 0 if num_quantizers is None else index(num_quantizers)
        sizes = [same] * count if same is not None else list(cast("Sequence[int]", codebook_size))
        if not sizes or len(sizes) != (count or len(sizes)):
            raise ValueError(f"ResidualVQ: codebook_size {codebook_size} does not fit num_quantizers={num_quantizers}; name at least one")
        if not 0 <= quantize_dropout_cutoff_index < len(sizes) or quantize_dropout_multiple_of < 1:
            raise ValueError(
                f"ResidualVQ: quantize_dropout_cutoff_index={quantize_dropout_cutoff_index} must be 0 to {len(sizes) - 1} and"
                f" quantize_dropout_multiple_of={quantize_dropout_multiple_of} at least 1"
            )
        codebook_dim = dim if codebook_dim is None else codebook_dim
        self.dim, self.num_quantizers = dim, len(sizes)
        self.codebook_dim, self.codebook_sizes = codebook_dim, tuple(sizes)
        self.accept_image_fmap = accept_image_fmap
        self.quantize_dropout = quantize_dropout and len(sizes) > 1
        self.quantize_dropout_cutoff_index = quantize_dropout_cutoff_index
        self.quantize_dropout_multiple_of = quantize_dropout_multiple_of
        self.quant_grad_frac = quant_grad_frac
        self.has_projections = codebook_dim != dim
        self.project_in: nn.Module = nn.Linear(dim, codebook_dim) if self.has_projections else nn.Identity()
        self.project_out: nn.Module = nn.Linear(codebook_dim, dim) if self.has_projections else nn.Identity()
        self.layers = nn.ModuleList(VectorQuantize(codebook_dim, size, **vq_kwargs) for size in sizes)

    @property
    def codebooks(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """See the class."""
        books = tuple(layer.codebook for layer in self._quantizers)
        return torch.stack(books) if len({len(book) for book in books}) == 1 else books

    @property
    def _quantizers(self) -> list[VectorQuantize]:
        return [layer for layer in self.layers if isinstance(layer, VectorQuantize)]

    def get_codes_from_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """The codeword of every quantiser, ``[Q, ..., d]``.

        Args:
            indices: int64 ``[..., q]``; with fewer than Q of them, or -1, the codeword is zero.
        """
        if not 1 <= indices.shape[-1] <= self.num_quantizers:
            raise ValueError(f"ResidualVQ: indices must have shape [..., 1 to {self.num_quantizers}], got {list(indices.shape)}")
        missing = self.num_quantizers - indices.shape[-1]
        indices = nn.functional.pad(indices, (0, missing), value=-1)
        return torch.stack([layer.get_codes_from_indices(i) for layer, i in zip(self._quantizers, indices.unbind(-1), strict=True)])

    def get_output_from_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """What ``forward`` returns as quantized for these indices; a position whose indices are all -1 is zero."""
        output: torch.Tensor = self.project_out(self.get_codes_from_indices(indices).sum(0))
        output = output.masked_fill((indices < 0).all(-1, keepdim=True), 0)
        return output.movedim(-1, 1) if self.accept_image_fmap else output

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        return_all_codes: bool = False,
        freeze_codebook: bool | None = None,
        rand_quantize_dropout_fixed_seed: int | None = None,
        **other: Any,
    ) -> Any:
        """Quantise x and, in training, update the codewords (not under ``freeze_codebook``).

        Args:
            x: ``[..., dim]``, or ``[B, dim, H, W]`` for ``accept_image_fmap``; dtypes as :class:`VectorQuantize`.
            mask: bool, the shape of x less its channels; False marks padding. Not for images.
            return_all_codes: also return the codeword of every quantiser, ``[Q, ..., d]``.
            freeze_codebook: overrides the constructor's for this call.
            rand_quantize_dropout_fixed_seed: which quantisers are left out then depends on it alone, as in the peer.
            **other: the remaining arguments of the peer, accepted at their defaults only.

        Returns:
            ``(quantized, indices, losses)``, and the codes when asked. quantized has the shape of x, indices are int64 ``[..., Q]``
            with -1 where masked or left out, losses are ``[Q]``.

        Raises:
            ValueError, TypeError, RuntimeError: as :class:`VectorQuantize`.
        """
        _peer.refuse("ResidualVQ.forward", other, _peer.RESIDUAL_VQ_FORWARD)
        if self.accept_image_fmap and mask is not None:
            raise ValueError("ResidualVQ: mask is for sequences; images (accept_image_fmap=True) take none")
        check_tensor("ResidualVQ", "x", x)
        fits = x.dim() == 4 if self.accept_image_fmap else x.dim() >= 2
        if not fits or x.shape[1 if self.accept_image_fmap else -1] != self.dim:
            expected = f"[B, {self.dim}, H, W]" if self.accept_image_fmap else f"[..., {self.dim}]"
            raise ValueError(f"ResidualVQ: x must have shape {expected}, got {list(x.shape)}")
        residual = self.project_in(x.movedim(1, -1) if self.accept_image_fmap else x)
        total = torch.zeros_like(residual)
        kept = self._kept(x.device, rand_quantize_dropout_fixed_seed)
        indices, losses = [], []
        for layer in self.layers[:kept]:
            quantized, chosen, loss = layer(residual, mask=mask, freeze_codebook=freeze_codebook)
            passed = quantized.detach()
            if self.quant_grad_frac > 0:
                passed = passed + self.quant_grad_frac * (quantized - passed)
            residual = residual - passed
            total = total + quantized
            indices.append(chosen)
            losses.append(loss)
        left_out = self.num_quantizers - kept
        all_indices = nn.functional.pad(torch.stack(indices, -1), (0, left_out), value=-1)
        all_losses = nn.functional.pad(torch.stack(losses), (0, left_out))
        output = self.project_out(total)
        if mask is not None:
            output = output.masked_fill(~mask.unsqueeze(-1), 0)
        result = (output.movedim(-1, 1) if self.accept_image_fmap else output, all_indices, all_losses)
        return (*result, self.get_codes_from_indices(all_indices)) if return_all_codes else result

    def _kept(self, device: torch.device, seed: int | None) -> int:
        """How many quantisers run in this call."""
        if not (self.training and self.quantize_dropout):
            return self.num_quantizers
        if seed is not None:  # as the peer draws for this seed
            last = random.Random(seed).randrange(self.quantize_dropout_cutoff_index, self.num_quantizers)
        else:
            drawn = torch.randint(self.quantize_dropout_cutoff_index, self.num_quantizers, ())
            last = int(drawn if distributed.rank_and_size()[1] == 1 else distributed.same_on_all(drawn.to(device)))
        multiple = self.quantize_dropout_multiple_of
        return min(self.num_quantizers, -(-(last + 1) // multiple) * multiple)
