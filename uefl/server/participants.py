"""The clients that train in a round, and the clients that measure its model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch

from ..algorithms.base import Algorithm
from ..errors import UserError, nearest
from ..seeds import derive


class Participants:
    """Draw a share of the clients for each round.

    The draw depends only on seed, purpose and round.

    Args:
        share: number in (0, 1]; the result is rounded up to a whole client.
        purpose: draws for two purposes do not depend on each other.
        joins: for each client that joins later, the number of its first round, counted from 1.
    """

    def __init__(
        self,
        clients: tuple[str, ...],
        share: float,
        seed: int,
        purpose: str = "participants",
        joins: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._clients, self._share, self._seed, self._purpose = clients, share, seed, purpose
        self._joins = joins

    def of(self, round: int) -> tuple[str, ...]:
        """Return the names that are drawn after ``round`` rounds have been trained, sorted."""
        clients = tuple(name for name in self._clients if self._joins.get(name, 1) <= round + 1)
        count = math.ceil(self._share * len(clients) - 1e-9)  # 0.07 * 100 is a little more than 7
        if count == len(clients):
            return clients
        generator = torch.Generator().manual_seed(derive(self._seed, self._purpose, round))
        chosen = torch.randperm(len(clients), generator=generator)[:count].tolist()
        return tuple(clients[i] for i in sorted(chosen))


def check_joins(arm: str, algorithm: Algorithm) -> None:
    """Refuse clients that cannot join later.

    Raises:
        UserError: no client of this name, no client in the first round, a round after the last, or an
            algorithm that asks all clients.
    """
    joins, clients = algorithm.context.run.joins, algorithm.context.clients
    if not joins:
        return
    if algorithm.asks_all:
        raise UserError(
            f"key 'run.joins': arm {arm!r} asks every client before the client trains; omit the arm or the"
            " key"
        )
    if unknown := sorted(joins.keys() - set(clients)):
        raise UserError(f"key 'run.joins': there is no client {unknown[0]!r}{nearest(unknown[0], clients)}")
    if len(joins) == len(clients):
        raise UserError(
            "key 'run.joins': no client remains for the first round; let one client take part from the start"
        )
    last = sum(algorithm.context.training.iterations())
    for name, first in joins.items():
        if first > last:
            raise UserError(
                f"key 'run.joins': {name!r} joins in round {first}, after the last round {last}; give an"
                " earlier round"
            )
