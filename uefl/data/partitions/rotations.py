"""Equal parts in order, each turned by an angle: the domains of the multi-domain experiments."""

from __future__ import annotations

from pydantic import Field

from .base import Scheme, partition


@partition("rotations")
class Rotations(Scheme):
    """Clients get disjoint slices of the data set in its order; the images of each are turned by an angle.

    With fewer angles than clients each angle is that of as many consecutive clients: two angles and four clients are a, a, b, b.
    """

    angles: tuple[float, ...] = Field((), description="degrees, counter-clockwise; as many as clients or a divisor of that; empty: none")
    legacy_center: bool = Field(False, description="turn about pixel (W/2, H/2), as the published code does, not about the image centre")
