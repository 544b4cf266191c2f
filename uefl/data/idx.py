"""IDX files of images and labels, as MNIST and its relatives are published and as torchvision stores them."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..errors import UserError
from ..paths import read_bytes
from .dataset import DataSet, two_parts
from .images import in_memory

_BYTES = b"\0\0\x08"
"""the first bytes of an IDX file whose values are unsigned bytes; the number of dimensions follows"""


def read(
    name: str,
    raw: Path,
    stems: tuple[str, str],
    classes: tuple[str, ...],
    advice: str,
    *,
    first_label: int = 0,
    shuffle: bool = False,
) -> DataSet:
    """Read a data set of two parts.

    They are ``STEM-images-idx3-ubyte`` and ``STEM-labels-idx1-ubyte``, with or without ``.gz``.

    The files are only read, never downloaded or unpacked.

    Args:
        stems: first parts of the file names, for the training and the test part.
        advice: how to get the files, for messages.
        first_label: the label of the first class in the files.
        shuffle: deal the images in a fixed random order, for files that are sorted by class.

    Raises:
        UserError: files are missing, damaged, or do not belong to one data set.
    """
    pixels, labels = [], []
    for stem in stems:
        x, y = (_array(raw / f"{stem}-{part}", advice) for part in ("images-idx3-ubyte", "labels-idx1-ubyte"))
        if x.ndim != 3 or y.shape != x.shape[:1]:
            raise UserError(
                f"{raw}: {stem} images {x.shape} and labels {y.shape} do not belong together; {advice}"
            )
        if not len(x) or int(y.min()) < first_label or int(y.max()) >= first_label + len(classes):
            raise UserError(
                f"{raw}: {stem} has labels outside {first_label} to {first_label + len(classes) - 1}, or"
                f" none; {advice}"
            )
        pixels.append(x)
        labels.append(y.astype(np.int64) - first_label)
    if pixels[0].shape[1:] != pixels[1].shape[1:]:
        raise UserError(f"{raw}: images of {stems[0]} and {stems[1]} differ in size; {advice}")
    train, test = two_parts(len(pixels[0]), len(pixels[1]), shuffle=shuffle)
    images = in_memory(torch.from_numpy(np.concatenate(pixels))[:, None], str(raw))
    parts = {"train": len(train), "test": len(test)}
    return DataSet(name, images, np.concatenate(labels), classes, train, test, parts=parts)


def _array(path: Path, advice: str) -> npt.NDArray[np.uint8]:
    compressed = path.with_name(path.name + ".gz")
    found = compressed if compressed.exists() else path
    try:
        data = read_bytes(found)
        data = gzip.decompress(data) if found is compressed else data
        if data[:3] != _BYTES:
            raise ValueError("no IDX file of bytes")
        begin = 4 + 4 * data[3]
        return np.frombuffer(data, np.uint8, offset=begin).reshape(np.frombuffer(data[4:begin], ">u4"))
    except FileNotFoundError:
        raise UserError(f"no {compressed}: {advice}") from None
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise UserError(f"cannot read {found} ({error}): {advice}") from None
