"""The name of clients that were given in Python: a run folder says so, and has no images of them."""

from __future__ import annotations

from pathlib import Path

from ...errors import UserError
from ..table import Table
from .base import source


@source("arrays")
def arrays(root: Path | None = None) -> Table:
    """There is nothing to read.

    Raises:
        UserError: always; it says how to give the clients.
    """
    raise UserError(
        "the clients of source 'arrays' are given in Python: uefl.train(clients={name: (train, test), ...}, out=...); "
        "to go on with such a run, give them again: uefl.resume(out, clients=...)"
    )
