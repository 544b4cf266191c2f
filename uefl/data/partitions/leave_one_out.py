"""Train on all domains except one, and measure the model on the other domain."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from ...errors import UserError, listed, nearest
from .base import Deal, Scheme, Share, client_names, generator, partition

if TYPE_CHECKING:
    from ..dataset import DataSet
    from ..images import Rows
    from ..settings import Data


@partition("leave_one_out")
class LeaveOneOut(Scheme):
    """All domains of a source except one are clients.

    The images of the other domain are the test images of a client that never trains.

    ``clients`` may be a multiple of the number of training domains. Then the images of each training domain
    are dealt at random, in equal shares, to the same number of clients.
    """

    of_groups: ClassVar[bool] = True

    domain: str = Field(min_length=1)
    """name of the client or domain that is left out"""
    per_domain: int = Field(default=0, ge=0)
    """largest number of images of each domain, drawn at random; 0: all images"""

    def deal(self, table: DataSet, data: Data, seed: int) -> Deal:
        """Deal one or several clients per domain."""
        if self.domain not in table.groups:
            raise UserError(
                f"key 'domain': {self.domain!r} is not a domain of"
                f" {table.name}{nearest(self.domain, table.groups)}; it has {listed(table.groups)}"
            )
        sources = [group for group in table.groups if group != self.domain]
        if not sources:
            raise UserError(
                f"{table.name} has one domain, {self.domain!r}; without it, there are no images for training"
            )
        each, rest = divmod(data.clients or len(sources), len(sources))
        if rest:
            raise UserError(
                f"key 'clients': expected a multiple of the {len(sources)} domains that are trained on; got"
                f" {data.clients}"
            )
        rng, drawn = generator(seed), generator(seed, "per_domain")
        rows = {group: self._drawn(drawn, *table.of_group(group)) for group in table.groups}
        shares = []
        for group in sources:
            train, test = rows[group]
            parts: list[tuple[Rows, Rows | None]] = [(train, test)]
            if each > 1:
                trains = np.array_split(rng.permutation(train), each)
                tests = [None] * each if test is None else np.array_split(rng.permutation(test), each)
                parts = list(zip(trains, tests, strict=True))
            names = client_names(group, each) if each > 1 else [group]
            shares += [
                Share(name, *part, table.angles.get(group, 0.0))
                for name, part in zip(names, parts, strict=True)
            ]
        return Deal(tuple(shares), (measured_only(table, self.domain, *rows[self.domain]),))

    def _drawn(self, rng: np.random.Generator, train: Rows, test: Rows | None) -> tuple[Rows, Rows | None]:
        """Draw images of a domain at random, and return them in the order of the source.

        Each split keeps its share on average.
        """
        images = len(train) + (0 if test is None else len(test))
        if not self.per_domain or self.per_domain >= images:
            return train, test
        chosen = np.sort(rng.choice(images, self.per_domain, replace=False))
        beyond = np.searchsorted(chosen, len(train))
        return train[chosen[:beyond]], None if test is None else test[chosen[beyond:] - len(train)]


def measured_only(table: DataSet, group: str, train: Rows, test: Rows | None) -> Share:
    """Return the share of a client that never trains and has all images of the group as test images."""
    everything = train if test is None else np.concatenate([train, test])
    return Share(group, everything[:0], everything, table.angles.get(group, 0.0))
