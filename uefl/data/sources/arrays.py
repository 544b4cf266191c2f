"""The source ``arrays``, which a run folder records for clients that were given in Python."""

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
