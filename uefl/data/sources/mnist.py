"""MNIST: handwritten digits, 1x28x28."""

from __future__ import annotations

from pathlib import Path

from .. import idx
from ..dataset import DataSet, numbers
from .base import source


@source("mnist")
def mnist(root: Path | None) -> DataSet:
    """Read MNIST from ``ROOT/MNIST/raw`` or ``ROOT/mnist*.npz``.

    The folder is as torchvision stores it, and is read in file order. The .npz is shuffled.
    """
    return idx.read("mnist", root, "MNIST", numbers(10))
