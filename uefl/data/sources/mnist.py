"""MNIST: handwritten digits, 1x28x28."""

from __future__ import annotations

from pathlib import Path

from .. import idx, npz
from ..dataset import DataSet, numbers
from .base import need_root, source, torchvision_advice


@source("mnist")
def mnist(root: Path | None) -> DataSet:
    """Read MNIST from ``ROOT/MNIST/raw`` or ``ROOT/mnist*.npz``.

    The folder is as torchvision stores it, and is read in file order. The .npz is shuffled.
    """
    advice = torchvision_advice("MNIST", "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz")
    root = need_root(root, "MNIST", advice)
    raw = root / "MNIST" / "raw"
    if not raw.exists():
        return npz.find_pool("mnist", root, "mnist*.npz", numbers(10), advice)
    return idx.read("mnist", raw, ("train", "t10k"), numbers(10), advice)
