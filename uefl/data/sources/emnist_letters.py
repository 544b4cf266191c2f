"""EMNIST letters: 26 handwritten letters, upper and lower case as one class, 1x28x28."""

from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path

import torch

from .. import idx, npz
from ..dataset import DataSet
from ..images import ImageList, Rows
from .base import need_root, source, torchvision_advice

_ADVICE = torchvision_advice(
    "EMNIST",
    "EMNIST/raw/emnist-letters-{train,test}-{images-idx3,labels-idx1}-ubyte.gz",
    'ROOT, "letters", download=True',
)


@source("emnist_letters")
def emnist_letters(root: Path | None) -> DataSet:
    """Read EMNIST letters from ``ROOT/EMNIST/raw`` or ``ROOT/emnist_letters*.npz``.

    The folder is as torchvision stores it. Images are upright and labels start at 0.

    The published files hold the letters transposed and the test letters sorted; here they are upright,
    dealt in a fixed random order.
    """
    root, letters = need_root(root, "EMNIST", _ADVICE), tuple(string.ascii_uppercase)
    raw = root / "EMNIST" / "raw"
    if not raw.exists():
        return npz.find_pool("emnist_letters", root, "emnist_letters*.npz", letters, _ADVICE)
    stems = ("emnist-letters-train", "emnist-letters-test")
    table = idx.read("emnist_letters", raw, stems, letters, _ADVICE, first_label=1, shuffle=True)
    assert isinstance(table.images, ImageList)
    return replace(table, images=_upright(table.images))


def _upright(images: ImageList) -> ImageList:
    def read(rows: Rows, size: int) -> torch.Tensor:
        return images.read(rows, size).transpose(2, 3).contiguous()

    return replace(images, read=read, shapes=images.shapes[:, ::-1])
