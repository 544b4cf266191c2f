"""Images that are made when they are read; ``uefl.data.generated_images`` makes them."""

from __future__ import annotations

from pathlib import Path

from ...errors import UserError
from ..dataset import DataSet
from ..generated_images import NAME
from .base import source


@source(NAME)
def generated(root: Path | None) -> DataSet:
    """Generate 1x8x8 images of ten classes when a client is read: for runs with thousands of clients; no data
    root, no partition."""
    raise UserError(
        f"key 'source': {NAME!r} makes the images of each client and has no list of images to be dealt; leave"
        " out the partition"
    )
