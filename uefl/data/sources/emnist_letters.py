"""EMNIST letters: 26 handwritten letters, upper and lower case as one class, 1x28x28."""

from __future__ import annotations

import string
from pathlib import Path

from .. import idx
from ..dataset import DataSet
from .base import source


@source("emnist_letters")
def emnist_letters(root: Path | None) -> DataSet:
    """Read EMNIST letters from ``ROOT/EMNIST/raw`` or ``ROOT/emnist_letters*.npz``.

    The folder is as torchvision stores it. Images are upright and labels start at 0.

    The published files hold the letters transposed and the test letters sorted; here they are upright,
    dealt in a fixed random order.
    """
    return idx.read(
        "emnist_letters",
        root,
        "EMNIST",
        tuple(string.ascii_uppercase),
        prefix="emnist-letters-",
        parts=("train", "test"),
        arguments='ROOT, "letters", download=True',
        first_label=1,
        transposed=True,
    )
