"""PACS: seven kinds of things as art paintings, cartoons, photographs and sketches, in color."""

from __future__ import annotations

import io
import tarfile
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np

from ...errors import UserError, listed
from ...paths import opened
from ..dataset import DataSet, numbered
from ..folder_listing import labeled, unused_paths
from ..images import File, ImageList, from_files, on_disk
from .base import need_root, source

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")

ADVICE = (
    "expected ROOT/pacs*/DOMAIN/CLASS/image.jpg or ROOT/pacs*.tar with the same inside; domains are"
    f" {', '.join(DOMAINS)}; ROOT is given as --data-root or in UEFL_DATA"
)


@source("pacs")
def pacs(root: Path | None) -> DataSet:
    """Read PACS from a folder or an uncompressed tar archive, named ``pacs...`` in any case.

    Each domain is a client.

    An archive is read in place: its index now, an image when it is asked for.
    """
    root = need_root(root, "PACS", ADVICE)
    found = sorted(
        path for path in root.glob("[pP][aA][cC][sS]*") if path.is_dir() or path.suffix.lower() == ".tar"
    )
    if len(found) != 1:
        raise UserError(f"{root} holds {listed(path.name for path in found) or 'no PACS'}: {ADVICE}")
    images = _archive(found[0]) if found[0].suffix.lower() == ".tar" else _folder(found[0])
    places = [PurePosixPath(name).parts for name in images.files]
    labels, classes = numbered([place[-2] for place in places])
    group_of, _ = numbered([place[-3] for place in places], DOMAINS)
    absent = set(range(len(DOMAINS))) - set(group_of.tolist())
    if absent:
        raise UserError(f"{found[0]} has no image of the domain {DOMAINS[min(absent)]}: {ADVICE}")
    rows = np.arange(len(places))
    return DataSet(
        "pacs",
        images,
        labels,
        classes,
        rows,
        None,
        DOMAINS,
        group_of,
        frozenset(DOMAINS),
        parts={"files": len(places)},
        notes=unused_paths([found[0] / domain for domain in DOMAINS]) if found[0].is_dir() else (),
    )


def _folder(root: Path) -> ImageList:
    paths = [
        path for domain in DOMAINS if (root / domain).is_dir() for path, _ in labeled(root / domain, ADVICE)
    ]
    if not paths:
        raise UserError(f"{root} holds none of the domains: {ADVICE}")
    return on_disk(root, paths)


def _archive(path: Path) -> ImageList:
    try:
        with opened(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            entries = sorted((m for m in archive if m.isfile()), key=lambda m: m.name)
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"cannot read {path} ({error}): {ADVICE}") from None

    def part(start: int, size: int) -> BinaryIO:
        with opened(path) as file:
            file.seek(start)
            return io.BytesIO(file.read(size))

    files = []
    for entry in entries:
        place = PurePosixPath(entry.name).parts
        if place[-1].startswith("."):
            continue
        if len(place) < 3 or place[-3] not in DOMAINS:
            raise UserError(f"{path}: {entry.name} is in no domain and class: {ADVICE}")
        files.append(File("/".join(place[-3:]), partial(part, entry.offset_data, entry.size)))
    if not files:
        raise UserError(f"{path} holds no image: {ADVICE}")
    return from_files(str(path), files)
