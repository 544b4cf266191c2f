"""The record of a partition: the images of every client in each split, and the SHA-256 of their content.

The values can be written as JSON. The file below the source identifies an image, or the position in the
source. Positions count the training images first, then the test images, each in file order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from ..errors import UserError
from .images import Rows
from .prepare import Source
from .vectors import Vectors

SCHEMA = 1
_MEASURED = ("holdout", "test")

ManifestEntry = dict[str, Any]
ImageUse = Literal["train", "holdout", "test"]


class ImageHashes:
    """Hash images, and find images that occur in two splits."""

    def __init__(self) -> None:
        self._trained: dict[bytes, str] = {}
        self._holdout: dict[bytes, str] = {}
        self._tested: list[tuple[bytes, str]] = []

    def entry(
        self, images: Source, rows: Rows, labels: Rows | None, where: str, use: ImageUse, classes: int
    ) -> ManifestEntry:
        """Return the record of one split.

        Args:
            labels: labels of these images; None: the images have no labels.
            where: client and split, for notes.
        """
        total = hashlib.sha256()
        for row, content in zip(rows.tolist(), images.content(rows), strict=True):
            digest = hashlib.sha256(content).digest()
            total.update(digest)
            name = f"{_name(images, row)} ({where})"
            if use == "test":
                self._tested.append((digest, name))
            else:
                (self._trained if use == "train" else self._holdout).setdefault(digest, name)
        found: ManifestEntry = {"in": images.inside} if images.inside else {}
        found |= (
            {"files": [images.files[row] for row in rows]} if images.files else {"indices": rows.tolist()}
        )
        if labels is not None:
            total.update(labels.astype("<i8").tobytes())
            found["images_of_class"] = np.bincount(labels, minlength=classes).tolist()
        return found | {"sha256": total.hexdigest()}

    def twins(self) -> list[tuple[str, str]]:
        """Return pairs of names: a holdout or test image, and an earlier split that holds the same bytes."""
        holdout = [
            (name, self._trained[digest]) for digest, name in self._holdout.items() if digest in self._trained
        ]
        others = self._holdout | self._trained
        return holdout + [(name, others[digest]) for digest, name in self._tested if digest in others]


def _name(images: Source, row: int) -> str:
    noun = images.inputs.noun[:-1] if isinstance(images, Vectors) else "image"
    return images.files[row] if images.files else " ".join(filter(None, (images.inside, f"{noun} {row}")))


def digest(manifest: ManifestEntry) -> str:
    """Return the SHA-256 of a manifest without the name and the place of its source."""
    without_source = {key: value for key, value in manifest.items() if key != "source"}
    return hashlib.sha256(json.dumps(without_source, sort_keys=True).encode()).hexdigest()


def check_disjoint(manifest: ManifestEntry) -> None:
    """Refuse an image in two places, such as two clients, two splits, or a client and the server.

    Two settings allow this: ``legacy_holdout`` takes the test split as the holdout, and sets may ``overlap``.

    Raises:
        UserError: an image is in two places.
    """
    partition = manifest["partition"]
    seen: dict[tuple[str, str | int], str] = {}
    for where, entry in _entries(manifest):
        inside, ids = entry.get("in", ""), entry.get("files") or entry["indices"]
        if where.endswith("/train") and partition.get("overlap"):
            ids = list(dict.fromkeys(ids))
        for image in ids:
            if (inside, image) in seen:
                place = inside or manifest["source"]["name"]
                what = image if isinstance(image, str) else f"image {image} of {place}"
                other = seen[inside, image]
                places = f"in {where} twice" if other == where else f"in {other} and in {where}"
                raise UserError(
                    f"partition {partition['scheme']!r}: {what} is {places}; an image may be in only one"
                    " split of one client"
                )
            seen[inside, image] = where


def _entries(manifest: ManifestEntry) -> Iterator[tuple[str, ManifestEntry]]:
    for group in ("silos", "unseen"):
        for name, client in manifest[group].items():
            for part in ("train", *_MEASURED):
                if part in client and not (part == "holdout" and manifest.get("legacy_holdout")):
                    yield f"{name}/{part}", client[part]
    for part, entry in manifest["server"].items():
        yield f"server/{part}", entry
