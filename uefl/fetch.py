"""Download the published files of data sets with torchvision, at the request of a user."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .errors import UserError, nearest
from .folder import alone
from .paths import expanded

SETS: dict[str, tuple[str, tuple[dict[str, object], ...]]] = {
    "mnist": ("MNIST", ({},)),
    "fashion_mnist": ("FashionMNIST", ({},)),
    "emnist_letters": ("EMNIST", ({"split": "letters"},)),
    "cifar10": ("CIFAR10", ({},)),
    "cifar100": ("CIFAR100", ({},)),
    "gtsrb": ("GTSRB", ({"split": "train"}, {"split": "test"})),
}
"""For each data set the class of torchvision, and the arguments of each call"""


def fetch(names: list[str], data_root: Path | None, say: Callable[[str], None]) -> None:
    """Download data sets of ``SETS`` into a data root, each as a whole, unless torchvision finds them.

    Raises:
        UserError: the data set or the data root does not exist, a download failed, or another process
            downloads into the data root.
    """
    from torchvision import datasets

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
                _download(getattr(datasets, kind), calls, root)
        except (OSError, RuntimeError) as error:  # no network, another hash, a full disk
            why = " ".join(str(error).split()) or type(error).__name__  # torchvision names the reason last
            raise UserError(f"{name} cannot be fetched into {root} ({why})") from None
        say(f"{name}: {root}")


def _download(kind: Callable[..., object], calls: tuple[dict[str, object], ...], root: Path) -> None:
    """Download into a folder inside of the root, because torchvision takes a part of a file for the file."""
    part = root / ".uefl-fetch"
    if part.exists():
        shutil.rmtree(part)  # a killed process has left it
    with suppress(Exception):  # files are absent or damaged
        for arguments in calls:
            kind(str(root), download=False, **arguments)
        return
    try:
        for arguments in calls:
            kind(str(part), download=True, **arguments)
        _move(part, root)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    """Move a file or a folder, and keep files of a folder that is there."""
    if not (source.is_dir() and target.is_dir()):
        shutil.move(source, target)
        return
    for path in source.iterdir():
        _move(path, target / path.name)
