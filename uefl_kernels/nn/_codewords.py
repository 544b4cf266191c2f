"""What :class:`VectorQuantize` says of its codewords, and the way back from indices to them."""

from __future__ import annotations

import torch
from torch import nn

from .._gather import gather
from ._codebook import Codebook
from ._layout import Layout


class Codewords(nn.Module):
    """A layer with a :class:`Codebook`, projections around it, and heads."""

    dim: int
    heads: int
    separate_codebook_per_head: bool
    channel_last: bool
    accept_image_fmap: bool
    accept_3d_fmap: bool
    project_out: nn.Module
    _codebook: Codebook

    @property
    def layout(self) -> Layout:
        """Where the channels of the input are."""
        return Layout("VectorQuantize", self.dim, self.channel_last, 2 if self.accept_image_fmap else 3 if self.accept_3d_fmap else 0)

    @property
    def codebook(self) -> torch.Tensor:
        """See :class:`VectorQuantize`."""
        return self._codebook.embed if self.separate_codebook_per_head else self._codebook.embed[0]

    @codebook.setter
    def codebook(self, codes: torch.Tensor) -> None:
        if not isinstance(codes, torch.Tensor):
            raise TypeError(f"VectorQuantize: codebook must be a torch.Tensor, got {type(codes).__name__}")
        if codes.shape != self.codebook.shape:
            raise ValueError(f"VectorQuantize: codebook must have shape {list(self.codebook.shape)}, got {list(codes.shape)}")
        self._codebook.assign(codes if self.separate_codebook_per_head else codes.unsqueeze(0))

    @property
    def counts(self) -> torch.Tensor:
        """See :class:`VectorQuantize`."""
        return self._codebook.counts if self.separate_codebook_per_head else self._codebook.counts[0]

    @property
    def perplexity(self) -> torch.Tensor:
        """See :class:`VectorQuantize`; 1 when one codeword takes all, K when all are used alike, and 1 for an empty batch."""
        share = self.counts.float() / self.counts.sum(-1, keepdim=True).clamp(min=1)
        entropy: torch.Tensor = torch.special.entr(share).sum(-1)
        return entropy.exp()

    @property
    def usage(self) -> torch.Tensor:
        """See :class:`VectorQuantize`; between 0 and 1."""
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
        return self.layout.outward(codes, codes.dim())

    def get_output_from_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """What ``forward`` returns as quantized for these indices, also behind projections and for several heads."""
        output: torch.Tensor = self.project_out(self._gather(indices))
        masked = (indices if self.heads == 1 else indices[..., 0]) < 0
        output = output.masked_fill(masked.unsqueeze(-1), 0)
        return self.layout.outward(output, output.dim())

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
        codes = self._codebook.codes
        codes = codes[0] if len(codes) == 1 else codes
        return gather(codes, indices.clamp(min=0)).masked_fill((indices < 0).unsqueeze(-1), 0).flatten(-2)
