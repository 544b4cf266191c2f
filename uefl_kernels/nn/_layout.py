"""Where the channels of an input are, and what of it is padding."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._checks import check_tensor


class Layout(NamedTuple):
    """How a layer named ``layer`` takes its vectors of ``dim``: last, second, or as the channels of images or volumes."""

    layer: str
    dim: int
    channel_last: bool = True
    spatial: int = 0  # dimensions of a feature map; 0 for sequences

    @property
    def second(self) -> bool:
        """Whether channels come second where there is more than one other dimension."""
        return self.spatial > 0 or not self.channel_last

    def check(self, x: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Raise TypeError or ValueError for an input or a mask that does not fit."""
        check_tensor(self.layer, "x", x)
        second = self.second and x.dim() > 2
        expected = f"[..., {self.dim}]"
        if self.spatial:
            expected = f"[B, {self.dim}, {'H, W' if self.spatial == 2 else 'L, H, W'}]"
        elif second:
            expected = f"[B, {self.dim}, ...]"
        if x.dim() < 2 or (self.spatial and x.dim() != 2 + self.spatial) or x.shape[1 if second else -1] != self.dim:
            raise ValueError(f"{self.layer}: x must have shape {expected}, got {list(x.shape)}")
        if mask is None:
            return
        if self.spatial:
            raise ValueError(f"{self.layer}: mask is for sequences; images (accept_image_fmap=True) take none")
        check_tensor(self.layer, "mask", mask, (torch.bool,))
        shape = [*x.shape[:1], *x.shape[2:]] if second else [*x.shape[:-1]]
        if list(mask.shape) != shape:
            raise ValueError(f"{self.layer}: mask must have shape {shape} for x {list(x.shape)}, got {list(mask.shape)}")

    def mask_of(self, x: torch.Tensor, mask: torch.Tensor | None, lens: torch.Tensor | None) -> torch.Tensor | None:
        """The mask, or that of the lengths ``[B]`` of the sequences."""
        if lens is None:
            return mask
        if mask is not None:
            raise ValueError(f"{self.layer}: mask and lens say the same; give one of them")
        check_tensor(self.layer, "lens", lens, (torch.int64, torch.int32))
        if x.dim() != 3 or self.spatial or lens.shape != x.shape[:1]:
            raise ValueError(
                f"{self.layer}: lens must have shape [B] for x of three dimensions, got {list(lens.shape)} for {list(x.shape)}"
            )
        length = x.shape[-1 if self.second else 1]
        return torch.arange(length, device=x.device) < lens.unsqueeze(-1)

    def inward(self, x: torch.Tensor) -> torch.Tensor:
        """Channels last."""
        return x.movedim(1, -1) if self.second and x.dim() > 2 else x

    def outward(self, x: torch.Tensor, given: int) -> torch.Tensor:
        """Channels where an input of ``given`` dimensions has them; dimensions that x has beyond those come last."""
        return x.movedim(-1, 1) if self.second and given > 2 else x
