"""CIFAR-10: photographs of ten kinds of things, 3x32x32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ...errors import UserError
from .. import npz
from ..dataset import DataSet, two_parts
from ..images import in_memory
from .base import need_root, source, torchvision_advice

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@source("cifar10")
def cifar10(root: Path | None) -> DataSet:
    """Read CIFAR-10 from ``ROOT/cifar-10-batches-py`` or ``ROOT/cifar10*.npz``.

    The folder is as torchvision stores it, and is read in file order. The .npz is shuffled.
    """
    return read("cifar10", root, CLASSES)


def read(name: str, root: Path | None, classes: tuple[str, ...] = ()) -> DataSet:
    """Read a data set 3x32x32 in file order by torchvision, which checks the published hashes of the files.

    If the root has no such files, an .npz with the name of the data set is read and shuffled.

    Args:
        root: the ``root`` that torchvision's class was given.
        classes: names of the classes of an .npz, which has none.

    Raises:
        UserError: there is no data root, or files are missing or not the published ones.
    """
    from torchvision import datasets

    dataset = getattr(datasets, name.upper())
    files = ",".join(file for file, _ in (*dataset.train_list, *dataset.test_list))
    advice = torchvision_advice(name.upper(), f"{dataset.base_folder}/{{{files}}}")
    root = need_root(root, name.upper(), advice)
    if not (root / dataset.base_folder).exists():
        return npz.find_pool(name, root, f"{name}[!0]*npz", classes, advice)  # cifar100 is not cifar10
    try:
        parts = [dataset(str(root), train=train) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        raise UserError(f"no {name} in {root} ({error}): {advice}") from None
    pixels = torch.from_numpy(np.concatenate([part.data for part in parts])).movedim(3, 1).contiguous()
    labels = np.concatenate([np.asarray(part.targets, np.int64) for part in parts])
    train, test = (len(part.targets) for part in parts)
    images = in_memory(pixels, str(root / dataset.base_folder))
    rows, counts = two_parts(train, test, shuffle=False), {"train": train, "test": test}
    return DataSet(name, images, labels, tuple(parts[0].classes), *rows, parts=counts)
