"""Normalize inputs: subtract a mean and divide by a deviation."""

from __future__ import annotations

import torch

from ..data.inputs import IMAGES, Inputs
from ..errors import UserError


def normalization(
    how: str, mean: tuple[float, ...], std: tuple[float, ...], inputs: Inputs = IMAGES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the deviation to normalize with.

    For images both are ``[C, 1, 1]`` float32 on the scale 0-255, from the values of the data on the scale
    0-1. For columns both are ``[F]`` float64, and for tokens both are empty.

    Args:
        how: ``standard``, ``imagenet``, ``centered`` or ``raw``.
        mean, std: per channel or per column.
        inputs: kind of the inputs.

    Raises:
        UserError: ``how`` needs images, or images of three channels.
    """
    if inputs.kind != "images":
        if how in ("imagenet", "centered"):
            raise UserError(
                f"key 'data.normalize': {how!r} is for images, and the data are {inputs.kind}; use 'standard'"
                " or 'raw'"
            )
        shift, scale = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
        return (shift, scale) if how == "standard" else (torch.zeros_like(shift), torch.ones_like(scale))
    channels = len(mean)
    if how == "raw":
        shift, scale = torch.zeros(channels), torch.ones(channels)
    elif how == "centered":
        shift, scale = torch.full((channels,), 127.5), torch.full((channels,), 127.5)
    elif how == "imagenet":
        if channels != 3:
            raise UserError(
                f"key 'data.normalize': 'imagenet' is for images of 3 channels, these have {channels}; use"
                " 'standard'"
            )
        shift, scale = 255 * torch.tensor([0.485, 0.456, 0.406]), 255 * torch.tensor([0.229, 0.224, 0.225])
    else:
        shift, scale = 255 * torch.tensor(mean), 255 * torch.tensor(std)
    return shift[:, None, None], scale[:, None, None]


def normalized(inputs: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Return inputs as a network takes them.

    Images ``[B, C, H, W]`` become float32, channels-last. Columns ``[B, F]`` become float32. Tokens stay
    integers. The result is new memory, also of tokens: a network may change its input.

    Args:
        inputs: images of uint8 or floats on the scale 0-255, columns, or tokens.
        mean, std: of :func:`normalization`.
    """
    if not mean.numel():
        return inputs.clone()
    found = (inputs - mean) / std
    return found.contiguous(memory_format=torch.channels_last) if found.dim() == 4 else found.float()


def blank(count: int, shape: tuple[int, ...], inputs: Inputs = IMAGES) -> torch.Tensor:
    """Return inputs of zeros, of the dtype that a client has them in."""
    dtype = {"images": torch.uint8, "columns": torch.float64, "tokens": torch.int64}[inputs.kind]
    return torch.zeros(count, *shape, dtype=dtype)
