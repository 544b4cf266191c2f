"""Keep the clients of a source: folders, a column of an .npz, or the domains of a data set."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ...errors import UserError
from .base import Deal, Scheme, Share, partition

if TYPE_CHECKING:
    from ..dataset import DataSet
    from ..settings import Data


@partition("natural")
class Natural(Scheme):
    """Every client or domain of the source is a client, with all its images."""

    of_groups: ClassVar[bool] = True

    def deal(self, table: DataSet, data: Data, seed: int) -> Deal:
        """Deal one client per group."""
        if data.clients not in (None, len(table.groups)):
            raise UserError(
                f"key 'clients': {table.name} has {len(table.groups)} clients, and this partition does not"
                f" change them; omit the key; got {data.clients}"
            )
        return Deal(
            tuple(Share(name, *table.of_group(name), table.angles.get(name, 0.0)) for name in table.groups)
        )
