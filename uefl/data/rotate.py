"""Geometric changes to images as bytes: rotation about the centre and resizing to a square."""

from __future__ import annotations

import torch
from torchvision.transforms.v2 import InterpolationMode, functional


def rotate(images: torch.Tensor, degrees: float, *, legacy_center: bool = False) -> torch.Tensor:
    """Rotate on the same canvas, bilinear, black outside.

    Args:
        images: ``[N, C, H, W]`` uint8, on any device.
        degrees: positive turns counter-clockwise. Multiples of 360 give the images back as they are.
        legacy_center: turn about pixel (W/2, H/2), as the published code does, instead of the image centre ((W-1)/2, (H-1)/2).

    Returns:
        ``[N, C, H, W]`` uint8, rounded to the nearest value.
    """
    if degrees % 360 == 0:
        return images
    height, width = images.shape[-2:]
    # torchvision measures from the corner of the canvas, where the middle of pixel i lies at i + 0.5
    center = [width / 2 + 0.5, height / 2 + 0.5] if legacy_center else None
    turned: torch.Tensor = functional.rotate(images, degrees, InterpolationMode.BILINEAR, center=center)
    return turned


def resize(images: torch.Tensor, size: int) -> torch.Tensor:
    """Resize ``[..., C, H, W]`` uint8 images to ``[..., C, size, size]``, bilinear with antialiasing; the aspect ratio is not kept."""
    resized: torch.Tensor = functional.resize(images, [size, size], InterpolationMode.BILINEAR, antialias=True)
    return resized
