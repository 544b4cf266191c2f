"""Geometric transforms of uint8 images: rotation about the center, resizing, and random augmentation.

Functions import torchvision when they are called. Its import takes longer than the import of torch, and not
every process needs it.
"""

from __future__ import annotations

import torch


def rotate(images: torch.Tensor, degrees: float, *, legacy_center: bool = False) -> torch.Tensor:
    """Rotate images with bilinear interpolation, in their size, with black pixels from outside.

    Args:
        images: ``[N, C, H, W]`` uint8, on any device.
        degrees: the angle; positive is counter-clockwise. For multiples of 360, the result is ``images``
            itself.
        legacy_center: rotate about pixel (W/2, H/2), as the published code does, instead of the image center
            ((W-1)/2, (H-1)/2).

    Returns:
        ``[N, C, H, W]`` uint8, rounded to the nearest value.
    """
    if degrees % 360 == 0:
        return images
    from torchvision.transforms.v2 import InterpolationMode, functional

    height, width = images.shape[-2:]
    # torchvision measures from the corner of the image: the middle of pixel i is at i + 0.5
    center = [width / 2 + 0.5, height / 2 + 0.5] if legacy_center else None
    rotated: torch.Tensor = functional.rotate(images, degrees, InterpolationMode.BILINEAR, center=center)
    return rotated


def resize(images: torch.Tensor, size: int | tuple[int, int]) -> torch.Tensor:
    """Resize images with bilinear interpolation and antialiasing, to any aspect ratio.

    Args:
        images: ``[..., C, H, W]`` uint8, on any device.
        size: the side of a square, or (height, width).
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
    """Transform each image of a batch at random, on the device of the images.

    All draws are from torch's generator on the CPU, on every device.

    Args:
        images: ``[B, C, H, W]`` uint8.
        how: ``none``; ``rotate``: see :func:`rotate_each`, with angles drawn from U(-20, 20) degrees;
            ``flip``: mirror each image left-right with probability 1/2; ``photo``: see :func:`photo`.

    Returns:
        ``[B, C, H, W]`` uint8.
    """
    if how == "flip":
        mirrored = torch.rand(len(images)).to(images.device) < 0.5
        return torch.where(mirrored[:, None, None, None], images.flip(3), images)
    if how == "rotate":
        return rotate_each(images, torch.empty(len(images)).uniform_(-20, 20).to(images.device))
    return photo(images) if how == "photo" else images


def photo(images: torch.Tensor) -> torch.Tensor:
    """Crop and flip each image at random, and change its colors: of a gray image, only light and contrast.

    Source: FedSR's code for PACS, where FedIIR's has the same.

    Args:
        images: ``[B, C, H, W]`` uint8, C = 1 or 3.

    Returns:
        ``[B, C, H, W]`` uint8.
    """
    from torchvision.transforms import v2

    change = v2.Compose(
        [
            v2.RandomResizedCrop(images.shape[-2:], scale=(0.7, 1.0)),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.3, 0.3, 0.3, 0.3),
            v2.RandomGrayscale(),
        ]
    )
    changed = torch.empty_like(images)
    for image, place in zip(images, changed, strict=True):  # a call makes one draw for all its images
        place.copy_(change(image))
    return changed


def rotate_each(images: torch.Tensor, degrees: torch.Tensor) -> torch.Tensor:
    """Rotate each image about its center, with the nearest pixel, or black from outside.

    Args:
        images: ``[B, C, H, W]`` uint8.
        degrees: ``[B]``, the angle of each image; positive is counter-clockwise.

    Returns:
        ``[B, C, H, W]`` uint8.
    """
    height, width = images.shape[-2:]
    cos, sin = (f(torch.deg2rad(degrees))[:, None, None] for f in (torch.cos, torch.sin))
    y = torch.arange(height, device=images.device)[:, None] - (height - 1) / 2
    x = torch.arange(width, device=images.device)[None] - (width - 1) / 2
    # the source of the pixel at (x, y); the y axis points down, so these signs rotate the image
    # counter-clockwise on the screen
    source_x = (cos * x - sin * y + (width - 1) / 2).round().long()
    source_y = (sin * x + cos * y + (height - 1) / 2).round().long()
    inside = (source_x >= 0) & (source_x < width) & (source_y >= 0) & (source_y < height)
    source = (source_y * width + source_x).clamp(0, height * width - 1).flatten(1)
    source = source[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, source).view_as(images) * inside[:, None]
