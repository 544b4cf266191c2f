"""Images that are made when they are read; ``uefl.data.generated`` makes them."""

from __future__ import annotations

from pathlib import Path

from ...errors import UserError
from ..generated import NAME
from ..table import Table
from .base import source


@source(NAME)
def generated(root: Path | None) -> Table:
    """The name of the source is known; there is no list of images."""
    raise UserError(
        f"key 'source': {NAME!r} makes the images of each client and has no list of images to be dealt; leave out the partition"
    )
