"""IDX files of images and labels, as MNIST and its relatives are published and as torchvision stores them."""

from __future__ import annotations

import gzip
import shutil
import zlib
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import numpy.typing as npt
import torch

from ..errors import UserError
from .dataset import DataSet, two_parts
from .images import in_memory


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
    from torchvision.datasets.mnist import read_sn3_pascalvincent_tensor

    compressed = path.with_name(path.name + ".gz")
    found = compressed if compressed.exists() else path
    try:
        if found is path:
            tensor = read_sn3_pascalvincent_tensor(str(path))
        else:  # torchvision reads uncompressed files only
            with gzip.open(compressed) as packed, NamedTemporaryFile(suffix=path.name) as plain:
                shutil.copyfileobj(packed, plain)
                plain.flush()
                tensor = read_sn3_pascalvincent_tensor(plain.name)
        if tensor.dtype != torch.uint8:
            raise ValueError(f"its values are {tensor.dtype}, expected bytes")
        values: npt.NDArray[np.uint8] = tensor.numpy()
        return values
    except FileNotFoundError:
        raise UserError(f"no {compressed}: {advice}") from None
    except _DAMAGED as error:
        raise UserError(f"cannot read {found} ({error or 'no IDX file'}): {advice}") from None


# torchvision checks the header by assertions and a table of types
_DAMAGED = (OSError, EOFError, zlib.error, ValueError, AssertionError, LookupError, RuntimeError)
