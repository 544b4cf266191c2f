"""CIFAR-10: photographs of ten kinds of things, 3x32x32."""

from __future__ import annotations

from pathlib import Path

from .. import cifar
from ..dataset import DataSet
from .base import source

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@source("cifar10")
def cifar10(root: Path | None) -> DataSet:
    """Read CIFAR-10 from ``ROOT/cifar-10-batches-py`` as torchvision stores it, in file order, or
    ``ROOT/cifar10*.npz``, shuffled."""
    return cifar.read("cifar10", root, CLASSES)
