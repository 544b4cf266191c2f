"""A silo: the images of one client, as bytes, in its three splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..federation import Split

__all__ = ["Federation", "Silo", "Split"]


@dataclass(frozen=True)
class Silo:
    """One client's data: ``train`` is trained on, ``holdout`` steers the extension, ``test`` is only reported."""

    name: str
    train: Split
    holdout: Split
    test: Split


@dataclass(frozen=True)
class Federation:
    """All silos of a run, of one image shape and one list of classes."""

    silos: tuple[Silo, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    """per channel, on the scale 0-1, over the training images of the data set"""
    std: tuple[float, ...]
    notes: tuple[str, ...] = ()
    """what the user should know about the silos"""

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that a run depends on."""
        for silo in self.silos:
            for split in (silo.train, silo.holdout, silo.test):
                yield from (split.images, split.labels)

    def describe(self) -> str:
        """One line: how many silos, images of each split, their shape, the classes."""
        train, holdout, test = (sum(len(getattr(silo, part)) for silo in self.silos) for part in ("train", "holdout", "test"))
        names = ", ".join(self.classes[:12]) + (", ..." if len(self.classes) > 12 else "")
        shape = " x ".join(map(str, self.image_shape))
        images = f"{train} training, {holdout} held out, {test} test images of {shape}"
        return f"{len(self.silos)} silos: {images}; {len(self.classes)} classes: {names}"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        c, h, w = self.silos[0].train.images.shape[1:]
        return c, h, w
