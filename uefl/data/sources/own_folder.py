"""A folder of the user's own clients: one subfolder per client, in it one folder of images per class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...errors import UserError
from ..dataset import DataSet, numbered
from ..folder_listing import FORMATS, case_conflicts, labeled, subfolders, unused_paths, visible
from ..images import on_disk

LAYOUT = "expected FOLDER/CLIENT/CLASS/image.png or FOLDER/CLIENT/train|test/CLASS/image.png"
_OF_ONE = "expected FOLDER/CLASS/image.png or FOLDER/train|test/CLASS/image.png of one client"


def read(root: Path) -> DataSet:
    """Read ``root/CLIENT/CLASS/*`` or ``root/CLIENT/{train,test}/CLASS/*``.

    Classes are the union over all clients, sorted by name.

    Files whose suffix is of no image that Pillow reads, and empty class folders, are skipped with a note.
    Hidden files are skipped without a note. Classes that differ only in case are noted. Images are RGB if any
    of them is in color, else gray, by the rules of :mod:`uefl.data.pixels`.

    Raises:
        UserError: folders or images are missing or misplaced, or an image cannot be read.
    """
    return _table(
        root,
        {client.name: _parts(client, LAYOUT) for client in subfolders(root, LAYOUT)},
        _unused_files([f for f in visible(root) if f.is_dir()], root),
    )


def read_one(client: Path, name: str) -> DataSet:
    """Read a single client from a folder, with the layout of a subfolder in :func:`read`."""
    return _table(client, {name: _parts(client, _OF_ONE)}, _unused_files([client]))


def _table(
    root: Path, clients: dict[str, dict[str, list[tuple[Path, str]]]], strays: tuple[str, ...]
) -> DataSet:
    files = [
        (path, label, name, part)
        for name, parts in clients.items()
        for part, inside in parts.items()
        for path, label in inside
    ]
    labels, classes = numbered([label for _, label, _, _ in files])
    group_of, groups = numbered([name for _, _, name, _ in files], tuple(clients))
    is_test = np.array([part == "test" for *_, part in files])
    return DataSet(
        str(root),
        on_disk(root, [path for path, *_ in files]),
        labels,
        classes,
        np.flatnonzero(~is_test),
        np.flatnonzero(is_test),
        groups,
        group_of,
        frozenset(name for name, parts in clients.items() if "test" not in parts),
        parts={"files": len(files)},
        notes=(*strays, *case_conflicts(classes)),
    )


def _parts(client: Path, layout: str) -> dict[str, list[tuple[Path, str]]]:
    """Return files and their classes by split, where a client without splits counts as ``train``."""
    inside = subfolders(client, layout)
    # classes that are called train and test hold images, splits hold folders
    names = {f.name for f in inside}
    deeper = any(f.is_dir() for part in inside for f in visible(part))
    split = deeper and names <= {"train", "test"}
    if deeper and not split and {name.lower() for name in names} <= {"train", "test"}:
        raise UserError(f"{client} has {', '.join(sorted(names))}; call the folders train and test")
    if split and len(names) == 1:
        (there,) = names
        other = "test" if there == "train" else "train"
        raise UserError(
            f"{client / there} has no {other} next to it; add {client / other}, or put the class folders"
            f" directly into {client}, and a test split is drawn from them"
        )
    parts = (
        {part.name: labeled(part, layout) for part in inside} if split else {"train": labeled(client, layout)}
    )
    for name, part in parts.items():
        if not part:
            raise UserError(f"{client / name if split else client} holds no image; {layout}; {FORMATS}")
    return parts


def _unused_files(clients: list[Path], *above: Path) -> tuple[str, ...]:
    """Return notes on files and folders, also in those ``above``, that hold no image of any client."""
    parts = [
        f
        for client in clients
        for f in visible(client)
        if f.is_dir() and any(inside.is_dir() for inside in visible(f))
    ]
    return unused_paths((*above, *clients, *parts))
