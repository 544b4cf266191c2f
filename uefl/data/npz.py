"""Arrays of images and labels in .npz files."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..errors import UserError, first_line, listed
from ..paths import check_file, memory, other_capitals
from .dataset import DataSet, classes_of, two_parts
from .images import ImageList, in_memory
from .pixels import as_images, as_labels

Arrays = dict[str, npt.NDArray[np.generic]]

POOL = ("x_train", "y_train", "x_test", "y_test")
"""names of the arrays of a data set that is dealt"""


def read(path: Path, names: tuple[str, ...]) -> Arrays:
    """Return the named arrays that an .npz holds.

    Raises:
        UserError: the file cannot be read, or holds Python objects.
    """
    check_file(path, "the data", "expected an .npz, as numpy.savez writes it")
    try:
        with zipfile.ZipFile(path) as file:  # np.load would read a file of any other format as a pickle
            _check_sizes(file, names)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files if name in names}
    except MemoryError:
        raise UserError(f"{path}: its arrays do not fit into the memory of this process") from None
    except Exception as error:  # a damaged file may raise any error of zipfile and of its decompressors
        raise UserError(
            f"cannot read {path} ({first_line(error)}); expected an .npz of plain arrays, as"
            " numpy.savez writes it"
        ) from None


def _check_sizes(file: zipfile.ZipFile, names: tuple[str, ...]) -> None:
    """Refuse a repeated name, and arrays that claim more than the stored bytes or the memory."""
    total, seen = 0, set[str]()
    for info in file.infolist():
        name = info.filename.removesuffix(".npy")
        if name not in names:
            continue
        if name in seen:  # np.load would take the last array of this name
            raise ValueError(f"it has two arrays {name}")
        seen.add(name)
        with file.open(info) as stored:
            version = np.lib.format.read_magic(stored)
            readers = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }
            if version not in readers:
                raise ValueError(f"{name} has version {version} of the format")
            shape, _, dtype = readers[version](stored)
            size = math.prod(shape) * dtype.itemsize
            if stored.tell() + size != info.file_size and not dtype.hasobject:  # np.load refuses these values
                raise ValueError(
                    f"{name} says that it has {size} bytes, and {info.file_size - stored.tell()} are stored"
                )
        total += size
    if total > memory():
        raise MemoryError


def held(path: Path) -> str:
    """Return the names of all arrays of a readable .npz, for a message."""
    with zipfile.ZipFile(path) as file:
        return listed(sorted(name.removesuffix(".npy") for name in file.namelist())) or "nothing"


def images(path: Path, arrays: Mapping[str, npt.NDArray[np.generic]], x: str) -> ImageList:
    """Read images from one array, by the rules of :func:`uefl.data.pixels.as_images`.

    Raises:
        UserError: the array has another type or shape, or is empty.
    """
    values, kinds = as_images(arrays[x], f"{path}: {x}")
    return in_memory(values, str(path), kinds=kinds)


def pool(name: str, path: Path, arrays: Arrays, classes: tuple[str, ...] = ()) -> DataSet:
    """Read a data set to deal from ``x_train``, ``y_train``, ``x_test`` and ``y_test``.

    The images are dealt in a random order that is the same for every run, because such files are often sorted
    by class.

    Args:
        classes: names of the classes; empty: the numbers up to the highest label.

    Raises:
        UserError: an array has another type or length, the shapes of the parts differ, or a label is out of
            range.
    """
    (x, kinds), (x_test, test_kinds) = (
        as_images(arrays[name], f"{path}: {name}") for name in ("x_train", "x_test")
    )
    y = as_labels(arrays["y_train"], len(x), f"{path}: y_train").numpy()
    y_test = as_labels(arrays["y_test"], len(x_test), f"{path}: y_test").numpy()
    if x.shape[1:] != x_test.shape[1:]:
        raise UserError(
            f"{path}: images of x_train and x_test differ in shape: {arrays['x_train'].shape} and"
            f" {arrays['x_test'].shape}"
        )
    known = classes_of([(f"{path}: y_train", y), (f"{path}: y_test", y_test)], classes)
    train, test = two_parts(len(x), len(x_test), shuffle=True)
    images = in_memory(torch.cat([x, x_test]), str(path), kinds=kinds + test_kinds)
    parts = {"train": len(x), "test": len(x_test)}
    return DataSet(name, images, np.concatenate([y, y_test]), known, train, test, parts=parts)


def find_pool(name: str, root: Path, pattern: str, classes: tuple[str, ...], advice: str) -> DataSet:
    """Read a data set from the one .npz in the data root that matches a pattern.

    Raises:
        UserError: there is no such root, or the root has no such file or several; the message states the
            expected content.
    """
    if not root.is_dir():
        raise UserError(
            f"no folder {root}{other_capitals(root)}, which was given as the data root; for {name}: {advice}"
        )
    found = sorted(root.glob(pattern))
    if not found:
        raise UserError(
            f"no {name} in {root}: {advice}, or put there an .npz named {name}*.npz with {', '.join(POOL)}"
        )
    if len(found) > 1:
        raise UserError(
            f"{root} holds {listed(path.name for path in found)}; keep one of them, or give the path of"
            " one as source"
        )
    arrays = read(found[0], POOL)
    if not set(POOL) <= set(arrays):
        raise UserError(f"{found[0]} holds {held(found[0])}; expected {', '.join(POOL)}")
    table = pool(name, found[0], arrays, classes)
    note = (
        f"{name} is read from {found[0].name}: {table.parts['train']} training and {table.parts['test']} test"
        " images"
    )
    return replace(table, notes=(note,))
