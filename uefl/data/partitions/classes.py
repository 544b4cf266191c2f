"""Label skew by design: every client has images of a few classes only."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from ...errors import UserError
from ..priors import shares
from .base import Deal, Scheme, Share, check_enough, client_names, generator, partition, wanted_clients

if TYPE_CHECKING:
    from ..dataset import DataSet
    from ..settings import Data


@partition("classes")
class ClassesPerClient(Scheme):
    """Client c of n has ``per_client`` consecutive classes in equal numbers.

    They begin at class floor(c K / n); class 0 follows the last class.

    Training and test images are dealt together at random, and cut inside the client, from each class its
    share. Source of five consecutive classes per client: FedCR (Zhang et al., ICML 2023).
    """

    one_class: ClassVar[bool] = True

    per_client: int = Field(default=2, ge=1)
    """classes of each client"""

    def deal(self, table: DataSet, data: Data, seed: int) -> Deal:
        """Deal by label, at random by the seed."""
        classes, clients = len(table.classes), wanted_clients(data)
        if self.per_client > classes:
            raise UserError(
                f"key 'per_client': expected at most {classes}, the classes of {table.name}; got"
                f" {self.per_client}"
            )
        everything = table.train if table.test is None else np.concatenate([table.train, table.test])
        each = data.train_per_client + data.test_per_client
        check_enough(table, data, clients, "", clients * each, everything)
        order = generator(seed).permutation(everything)
        supply = [order[table.labels[order] == k] for k in range(classes)]
        counts = shares(each, np.ones(self.per_client))
        wanted = np.zeros((clients, classes), np.int64)
        for c in range(clients):
            wanted[c, (c * classes // clients + np.arange(self.per_client)) % classes] = counts
        short = [k for k in range(classes) if wanted[:, k].sum() > len(supply[k])]
        if short:
            k = short[0]
            raise UserError(
                f"{clients} clients with {self.per_client} classes each need {wanted[:, k].sum()} images of"
                f" class {table.classes[k]!r}, {table.name} has {len(supply[k])}; lower clients,"
                " train_per_client or test_per_client"
            )
        ends = wanted.cumsum(0)
        of_class = [np.split(rows, ends[:, k]) for k, rows in enumerate(supply)]
        parts = [np.concatenate([pieces[c] for pieces in of_class]) for c in range(clients)]
        named = zip(client_names("silo", clients), parts, strict=True)
        return Deal(tuple(Share(name, part, None) for name, part in named))
