"""IDX files of images and labels, as MNIST and its relatives are published and as torchvision stores them."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..errors import UserError
from ..paths import read_bytes
from . import npz
from .dataset import DataSet, two_parts
from .images import ImageList, Rows, in_memory
from .sources.base import need_root, torchvision_advice

_BYTES = b"\0\0\x08"
"""the first bytes of an IDX file whose values are unsigned bytes; the number of dimensions follows"""


def read(
    name: str,
    root: Path | None,
    folder: str,
    classes: tuple[str, ...],
    *,
    prefix: str = "",
    parts: tuple[str, str] = ("train", "t10k"),
    arguments: str = "ROOT, download=True",
    first_label: int = 0,
    transposed: bool = False,
) -> DataSet:
    """Read a data set of two parts from ``ROOT/FOLDER/raw``, or without this folder from ``ROOT/NAME*.npz``.

    The parts are ``PREFIXPART-images-idx3-ubyte`` and ``PREFIXPART-labels-idx1-ubyte``, with or without
    ``.gz``. The files are only read, never downloaded or unpacked.

    Args:
        folder: the folder, which has the name of torchvision's class.
        prefix, parts: the file names begin with them, for the training and the test part.
        arguments: arguments of torchvision's class that get the files, for messages.
        first_label: the label of the first class in the files.
        transposed: whether the files hold the images transposed, and sorted by class. Then the images are
            dealt in a fixed random order.

    Raises:
        UserError: files are missing, damaged, or do not belong to one data set.
    """
    files = f"{folder}/raw/{prefix}{{{','.join(parts)}}}-{{images-idx3,labels-idx1}}-ubyte.gz"
    advice = torchvision_advice(folder, files, arguments)
    root = need_root(root, folder, advice)
    raw = root / folder / "raw"
    if not raw.exists():
        return npz.find_pool(name, root, f"{name}*.npz", classes, advice)
    stems, pixels, labels = [prefix + part for part in parts], [], []
    for stem in stems:
        x, y = (_array(raw / f"{stem}-{part}", advice) for part in ("images-idx3-ubyte", "labels-idx1-ubyte"))
        if x.ndim != 3 or y.shape != x.shape[:1]:
            raise UserError(
                f"{raw}: {stem} images {x.shape} and labels {y.shape} do not belong together; {advice}"
            )
        if int(y.min()) < first_label or int(y.max()) >= first_label + len(classes):
            raise UserError(
                f"{raw}: {stem} has labels outside {first_label} to {first_label + len(classes) - 1};"
                f" {advice}"
            )
        pixels.append(x)
        labels.append(y.astype(np.int64) - first_label)
    if pixels[0].shape[1:] != pixels[1].shape[1:]:
        raise UserError(f"{raw}: images of {stems[0]} and {stems[1]} differ in size; {advice}")
    train, test = two_parts(len(pixels[0]), len(pixels[1]), shuffle=transposed)
    images = in_memory(torch.from_numpy(np.concatenate(pixels))[:, None], str(raw))
    images = _upright(images) if transposed else images
    counts = {"train": len(train), "test": len(test)}
    return DataSet(name, images, np.concatenate(labels), classes, train, test, parts=counts)


def _upright(images: ImageList) -> ImageList:
    def read(rows: Rows, size: int) -> torch.Tensor:
        return images.read(rows, size).transpose(2, 3).contiguous()

    return replace(images, read=read, shapes=images.shapes[:, ::-1])


def _array(path: Path, advice: str) -> npt.NDArray[np.uint8]:
    compressed = path.with_name(path.name + ".gz")
    found = compressed if compressed.exists() else path
    try:
        data = read_bytes(found)
        data = gzip.decompress(data) if found is compressed else data
        begin = 4 + 4 * data[3]
        if data[:3] != _BYTES or len(data) <= begin:
            raise ValueError("no IDX file with bytes")
        return np.frombuffer(data, np.uint8, offset=begin).reshape(np.frombuffer(data[4:begin], ">u4"))
    except FileNotFoundError:
        raise UserError(f"no {compressed}: {advice}") from None
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise UserError(f"cannot read {found} ({error}): {advice}") from None
