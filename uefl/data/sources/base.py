"""The registry of data sets, and the places of their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UserError
from ...registry import Registry

if TYPE_CHECKING:
    from ..dataset import DataSet

Reader = Callable[[Path | None], "DataSet"]
"""a function that reads a data set from the data root, which may be missing; it raises UserError if files are
absent or damaged"""

SOURCES: Registry[Reader] = Registry(__package__, "data set", "uefl.sources")
"""the readers of data sets by name, also readers of installed packages (entry points ``uefl.sources``)"""


def source(name: str) -> Callable[[Reader], Reader]:
    """Register the reader of a data set under the name that ``[data] source = ...`` gives it."""
    return SOURCES.decorator(name)


def need_root(root: Path | None, what: str, advice: str) -> Path:
    """Return the data root, or raise if there is none.

    Raises:
        UserError: there is no data root; the message states the expected content.
    """
    if root is None:
        raise UserError(f"{what} needs a data root, given as --data-root or in UEFL_DATA: {advice}")
    return root


def torchvision_advice(name: str, files: str, arguments: str = "ROOT, download=True") -> str:
    """Return the advice on how to get the files that torchvision stores, with their place below the root."""
    return (
        f"run torchvision.datasets.{name}({arguments}) and give that ROOT as --data-root or in UEFL_DATA;"
        f" expected ROOT/{files}"
    )
