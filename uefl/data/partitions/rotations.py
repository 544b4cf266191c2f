"""Equal parts in order, each turned by an angle: the domains of the multi-domain experiments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Deal, Scheme, Share, angle_of_each, client_names, partition, slices, wanted_clients

if TYPE_CHECKING:
    from ..dataset import DataSet
    from ..settings import Data


@partition("rotations")
class Rotations(Scheme):
    """Clients get disjoint slices of the data set in its order, the same for every seed.

    The images of a client are turned by its angle.

    With fewer angles than clients each angle belongs to an equal number of consecutive clients: two angles
    and four clients are a, a, b, b.
    """

    angles: tuple[float, ...] = ()
    """degrees, counter-clockwise; one per client, or a number of angles that divides the number of clients;
    empty: none"""
    legacy_center: bool = False
    """turn about pixel (W/2, H/2), as the published code does"""

    def deal(self, table: DataSet, data: Data, seed: int) -> Deal:
        """Deal in order."""
        clients = wanted_clients(data, len(self.angles) or None)
        angles = angle_of_each(self.angles, clients)
        parts = zip(client_names("silo", clients), slices(table, data, clients), angles, strict=True)
        return Deal(
            tuple(Share(name, train, test, angle, self.legacy_center) for name, (train, test), angle in parts)
        )
