"""``LatentQuantize``: the nearest of a few values for every element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .._dtypes import vector_of
from .._numbers import as_integer
from ._codebook import Coder
from ._shared import (
    ConstantBuffers,
    MethodCall,
    ParametersToCall,
    absent,
    as_indices,
    channels_last,
    check_codebooks,
    check_codewords,
    count_of_each,
    counts,
    fixed,
    in_a_call,
    place_values,
    project,
    refuse_together,
)


class LatentQuantize(ConstantBuffers, Coder):
    """Replace every element of a vector by the nearest of a few values.

    Args:
        levels: number of values of each element; an int applies to all ``codebook_dim`` elements.
        dim: length of the vectors ``[B, dim, ...]``; where it differs from ``codebook_dim * num_codebooks``,
            ``project_in`` and ``project_out`` are linear.
        commitment_loss_weight: weight of the loss that moves the output to the input.
        quantization_loss_weight: weight of the loss that moves the input to the output.
        num_codebooks: parts of a vector, each with an index.
        codebook_dim: elements of a part, where ``levels`` is an int.
        keep_num_codebooks_dim: keep the last dimension of the indices for one codebook too.
        optimize_values: make the values parameters. No loss of this layer gives them a gradient.
        in_place_codebook_optimizer: not supported; the peer fails in training with it.

    Raises:
        ValueError: sizes that do not fit, or ``in_place_codebook_optimizer``.
        RuntimeError: ``levels`` is an int without ``codebook_dim``.

    Source: Hsu et al. 2023, "Disentanglement via Latent Quantization", eqs. 1-4.

    Equivalent to: ``vector_quantize_pytorch.LatentQuantize`` 1.32 with the same arguments, which also loads
        its state_dict. Here an index is the number of the chosen value, without rounding, and decoding uses
        the current values.
    """

    _levels: torch.Tensor
    _basis: torch.Tensor

    def __init__(
        self,
        levels: Sequence[int] | int,
        dim: int,
        commitment_loss_weight: float | None = 0.1,
        quantization_loss_weight: float | None = 0.1,
        num_codebooks: int = 1,
        codebook_dim: int = -1,
        keep_num_codebooks_dim: bool | None = None,
        optimize_values: bool | None = True,
        in_place_codebook_optimizer: Any = None,
    ) -> None:
        super().__init__()
        same = as_integer(levels)
        if same is not None:
            if codebook_dim < 1:
                raise RuntimeError(
                    f"LatentQuantize: levels={levels} needs codebook_dim, the number of elements"
                )
            levels = [same] * codebook_dim
        levels = count_of_each("LatentQuantize", "levels", levels)
        refuse_together(
            "LatentQuantize",
            (not levels or min(levels) < 2, f"levels={levels} must be at least 2 each"),
            (
                codebook_dim > 0 and codebook_dim != len(levels),
                f"codebook_dim={codebook_dim} differs from the {len(levels)} levels",
            ),
            (
                in_place_codebook_optimizer is not None,
                "in_place_codebook_optimizer is not supported; no loss gives the values a gradient",
            ),
        )
        self._dim, self._num_codebooks = counts("LatentQuantize", dim=dim, num_codebooks=num_codebooks)
        self._keep = bool(keep_num_codebooks_dim) or num_codebooks > 1
        self.commitment_loss_weight = commitment_loss_weight or 0.0
        self.quantization_loss_weight = quantization_loss_weight or 0.0
        inner = len(levels) * num_codebooks
        self.project_in: nn.Module = nn.Linear(dim, inner) if dim != inner else nn.Identity()
        self.project_out: nn.Module = nn.Linear(inner, dim) if dim != inner else nn.Identity()
        self._level_list = levels
        self._register_constants()
        device = None if optimize_values else torch.device("cpu")  # no state, so they need values at once
        values = [
            torch.linspace(-0.5, 0.5, level, device=device)
            if level % 2
            else torch.arange(level, device=device) / level - 0.5
            for level in levels
        ]
        self.values_per_latent: Any
        if optimize_values:
            self.values_per_latent = ParametersToCall(nn.Parameter(value) for value in values)
        else:
            self.values_per_latent = values

    def _constants(self, device: torch.device | None = None) -> dict[str, torch.Tensor | None]:
        levels = self._level_list
        return {
            "_levels": vector_of(levels, torch.int64, device),
            "_basis": place_values("LatentQuantize", levels, device),
        }

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"levels={self._level_list}, dim={self.dim}, num_codebooks={self.num_codebooks}"

    in_place_codebook_optimizer, quantize_and_project = map(
        absent, ("in_place_codebook_optimizer", "quantize_and_project")
    )
    dim = fixed("dim", lambda layer: layer._dim, "Length of the vectors.")
    num_codebooks = fixed("num_codebooks", lambda layer: layer._num_codebooks, "Parts of a vector.")
    codebook_dim = fixed("codebook_dim", lambda layer: len(layer._levels), "Elements of a part.")
    effective_codebook_dim = fixed(
        "effective_codebook_dim",
        lambda layer: len(layer._levels) * layer._num_codebooks,
        "Number of elements that are quantized.",
    )
    codebook_size = fixed("codebook_size", lambda layer: math.prod(layer._level_list), "K.")
    keep_num_codebooks_dim = fixed(
        "keep_num_codebooks_dim", lambda layer: layer._keep, "True if indices are [..., num_codebooks]."
    )
    has_projections = fixed(
        "has_projections",
        lambda layer: not isinstance(layer.project_in, nn.Identity),
        "True if project_in and project_out are linear.",
    )
    implicit_codebook = fixed(
        "implicit_codebook",
        lambda layer: layer._values(
            torch.arange(layer.codebook_size, device=layer._levels.device).unsqueeze(-1)
            // layer._constant("_basis")
            % layer._constant("_levels")
        ),
        "All codewords.",
    )

    @property
    def bits_per_vector(self) -> float:
        """Return the bits of the indices of a vector."""
        return float(self.num_codebooks * sum(map(math.log2, self._level_list)))

    def _read_values(self) -> Sequence[torch.Tensor]:
        values: Any = self.values_per_latent
        found: Sequence[torch.Tensor] = values() if isinstance(values, ParametersToCall) else values
        return found

    def _nearest(self, z: torch.Tensor) -> torch.Tensor:
        """Return the number of the nearest value of every element, int64 ``[..., d]``."""
        pairs = zip(z.unbind(-1), self._read_values(), strict=True)
        return torch.stack([(value.unsqueeze(-1) - v.to(value)).abs().argmin(-1) for value, v in pairs], -1)

    def _values(self, places: torch.Tensor) -> torch.Tensor:
        """Return the values ``[..., d]`` of numbers ``[..., d]``."""
        pairs = zip(places.unbind(-1), self._read_values(), strict=True)
        return torch.stack([v.detach().to(place.device)[place] for place, v in pairs], -1)

    def quantize(self, z: torch.Tensor) -> torch.Tensor:
        """Return the nearest values of ``[..., d]``.

        The gradient goes to z unchanged.
        """
        return self._values(self._nearest(z)).to(z.dtype) + (z - z.detach())

    def codes_to_indices(self, zhat: torch.Tensor) -> torch.Tensor:
        """Return the index ``[...]``, int32 or int64 as ``forward``, of values ``[..., d]``."""
        check_codewords("LatentQuantize", zhat, self.codebook_dim)
        return (self._nearest(zhat) * self._constant("_basis")).sum(-1).to(self._constant("_basis").dtype)

    def quantization_loss(self, z: torch.Tensor, zhat: torch.Tensor, reduce: str = "mean") -> torch.Tensor:
        """Return the mean squared distance, with a gradient for z."""
        return F.mse_loss(zhat.detach(), z, reduction=reduce)

    def commitment_loss(self, z: torch.Tensor, zhat: torch.Tensor, reduce: str = "mean") -> torch.Tensor:
        """Return the mean squared distance, with a gradient for zhat."""
        return F.mse_loss(z.detach(), zhat, reduction=reduce)

    @in_a_call
    def indices_to_codes(self, indices: torch.Tensor, project_out: bool = True) -> torch.Tensor:
        """Return what ``forward`` returns as quantized for these indices, integers of any width."""
        indices = as_indices("LatentQuantize", indices, least=0, size=self.codebook_size)
        if self._keep:
            check_codebooks("LatentQuantize", indices, self.num_codebooks)
        places = indices.unsqueeze(-1) // self._constant("_basis") % self._constant("_levels")
        codewords = self._values(places)
        codewords = codewords.flatten(-2) if self._keep else codewords
        codewords = project(self.project_out, codewords.to(self._model_dtype)) if project_out else codewords
        return codewords.movedim(-1, min(1, codewords.dim() - 1))

    get_output_from_indices = indices_to_codes

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Quantize z, ``[B, dim, ...]``.

        Returns:
            ``(quantized, indices, loss)``: the shape of z, integers of that shape without its channels (or
            ``[..., num_codebooks]``; int32, or int64 for more than 2^31 codewords), and a scalar, 0 outside
            training.

        Raises:
            ValueError: a shape that does not fit.
            TypeError: the input is not a tensor of floats.
        """
        if isinstance(z, MethodCall):
            return z()  # type: ignore[no-any-return]
        given, z = z, self.project_in(channels_last("LatentQuantize", z, self.dim, True, "z"))
        z = z.unflatten(-1, (self.num_codebooks, self.codebook_dim))  # type: ignore[no-untyped-call]
        places = self._nearest(z)
        codewords = self._values(places).to(z.dtype) + (z - z.detach())
        indices = (places * self._constant("_basis")).sum(-1).to(self._constant("_basis").dtype)
        output = self.project_out(codewords.flatten(-2)).movedim(-1, 1)
        loss = z.new_zeros(())
        if self.training and z.numel() > 0:
            loss = self.commitment_loss_weight * self.commitment_loss(given, output)
            loss = loss + self.quantization_loss_weight * self.quantization_loss(given, output)
        return output, indices if self._keep else indices.squeeze(-1), loss
