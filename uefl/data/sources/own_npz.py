"""An .npz of the user's: own clients, or a data set to be dealt."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...errors import UserError
from .. import npz
from ..dataset import DataSet, classes_of
from ..pixels import as_labels

_OWN = ("images", "labels", "silo")


def read(path: Path) -> DataSet:
    """Read images and integer labels ``[N]`` from an .npz.

    Images follow the rules of :func:`uefl.data.pixels.as_images`. Labels count from 0.

    Either the user's own clients, as arrays ``images``, ``labels``, ``silo`` (``[N]``, names or integers) and
    optionally ``test`` (``[N]`` bool); or a data set to be dealt, as ``x_train``, ``y_train``, ``x_test``,
    ``y_test``: see :func:`uefl.data.npz.pool`.

    Raises:
        UserError: the file is not an .npz, or an array is missing or has another type or length.
    """
    arrays = npz.read(path, (*_OWN, "test", *npz.POOL))
    if set(_OWN) <= set(arrays):
        return _silos(path, arrays)
    if not set(npz.POOL) <= set(arrays):
        raise UserError(
            f"{path} holds {npz.held(path)}; expected either {', '.join(_OWN)} (and test), or"
            f" {', '.join(npz.POOL)}"
        )
    return npz.pool(str(path), path, arrays)


def _silos(path: Path, arrays: npz.Arrays) -> DataSet:
    images = npz.images(path, arrays, "images")
    labels = as_labels(arrays["labels"], images.count, f"{path}: labels").numpy()
    owners, test, count = arrays["silo"], arrays.get("test"), images.count
    if owners.dtype.kind not in "iuSU" or owners.shape != (count,):
        raise UserError(
            f"{path}: expected silo as {count} names or integers, got {owners.dtype} {owners.shape}"
        )
    if test is not None and (test.dtype != np.bool_ or test.shape != (count,)):
        raise UserError(f"{path}: expected test as {count} booleans, got {test.dtype} {test.shape}")
    names, group_of = np.unique(owners, return_inverse=True)
    groups = tuple(_text(name) for name in names)
    for_test = np.zeros(count, bool) if test is None else test.astype(bool)
    return DataSet(
        str(path),
        images,
        labels,
        classes_of([(f"{path}: labels", labels)]),
        np.flatnonzero(~for_test),
        np.flatnonzero(for_test),
        groups,
        group_of.astype(np.int64),
        frozenset(groups) if test is None else frozenset(),
        parts={"images": count},
    )


def _text(name: np.generic) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
