"""MNIST: handwritten digits, 1x28x28."""

from __future__ import annotations

from pathlib import Path

from .. import idx
from ..table import Table, numbers
from .base import need_root, source, torchvision_advice


@source("mnist")
def mnist(root: Path | None) -> Table:
    """MNIST in file order, from ``ROOT/MNIST/raw`` as torchvision stores it."""
    advice = torchvision_advice("MNIST")
    return idx.read("mnist", need_root(root, "MNIST", advice) / "MNIST" / "raw", ("train", "t10k"), numbers(10), advice)
