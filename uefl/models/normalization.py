"""The mean and the deviation that normalize pixels."""

from __future__ import annotations

import torch

from ..errors import UserError


def normalization(
    how: str, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of the pixels on the scale 0-255, ``[C, 1, 1]``, from those of the data on the scale
    0-1.

    Args:
        how: ``standard``, ``imagenet``, ``centred`` or ``raw``.
        mean, std: per channel.

    Raises:
        UserError: ImageNet's for images that are not of three channels.
    """
    channels = len(mean)
    if how == "raw":
        shift, scale = torch.zeros(channels), torch.ones(channels)
    elif how == "centred":
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
