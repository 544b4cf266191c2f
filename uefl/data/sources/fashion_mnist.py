"""FashionMNIST: articles of clothing, 1x28x28."""

from __future__ import annotations

from pathlib import Path

from .. import idx
from ..dataset import DataSet
from .base import source

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


@source("fashion_mnist")
def fashion_mnist(root: Path | None) -> DataSet:
    """Read FashionMNIST from ``ROOT/FashionMNIST/raw`` or ``ROOT/fashion_mnist*.npz``.

    The folder is as torchvision stores it, and is read in file order. The .npz is shuffled.
    """
    return idx.read("fashion_mnist", root, "FashionMNIST", CLASSES)
