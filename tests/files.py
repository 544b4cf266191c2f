"""Files of the published formats, small and with random pixels."""

from __future__ import annotations

import gzip
import hashlib
import pickle
from pathlib import Path

import numpy as np


def write_idx(
    raw: Path, stems: tuple[str, str], counts: tuple[int, int], *, classes: int = 10, first_label: int = 0
) -> None:
    """Write a data set in the format of MNIST: 28 x 28 pixels, labels 0, 1, 2, ... in turn."""
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for stem, count in zip(stems, counts, strict=True):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        header = np.array([0x803, count, 28, 28], ">i4").tobytes()
        (raw / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
        labels = (np.arange(count) % classes + first_label).astype(np.uint8)
        (raw / f"{stem}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(np.array([0x801, count], ">i4").tobytes() + labels.tobytes())
        )


def write_pickle(path: Path, content: object) -> str:
    """Write a pickle, and return its MD5, which torchvision checks."""
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()
