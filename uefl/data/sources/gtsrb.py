"""GTSRB: German traffic signs of 43 kinds, in color."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np

from ...errors import UserError
from ...paths import read_text
from .. import npz
from ..dataset import DataSet, numbers, two_parts
from ..folder_listing import subfolders, visible
from ..images import on_disk
from .base import need_root, source

_ADVICE = (
    'run torchvision.datasets.GTSRB(ROOT, split, download=True) for the splits "train" and "test", and give'
    " that ROOT as --data-root or in UEFL_DATA; expected ROOT/gtsrb/GTSRB/Training/CLASS/*.ppm,"
    " ROOT/gtsrb/GTSRB/Final_Test/Images/*.ppm and ROOT/gtsrb/GT-final_test.csv"
)

PUBLISHED = (26640, 12630)
"""training and test images that torchvision downloads"""


@source("gtsrb")
def gtsrb(root: Path | None) -> DataSet:
    """Read GTSRB from ``ROOT/gtsrb/GTSRB`` or ``ROOT/gtsrb*.npz``, dealt in a fixed random order.

    The folder is as torchvision stores it.

    The published images differ in size, so they need ``image_size``; whole images are resized, without a
    cut to the sign.
    """
    root = need_root(root, "GTSRB", _ADVICE)
    folder = root / "gtsrb" / "GTSRB"
    if not folder.exists():
        return npz.find_pool("gtsrb", root, "gtsrb*.npz", numbers(43), _ADVICE)
    of_classes = [path for path in subfolders(folder / "Training", _ADVICE) if path.name.isdecimal()]
    train = [
        (path, int(of_class.name))
        for of_class in of_classes
        for path in visible(of_class)
        if path.suffix.lower() == ".ppm"
    ]
    table = root / "gtsrb" / "GT-final_test.csv"
    try:
        # a spreadsheet may have added a byte order mark
        with io.StringIO(read_text(table, "utf-8-sig"), newline="") as file:
            lines = csv.DictReader(file, delimiter=";", skipinitialspace=True)
            lacking = {"Filename", "ClassId"} - set(lines.fieldnames or ())
            if lacking:
                raise ValueError(f"its first line has no column {min(lacking)}")
            test = [
                (folder / "Final_Test" / "Images" / line["Filename"], int(line["ClassId"])) for line in lines
            ]
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise UserError(f"cannot read {table} ({error}): {_ADVICE}") from None
    if not train or not test:
        raise UserError(f"{folder} has {len(train)} training and {len(test)} test images: {_ADVICE}")
    labels = np.array([label for _, label in train + test])
    if labels.min() < 0 or labels.max() > 42:
        raise UserError(f"{folder} has classes outside 0 to 42: {_ADVICE}")
    rows = two_parts(len(train), len(test), shuffle=True)
    images = on_disk(root, [path for path, _ in train + test])
    found, parts = (len(train), len(test)), {"train": len(train), "test": len(test)}
    partial = "{} has {} training and {} test images; {} and {} are published".format(
        folder, *found, *PUBLISHED
    )
    notes = () if found == PUBLISHED else (partial,)
    return DataSet("gtsrb", images, labels, numbers(43), *rows, parts=parts, notes=notes)
