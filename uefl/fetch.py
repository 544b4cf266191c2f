"""Download the published files of data sets with torchvision, at the request of a user."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .data.sources import gtsrb
from .errors import UserError, nearest
from .folder import alone
from .paths import expanded

_PARTS: tuple[dict[str, object], ...] = ({"train": True}, {"train": False})
SETS: dict[str, tuple[str, tuple[dict[str, object], ...]]] = {
    "mnist": ("MNIST", _PARTS),
    "fashion_mnist": ("FashionMNIST", _PARTS),
    "emnist_letters": ("EMNIST", tuple({"split": "letters", **part} for part in _PARTS)),
    "cifar10": ("CIFAR10", _PARTS),
    "cifar100": ("CIFAR100", _PARTS),
    "gtsrb": ("GTSRB", ({"split": "train"}, {"split": "test"})),
}
"""For each data set the class of torchvision, and the arguments of the calls that read its parts"""
FOLDERS = {"GTSRB": ("gtsrb/GTSRB", "*.ppm", sum(gtsrb.PUBLISHED))}
"""For a class that takes a part of a folder for the folder: the folder, its images and their number"""


def fetch(names: list[str], data_root: Path | None, say: Callable[[str], None]) -> None:
    """Download data sets of ``SETS`` into a data root, each as a whole, unless torchvision finds them.

    Raises:
        UserError: the data set or the data root does not exist, a download failed, or another process
            downloads into the data root.
    """
    from .data.sources.pacs import ADVICE

    if "pacs" in names:
        raise UserError(f"torchvision cannot download pacs; get its files from its authors: {ADVICE}")
    unknown = [name for name in names if name not in SETS]
    if unknown:
        raise UserError(f"{unknown[0]!r} is none of {', '.join(SETS)}{nearest(unknown[0], SETS)}")
    root = data_root or (expanded(os.environ["UEFL_DATA"]) if os.environ.get("UEFL_DATA") else None)
    if root is None:
        raise UserError("a download needs a data root, given as --data-root or in UEFL_DATA")
    for name in dict.fromkeys(names):
        kind, calls = SETS[name]
        try:
            with alone(root):
                _download(kind, calls, root)
        except (OSError, RuntimeError) as error:  # no network, another hash, a full disk
            why = " ".join(str(error).split()) or type(error).__name__  # torchvision names the reason last
            raise UserError(f"{name} cannot be fetched into {root} ({why})") from None
        say(f"{name}: {root}")


def _download(name: str, calls: tuple[dict[str, object], ...], root: Path) -> None:
    """Download into a folder inside of the root, because torchvision takes a part of a file for the file.

    If a move into the root stops early, the folder stays. Then the next call downloads again, because
    torchvision takes a part of a folder for the folder.
    """
    from torchvision import datasets

    kind, part = getattr(datasets, name), root / ".uefl-fetch"
    folder, images, count = FOLDERS.get(name, ("", "", 0))
    partial = count and sum(1 for _ in (root / folder).rglob(images)) != count
    if part.exists():
        shutil.rmtree(part)
    elif not partial:
        with suppress(Exception):  # files are absent or damaged
            for arguments in calls:
                kind(str(root), download=False, **arguments)
            return
    try:
        for arguments in calls:
            kind(str(part), download=True, **arguments)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    _move(part, root)
    shutil.rmtree(part, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    """Move a file or a folder, and keep files of a folder that is there."""
    if not (source.is_dir() and target.is_dir()):
        shutil.move(source, target)
        return
    for path in source.iterdir():
        _move(path, target / path.name)
