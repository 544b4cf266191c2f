"""Geometric changes to images as bytes: rotation about the center, resizing to a square, random changes for
training.

torchvision is imported where it is called: its import takes longer than the import of torch, and not every
process needs it.
"""

from __future__ import annotations

import torch


def rotate(images: torch.Tensor, degrees: float, *, legacy_center: bool = False) -> torch.Tensor:
    """Rotate on the same canvas, bilinear, black outside.

    Args:
        images: ``[N, C, H, W]`` uint8, on any device.
        degrees: positive turns counter-clockwise. Multiples of 360 give the images back as they are.
        legacy_center: turn about pixel (W/2, H/2), as the published code does, instead of the image center
            ((W-1)/2, (H-1)/2).

    Returns:
        ``[N, C, H, W]`` uint8, rounded to the nearest value.
    """
    if degrees % 360 == 0:
        return images
    from torchvision.transforms.v2 import InterpolationMode, functional

    height, width = images.shape[-2:]
    # torchvision measures from the corner of the canvas, where the middle of pixel i lies at i + 0.5
    center = [width / 2 + 0.5, height / 2 + 0.5] if legacy_center else None
    turned: torch.Tensor = functional.rotate(images, degrees, InterpolationMode.BILINEAR, center=center)
    return turned


def resize(images: torch.Tensor, size: int | tuple[int, int]) -> torch.Tensor:
    """Resize ``[..., C, H, W]`` uint8 images, bilinear with antialiasing; the aspect ratio is not kept.

    Args:
        images: on any device.
        size: of the square, or (height, width).
    """
    from torchvision.transforms.v2 import InterpolationMode, functional

    resized: torch.Tensor = functional.resize(
        images,
        [size, size] if isinstance(size, int) else list(size),
        InterpolationMode.BILINEAR,
        antialias=True,
    )
    return resized


def augment(images: torch.Tensor, how: str) -> torch.Tensor:
    """Change each image of a batch at random, where the images are: no loop, no round trip through the host.

    Args:
        images: ``[B, C, H, W]`` uint8.
        how: ``none``; ``rotate``: by U(-20, 20) degrees about the center, nearest pixel, black outside;
            ``flip``: left-right, every second one on average.

    Returns:
        ``[B, C, H, W]`` uint8.
    """
    if how == "flip":
        mirrored = torch.rand(len(images)).to(images.device) < 0.5
        return torch.where(mirrored[:, None, None, None], images.flip(3), images)
    if how == "rotate":
        return rotate_each(images, torch.empty(len(images)).uniform_(-20, 20).to(images.device))
    return images


def rotate_each(images: torch.Tensor, degrees: torch.Tensor) -> torch.Tensor:
    """Rotate image b by ``degrees[b]`` counter-clockwise about its center, nearest pixel, black outside;
    uint8 ``[B, C, H, W]``."""
    height, width = images.shape[-2:]
    cos, sin = (f(torch.deg2rad(degrees))[:, None, None] for f in (torch.cos, torch.sin))
    y = torch.arange(height, device=images.device)[:, None] - (height - 1) / 2
    x = torch.arange(width, device=images.device)[None] - (width - 1) / 2
    # where the pixel at (x, y) comes from: rows go down, so counter-clockwise on the screen is this turn of
    # the coordinates
    source_x = (cos * x - sin * y + (width - 1) / 2).round().long()
    source_y = (sin * x + cos * y + (height - 1) / 2).round().long()
    inside = (source_x >= 0) & (source_x < width) & (source_y >= 0) & (source_y < height)
    flat = (
        (source_y * width + source_x)
        .clamp(0, height * width - 1)
        .flatten(1)[:, None]
        .expand(-1, images.shape[1], -1)
    )
    return images.flatten(2).gather(2, flat).view_as(images) * inside[:, None]
