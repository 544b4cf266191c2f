"""Domains of unequal size: some angles have more clients than others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from ...errors import UserError
from .base import Deal, Scheme, partition
from .rotations import Rotations

if TYPE_CHECKING:
    from ..dataset import DataSet
    from ..settings import Data


@partition("imbalanced")
class Imbalanced(Scheme):
    """As ``rotations``, with a number of clients for each angle.

    With 3, 1, 1, three clients have the first angle, and one client has each other angle.
    """

    angles: tuple[float, ...] = Field(default=(0.0, -50.0, 120.0), min_length=1)
    """degrees, counter-clockwise, one per domain"""
    clients_per_angle: tuple[PositiveInt, ...] = (3, 1, 1)
    """clients of each domain"""
    legacy_center: bool = False
    """turn about pixel (W/2, H/2), as the published code does"""

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        if len(self.angles) != len(self.clients_per_angle):
            raise ValueError(
                f"expected one number of clients per angle: {len(self.angles)} angles,"
                f" {len(self.clients_per_angle)} numbers"
            )
        return self

    def deal(self, table: DataSet, data: Data, seed: int) -> Deal:
        """Deal in order."""
        clients = sum(self.clients_per_angle)
        if data.clients not in (None, clients):
            raise UserError(
                f"key 'clients': expected {clients}, the sum of clients_per_angle, or nothing; got"
                f" {data.clients}"
            )
        each = tuple(np.repeat(self.angles, self.clients_per_angle).tolist())
        return Rotations(angles=each, legacy_center=self.legacy_center).deal(table, data, seed)
