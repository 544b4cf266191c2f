"""Rotated MNIST: six domains of digits, turned by 0, 15, 30, 45, 60 and 75 degrees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ..dataset import DataSet, fixed_order
from .base import source
from .mnist import mnist

ANGLES = (0, 15, 30, 45, 60, 75)


@source("rotated_mnist")
def rotated_mnist(root: Path | None) -> DataSet:
    """Read all images of MNIST, training and test, dealt in turn to six domains.

    They are shuffled once in a fixed order. The files are the ones of ``mnist``.

    Source: the protocol of FedIIR (Guo et al., ICML 2023). Its domains share no image.
    """
    table = mnist(root)
    order = fixed_order(len(table.labels))
    group_of = np.empty(len(order), np.int64)
    group_of[order] = np.arange(len(order)) % len(ANGLES)
    groups = tuple(f"rotated-{angle:02d}" for angle in ANGLES)
    angles = dict(zip(groups, map(float, ANGLES), strict=True))
    return replace(
        table,
        name="rotated_mnist",
        train=order,
        test=None,
        groups=groups,
        group_of=group_of,
        undivided=frozenset(groups),
        angles=angles,
    )
