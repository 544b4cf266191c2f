"""``RandomProjectionQuantizer``: indices of random projections, as targets of speech models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ._codebook import Coder
from ._shared import as_indices, channels_last, counts
from .vector_quantize import VectorQuantize


class RandomProjectionQuantizer(Coder):
    """Project vectors by fixed random matrices and return the indices of the nearest codewords.

    Args:
        dim: length of the vectors ``[B, N, dim]``.
        codebook_size: K.
        codebook_dim: length of a codeword.
        num_codebooks: number of random matrices, each with a codebook.
        norm: normalize each vector to mean 0 and variance 1.
        **kwargs: arguments of :class:`VectorQuantize`.

    Raises:
        ValueError: sizes that do not fit.

    Source: Chiu et al. 2022, "Self-supervised Learning with Random-projection Quantizer for Speech
        Recognition", section 3.

    Equivalent to: ``vector_quantize_pytorch.RandomProjectionQuantizer`` 1.32 with the same arguments, which
        also loads its state_dict.
    """

    rand_projs: torch.Tensor

    def __init__(
        self,
        *,
        dim: int,
        codebook_size: int,
        codebook_dim: int,
        num_codebooks: int = 1,
        norm: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        dim, codebooks, d = counts(
            "RandomProjectionQuantizer", dim=dim, num_codebooks=num_codebooks, codebook_dim=codebook_dim
        )
        self.register_buffer("rand_projs", nn.init.xavier_normal_(torch.empty(codebooks, dim, d)))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False) if norm else nn.Identity()
        self.vq = VectorQuantize(
            dim=d * codebooks,
            heads=codebooks,
            codebook_size=codebook_size,
            use_cosine_sim=True,
            separate_codebook_per_head=True,
            **kwargs,
        )

    @property
    def num_codebooks(self) -> int:
        """Return the number of random matrices."""
        return len(self.rand_projs)

    @property
    def bits_per_vector(self) -> float:
        """Return the bits of the indices of a vector."""
        return self.vq.bits_per_vector

    def encode(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the indices of x, ``[..., dim]``."""
        with torch.no_grad():
            indices: torch.Tensor = self(x, **options)
        return indices

    def decode(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the codewords of indices, in the space of the projections."""
        return self.vq.decode(as_indices("RandomProjectionQuantizer", indices))

    def forward(self, x: torch.Tensor, indices: torch.Tensor | None = None) -> torch.Tensor:
        """Return the indices of x ``[B, N, dim]``, or the cross entropy of given indices.

        Raises:
            ValueError: a shape that does not fit.
            TypeError: the input is not a tensor of floats.
        """
        x = channels_last("RandomProjectionQuantizer", x, self.rand_projs.shape[1], False)
        projected = torch.einsum("...d,hde->...he", self.norm(x), self.rand_projs.to(x.dtype)).flatten(-2)
        self.vq.eval()
        found: torch.Tensor = self.vq(projected, indices=indices)[1]
        return found
