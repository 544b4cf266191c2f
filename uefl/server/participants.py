"""The clients that train in a round, and the clients that measure its model."""

from __future__ import annotations

import math

import torch

from ..seeds import derive


class Participants:
    """Draw a share of the clients for each round. The draw depends only on seed, purpose and round.

    Args:
        clients: all names, sorted.
        share: in (0, 1]; rounded up to a whole client.
        seed: of the run.
        purpose: draws for two purposes do not depend on each other.
    """

    def __init__(
        self, clients: tuple[str, ...], share: float, seed: int, purpose: str = "participants"
    ) -> None:
        self._clients, self._seed, self._purpose = clients, seed, purpose
        self._count = math.ceil(share * len(clients) - 1e-9)  # 0.07 * 100 is a little more than 7

    def of(self, round: int) -> tuple[str, ...]:
        """Return the names that are drawn for a round, sorted."""
        if self._count == len(self._clients):
            return self._clients
        generator = torch.Generator().manual_seed(derive(self._seed, self._purpose, round))
        chosen = torch.randperm(len(self._clients), generator=generator)[: self._count].tolist()
        return tuple(self._clients[i] for i in sorted(chosen))
