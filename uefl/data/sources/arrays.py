"""The source ``arrays``: the clients were given in Python.

A run folder records this name, and does not hold their images.
"""

from __future__ import annotations

from pathlib import Path

from ...errors import UserError
from ..dataset import DataSet
from .base import source


@source("arrays")
def arrays(root: Path | None = None) -> DataSet:
    """Return clients that were given in Python.

    No file is read.

    Raises:
        UserError: always; the message shows how to give the clients.
    """
    raise UserError(
        "the clients of source 'arrays' are given in Python: uefl.train(clients={name: (train, test), ...},"
        " out=...); to continue such a run, give them again: uefl.resume(out, clients=...)"
    )
