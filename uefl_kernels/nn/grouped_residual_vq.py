"""``GroupedResidualVQ``: a :class:`ResidualVQ` for each part of the channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from . import _distributed
from ._arguments import counts
from ._layout import Layout
from .residual_vq import ResidualVQ


class GroupedResidualVQ(nn.Module):
    """Cut the channels into ``groups`` equal parts, each quantised by a :class:`ResidualVQ` of its own.

    Args:
        dim: length of the vectors, a multiple of ``groups``.
        groups: how many parts.
        accept_image_fmap: ``[B, D, H, W]`` input.
        channel_last: False for ``[B, D, N]`` input.
        **kwargs: of every :class:`ResidualVQ`.

    Attributes:
        rvqs: the groups' quantisers.
        codebooks: ``[groups, Q, K, d]``.

    Raises:
        ValueError, TypeError: as :class:`ResidualVQ`, and dim no multiple of groups.

    Source: Yang et al. 2023, "HiFi-Codec".

    Equivalent to: ``vector_quantize_pytorch.GroupedResidualVQ`` 1.32 with the same arguments, which also loads its state_dict.
    """

    def __init__(self, *, dim: int, groups: int = 1, accept_image_fmap: bool = False, channel_last: bool = True, **kwargs: Any) -> None:
        super().__init__()
        dim, groups = counts("GroupedResidualVQ", dim=dim, groups=groups)
        if dim % groups:
            raise ValueError(f"GroupedResidualVQ: dim={dim} cannot be cut into groups={groups}; make it a multiple")
        self.dim, self.groups, self.accept_image_fmap, self.channel_last = dim, groups, accept_image_fmap, channel_last
        options = {"accept_image_fmap": accept_image_fmap, "channel_last": channel_last, **kwargs}
        self.rvqs = nn.ModuleList(ResidualVQ(dim=dim // groups, **options) for _ in range(groups))

    @property
    def _residuals(self) -> list[ResidualVQ]:
        return [rvq for rvq in self.rvqs if isinstance(rvq, ResidualVQ)]

    @property
    def codebooks(self) -> torch.Tensor:
        """See the class."""
        return torch.stack([torch.stack(list(rvq.codebooks)) for rvq in self._residuals])

    @property
    def split_dim(self) -> int:
        """The dimension of the channels."""
        return 1 if self.accept_image_fmap or not self.channel_last else -1

    def get_codes_from_indices(self, indices: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """``[groups, Q, ..., d]`` of the indices of each group, ``[groups, ..., q]``."""
        return torch.stack([rvq.get_codes_from_indices(chosen) for rvq, chosen in zip(self._residuals, indices, strict=True)])

    def get_output_from_indices(self, indices: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """What ``forward`` returns as quantized for these indices."""
        outputs = [rvq.get_output_from_indices(chosen) for rvq, chosen in zip(self._residuals, indices, strict=True)]
        return torch.cat(outputs, self.split_dim)

    def forward(
        self,
        x: torch.Tensor,
        indices: Sequence[torch.Tensor] | torch.Tensor | None = None,
        return_all_codes: bool = False,
        sample_codebook_temp: float | None = None,
        freeze_codebook: bool | None = None,
        mask: torch.Tensor | None = None,
    ) -> Any:
        """Quantise x; arguments as :class:`ResidualVQ`, whose quantisers behind a random one all groups leave out alike.

        Returns:
            ``(quantized, indices, losses)``: indices int64 ``[groups, ..., Q]``, losses ``[groups, Q]``, and the codes ``[groups, Q, ...,
            d]`` when asked; ``(quantized, loss)`` for indices ``[groups, ..., Q]`` that are given.

        Raises:
            ValueError, TypeError, RuntimeError: as :class:`ResidualVQ`.
        """
        Layout("GroupedResidualVQ", self.dim, self.channel_last, 2 if self.accept_image_fmap else 0).check(x, mask)
        options: dict[str, Any] = {
            "mask": mask,
            "return_all_codes": return_all_codes,
            "sample_codebook_temp": sample_codebook_temp,
            "freeze_codebook": freeze_codebook,
        }
        if self.training and self._residuals[0].quantize_dropout:
            options["rand_quantize_dropout_fixed_seed"] = int(_distributed.same_on_all(torch.randint(0, 10_000, (), device=x.device)))
        given = [None] * self.groups if indices is None else list(indices)
        parts = x.chunk(self.groups, self.split_dim if x.dim() > 2 else -1)
        found = [rvq(part, indices=i, **options) for rvq, part, i in zip(self._residuals, parts, given, strict=True)]
        quantized, *others = zip(*found, strict=True)
        output = torch.cat(quantized, self.split_dim if x.dim() > 2 else -1)
        if indices is not None:
            return output, torch.stack(others[0]).sum()
        return (output, *map(torch.stack, others))
