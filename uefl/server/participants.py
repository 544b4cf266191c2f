"""Who trains in a round."""

from __future__ import annotations

import math

import torch

from ..seeds import derive


class Participants:
    """A share of the clients, drawn anew for every round; the draw depends on the seed and the round alone.

    Args:
        clients: all names, sorted.
        share: in (0, 1]; rounded up to a whole client.
        seed: of the run.
    """

    def __init__(self, clients: tuple[str, ...], share: float, seed: int) -> None:
        self._clients, self._seed = clients, seed
        self._count = math.ceil(share * len(clients) - 1e-9)  # 0.07 * 100 is a little more than 7

    def of(self, round: int) -> tuple[str, ...]:
        """The names of those that train in a round, sorted."""
        if self._count == len(self._clients):
            return self._clients
        generator = torch.Generator().manual_seed(derive(self._seed, "participants", round))
        chosen = torch.randperm(len(self._clients), generator=generator)[: self._count].tolist()
        return tuple(self._clients[i] for i in sorted(chosen))
