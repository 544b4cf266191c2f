"""CIFAR-100: photographs of a hundred kinds of things, 3x32x32."""

from __future__ import annotations

from pathlib import Path

from ..dataset import DataSet
from .base import source
from .cifar10 import read


@source("cifar100")
def cifar100(root: Path | None) -> DataSet:
    """Read CIFAR-100 from ``ROOT/cifar-100-python`` or ``ROOT/cifar100*.npz``.

    The folder is as torchvision stores it, and is read in file order. The .npz is shuffled.
    """
    return read("cifar100", root)
