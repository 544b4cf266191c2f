"""FashionMNIST: articles of clothing, 1x28x28."""

from __future__ import annotations

from pathlib import Path

from .. import idx, npz
from ..dataset import DataSet
from .base import need_root, source, torchvision_advice

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
    advice = torchvision_advice(
        "FashionMNIST", "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz"
    )
    root = need_root(root, "FashionMNIST", advice)
    raw = root / "FashionMNIST" / "raw"
    if not raw.exists():
        return npz.find_pool("fashion_mnist", root, "fashion_mnist*.npz", CLASSES, advice)
    return idx.read("fashion_mnist", raw, ("train", "t10k"), CLASSES, advice)
