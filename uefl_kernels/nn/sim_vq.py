"""``SimVQ`` and ``ResidualSimVQ``: codewords that are a learned map of fixed random ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import vq
from .._gather import gather
from ._codebook import Coder
from ._shared import (
    Layout,
    MethodCall,
    as_indices,
    channels_last,
    counts,
    fixed,
    in_a_call,
    no_autocast,
    numbers,
    project,
)
from .residual_vq import ResidualQuantizer


class SimVQ(Coder):
    """Replace every vector by its nearest codeword, which a module makes.

    The module makes the codewords from fixed random vectors.

    All codewords move with every gradient step, so none is left behind.

    Args:
        dim: length of the vectors.
        codebook_size: K.
        codebook_transform: a module from the fixed vectors ``[K, frozen_codebook_dim]`` to codewords ``[K,
            dim]``; by default linear.
        init_fn: applied once to the fixed vectors, before they are kept.
        channel_first: ``[B, dim, ...]`` input instead of ``[..., dim]``.
        rotation_trick: as :class:`VectorQuantize`.
        input_to_quantize_commit_loss_weight: weight of the loss that moves the input; the loss that moves the
            codewords has weight 1.
        commitment_weight: weight of both terms.
        frozen_codebook_dim: length of the fixed vectors; ``dim`` by default.

    Attributes:
        codebook: ``[K, dim]``, the codewords.

    Raises:
        ValueError: sizes or weights that do not fit.

    Source: Zhu et al. 2024, "Addressing Representation Collapse in Vector Quantized Models with One Linear
        Layer".

    Equivalent to: ``vector_quantize_pytorch.SimVQ`` 1.32 with the same arguments, which also loads its
        state_dict.
    """

    frozen_codebook: torch.Tensor

    def __init__(
        self,
        dim: int,
        codebook_size: int,
        codebook_transform: nn.Module | None = None,
        init_fn: Callable[[torch.Tensor], torch.Tensor] = lambda codewords: codewords,
        channel_first: bool = False,
        rotation_trick: bool = True,
        input_to_quantize_commit_loss_weight: float = 0.25,
        commitment_weight: float = 1.0,
        frozen_codebook_dim: int | None = None,
    ) -> None:
        super().__init__()
        frozen = dim if frozen_codebook_dim is None else frozen_codebook_dim
        dim, codebook_size, frozen = counts(
            "SimVQ", dim=dim, codebook_size=codebook_size, frozen_codebook_dim=frozen
        )
        numbers("SimVQ", None, commitment_weight=commitment_weight)
        numbers("SimVQ", None, input_to_quantize_commit_loss_weight=input_to_quantize_commit_loss_weight)
        self._dim, self.channel_first, self.rotation_trick = dim, channel_first, rotation_trick
        self.input_to_quantize_commit_loss_weight = input_to_quantize_commit_loss_weight
        self.commitment_weight = commitment_weight
        codewords = init_fn(torch.randn(codebook_size, frozen) * frozen**-0.5)
        self.code_transform = (
            nn.Linear(frozen, dim, bias=False) if codebook_transform is None else codebook_transform
        )
        self.register_buffer("frozen_codebook", codewords)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"dim={self.dim}, codebook_size={self.codebook_size}"

    dim = fixed("dim", lambda layer: layer._dim, "Length of the vectors.")
    codebook_size = fixed("codebook_size", lambda layer: len(layer.frozen_codebook), "K.")

    @property
    def codebook(self) -> torch.Tensor:
        """Return the codewords, ``[K, dim]``."""
        with no_autocast(self.frozen_codebook.device):
            return project(self.code_transform, self.frozen_codebook)

    @in_a_call
    def indices_to_codes(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the codewords of integers ``[...]``, as ``forward`` returns them, or zeros for -1."""
        indices = as_indices("SimVQ", indices, least=-1, size=self.codebook_size)
        codewords = gather(self.codebook, indices.clamp(min=0)).masked_fill((indices < 0).unsqueeze(-1), 0)
        return codewords.movedim(-1, 1) if self.channel_first else codewords

    get_output_from_indices = indices_to_codes

    @property
    def bits_per_vector(self) -> float:
        """Return the bits of the index of a vector, log2(K)."""
        return math.log2(self.codebook_size)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Quantize x.

        Args:
            x: ``[..., dim]``, or ``[B, dim, ...]`` for ``channel_first``; float32, bfloat16, float16 or
                float64.

        Returns:
            ``(quantized, indices, loss)``: the shape and dtype of x, int64 of that shape without its
            channels, and a scalar.

        Raises:
            ValueError, TypeError: an input that does not fit.
            RuntimeError: the codewords are not finite (checked on the CPU).
        """
        if isinstance(x, MethodCall):
            return x()  # type: ignore[no-any-return]
        layout = Layout("SimVQ", self.dim, not self.channel_first)
        layout.check(x, None)
        out = vq(
            layout.inward(x),
            self.codebook,
            codebook_weight=1.0,
            commitment_weight=self.input_to_quantize_commit_loss_weight,
            estimator="rotation" if self.rotation_trick else "straight_through",
        )
        return (
            layout.outward(out.quantized, x.dim()),
            out.indices.squeeze(-1),
            out.loss * self.commitment_weight,
        )


class ResidualSimVQ(ResidualQuantizer):
    """Quantize x by a :class:`SimVQ`, then the residual by the next one.

    Args:
        dim, codebook_size: as :class:`SimVQ`.
        num_quantizers: how many.
        heads: only 1.
        quantize_dropout, quantize_dropout_cutoff_index, quantize_dropout_multiple_of: as :class:`ResidualVQ`.
        channel_first: ``[B, dim, ...]`` input.
        **sim_vq_kwargs: arguments of every :class:`SimVQ`.

    Attributes:
        codebooks: ``[Q, K, dim]``.

    Raises:
        ValueError: sizes that do not fit.

    Source: as :class:`SimVQ` and :class:`ResidualVQ`.

    Equivalent to: ``vector_quantize_pytorch.ResidualSimVQ`` 1.32 with the same arguments, which also loads
        its state_dict.
    """

    def __init__(
        self,
        *,
        dim: int,
        num_quantizers: int,
        codebook_size: int,
        heads: int = 1,
        quantize_dropout: bool = False,
        quantize_dropout_cutoff_index: int = 0,
        quantize_dropout_multiple_of: int = 1,
        channel_first: bool = False,
        **sim_vq_kwargs: Any,
    ) -> None:
        if heads != 1:
            raise ValueError(
                f"ResidualSimVQ: heads={heads} is not supported, because a residual has one head; set heads=1"
            )
        (num_quantizers,) = counts("ResidualSimVQ", num_quantizers=num_quantizers)
        super().__init__(
            num_quantizers, quantize_dropout, quantize_dropout_cutoff_index, quantize_dropout_multiple_of
        )
        options = {"channel_first": channel_first, **sim_vq_kwargs}
        self.layers = nn.ModuleList(SimVQ(dim, codebook_size, **options) for _ in range(num_quantizers))

    codebook_size = fixed(
        "codebook_size", lambda layer: layer._quantizers[0].codebook_size, "K of each quantizer."
    )
    codebook_dim = fixed("codebook_dim", lambda layer: layer._quantizers[0].dim, "Length of a codeword.")
    channel_first = fixed(
        "channel_first", lambda layer: layer._quantizers[0].channel_first, "True if the channels come second."
    )

    @property
    def _quantizers(self) -> list[SimVQ]:
        return [layer for layer in self.layers if isinstance(layer, SimVQ)]

    @property
    def codebooks(self) -> torch.Tensor:
        """Return the codewords, ``[Q, K, dim]``."""
        return torch.stack([layer.codebook for layer in self._quantizers])

    def get_codes_from_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """Return ``[Q, ..., dim]``, with the channels where ``forward`` has them.

        Codewords are zero for -1 and for indices omitted at the end.
        """
        indices = self._padded(indices)
        return torch.stack(
            [layer.indices_to_codes(i) for layer, i in zip(self._quantizers, indices.unbind(-1), strict=True)]
        )

    def get_output_from_indices(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the quantized vectors that ``forward`` returns with these indices."""
        return self.get_codes_from_indices(indices).sum(0)

    def forward(
        self,
        x: torch.Tensor,
        return_all_codes: bool = False,
        rand_quantize_dropout_fixed_seed: int | None = None,
        n_q: int | torch.Tensor | None = None,
    ) -> Any:
        """Quantize x.

        Args:
            x: ``[..., dim]`` or ``[B, dim, ...]``.
            return_all_codes, rand_quantize_dropout_fixed_seed, n_q: as :class:`ResidualVQ`.

        Returns:
            ``(quantized, indices, losses)``: indices int64 ``[..., Q]``, -1 where left out, losses ``[Q]``;
            and the codewords if requested.

        Raises:
            ValueError, TypeError, RuntimeError: as :class:`SimVQ`.
        """
        channels_last("ResidualSimVQ", x, self.codebook_dim, self.channel_first)
        kept = self._number(x, n_q, rand_quantize_dropout_fixed_seed)
        residual, total, chosen, losses = x, torch.zeros_like(x), [], []
        for place, layer in enumerate(self._quantizers[:kept]):
            quantized, indices, loss = self._of_examples(layer, residual, place, n_q)
            residual, total = residual - quantized.detach(), total + quantized
            chosen.append(indices)
            losses.append(loss)
        all_indices = self._padded(torch.stack(chosen, -1))
        result = total, all_indices, nn.functional.pad(torch.stack(losses), (0, self._num_quantizers - kept))
        return (*result, self.get_codes_from_indices(all_indices)) if return_all_codes else result
