"""Bring the images of a source to the channels and the size of a federation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import UserError
from .images import ImageList, Rows
from .rotate import rotate


@dataclass(frozen=True)
class Preparation:
    """Reads images in one number of channels and one size."""

    channels: int
    image_size: int
    """0: as they are"""
    shape: tuple[int, int, int]
    """(C, H, W) of a prepared image"""

    @classmethod
    def of(cls, sources: Sequence[ImageList], image_size: int) -> Preparation:
        """Return the preparation for images of several sources; they become colour images if one of them is
        in colour.

        Raises:
            UserError: the images differ in size and are not resized.
        """
        channels = max(images.channels for images in sources)
        if image_size:
            return cls(channels, image_size, (channels, image_size, image_size))
        first = sources[0]
        for images in sources:
            images.check_one_size()
            (h, w), (h0, w0) = images.shapes[0].tolist(), first.shapes[0].tolist()
            if (h, w) != (h0, w0):
                pair = f"{images.name(0)} is {w}x{h} and {first.name(0)} is {w0}x{h0}"
                raise UserError(f"{pair}; set image_size to resize all images to one square")
        return cls(channels, 0, (channels, h0, w0))

    def __call__(
        self, images: ImageList, rows: Rows, angle: float = 0.0, *, legacy_center: bool = False
    ) -> torch.Tensor:
        """The images ``[n, C, H, W]`` uint8, resized, then turned by ``angle`` degrees counter-clockwise."""
        pixels = images.read(rows, self.image_size).expand(-1, self.channels, -1, -1).contiguous()
        return rotate(pixels, angle, legacy_center=legacy_center) if len(pixels) else pixels

    def check_memory(self, count: int) -> None:
        """``count`` images must fit into the memory of this machine, all together.

        Raises:
            UserError: they do not.
        """
        needed, there = (
            count * int(np.prod(self.shape)),
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        )
        if needed > there:
            c, h, w = self.shape
            raise UserError(
                f"{count} images of {c} x {h} x {w} take {needed / 1e9:.0f} GB, this machine has"
                f" {there / 1e9:.0f} GB; lower image_size"
            )


class PixelCounts:
    """Count the pixels of each of the 256 values in each channel."""

    def __init__(self, channels: int) -> None:
        self.counts = torch.zeros(channels, 256, dtype=torch.int64)
        """``[channels, 256]``"""

    def add(self, images: torch.Tensor) -> None:
        """Count images ``[N, C, H, W]`` uint8."""
        for c, counts in enumerate(self.counts):
            counts += images[:, c].flatten().bincount(minlength=256)

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the exact mean and standard deviation of each channel, on the scale 0-1."""
        share = self.counts.double() / self.counts.sum(1, keepdim=True)
        values = torch.arange(256, dtype=torch.float64) / 255
        mean = share @ values
        variance = (share * (values - mean[:, None]) ** 2).sum(1)
        std = variance.sqrt().clamp_min(1 / 255)  # one grey level: a constant channel is divided by it
        return tuple(mean.tolist()), tuple(std.tolist())
