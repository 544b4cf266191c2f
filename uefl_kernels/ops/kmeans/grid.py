"""Seeding of ``kmeans``: draws on a grid of whole numbers, so that every backend draws the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from ..._philox import uniforms
from ..kmeans_step import composed as steps

_LANES = 8  # candidates that are compared with the rows at once
_BLOCK_ELEMENTS = 1 << 22  # of the float64 copies that are in memory at a time
PARALLEL_ROUNDS = 5  # of k-means||, with 2 k draws each


class Grid:
    """Rows as whole numbers of at most ``bits`` bits and a sign, for seeding.

    Draw t of a round uses Philox4x32-10 with counter (t, round, restart, purpose) and the seed as key; its
    number in [0, 1) is made of the upper 27 and 26 bits of the first two words. Purpose 0: the rows; for
    k-means||, 1 its rounds and 2 the rows drawn.
    """

    def __init__(self, values: torch.Tensor, weights: torch.Tensor, bits: int) -> None:
        n, d = values.shape
        self.values, self.bits = values, bits
        self.weights = weights  # at most 1
        self.masses = (weights * 2.0 ** steps.mass_bits(n)).round().long()
        # A squared distance is at most d (2 * 2^bits)^2; n of them stay within 2^62.
        self.potential_scale = 2.0 ** (60 - 2 * bits - steps.ceil_log2(n * d))

    def seeds(self, method: str, k: int, seed: int, restart: int) -> torch.Tensor:
        """Return the rows that a fit begins with, [k]."""
        if method == "random":
            return self.random(k, seed, restart)
        if method == "k-means++":
            return self.plus_plus(k, seed, restart, 0)
        return self.parallel(k, seed, restart)

    def random(self, k: int, seed: int, restart: int) -> torch.Tensor:
        """Draw k different rows, each with a probability in proportion to its weight among the rest."""
        left, chosen = self.masses.clone(), self.masses.new_zeros(k)
        for i in range(k):
            chosen[i : i + 1] = self.sample(left, uniforms(1, i, restart, 0, seed))
            self.remove(left, chosen[i : i + 1])
        return chosen

    def plus_plus(self, k: int, seed: int, restart: int, purpose: int) -> torch.Tensor:
        """Run greedy k-means++.

        Draw 2 + ln k rows by squared distance and take the one that lowers the potential most, ties to the
        first.
        """
        left, chosen = self.masses.clone(), self.masses.new_zeros(k)
        chosen[:1] = self.sample(left, uniforms(1, 0, restart, purpose, seed))
        self.remove(left, chosen[:1])
        nearest = self.distances(chosen[:1])[:, 0]
        for i in range(1, k):
            potential = self.potential(nearest)
            # fewer different rows than clusters
            potential = torch.where(self.total(potential) > 0, potential, left)
            trials = self.sample(potential, uniforms(2 + int(math.log(k)), i, restart, purpose, seed))
            closer = torch.minimum(nearest[:, None], self.distances(trials))
            # not a number: an index on a GPU would be waited for
            best = self.total(self.potential(closer)).argmin(0, keepdim=True)
            chosen[i : i + 1] = trials.index_select(0, best)
            self.remove(left, chosen[i : i + 1])
            nearest = closer.index_select(1, best)[:, 0]
        return chosen

    def parallel(self, k: int, seed: int, restart: int) -> torch.Tensor:
        """Draw five rounds of 2 k rows by squared distance, with replacement, then k-means++ among them."""
        drawn, owner = self.oversampled(k, seed, restart)
        masses = self.everywhere(torch.zeros_like(drawn).index_add_(0, owner, self.masses))
        few = self.few(self.take(drawn), masses.double() / steps.least_power_of_two(masses.max().double()))
        return drawn[few.plus_plus(k, seed, restart, 2)]

    def oversampled(self, k: int, seed: int, restart: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the drawn rows, and the nearest draw of each row of the grid, the first one in a tie."""
        drawn = self.sample(self.masses, uniforms(1, 0, restart, 1, seed))
        nearest = self.distances(drawn)[:, 0]
        owner = torch.zeros_like(nearest)
        for i in range(1, PARALLEL_ROUNDS + 1):
            potential = self.potential(nearest)
            potential = torch.where(self.total(potential) > 0, potential, self.masses)
            fresh = self.sample(potential, uniforms(2 * k, i, restart, 1, seed))
            nearest, owner = self.nearer(nearest, owner, fresh, len(drawn))
            drawn = torch.cat([drawn, fresh])
        return drawn, owner

    def nearer(
        self, nearest: torch.Tensor, owner: torch.Tensor, fresh: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the squared distance to the nearest draw, and its number.

        There are ``count`` draws, and ``fresh`` ones follow.
        """
        return nearer(
            lambda group: squared_distances(self.values, group), self.take(fresh), nearest, owner, count
        )

    def distances(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return squared distances [n, len(chosen)] int64 to the rows with these numbers."""
        return squared_distances(self.values, self.take(chosen))

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the values of the rows with these numbers."""
        return self.values[numbers]

    def few(self, values: torch.Tensor, weights: torch.Tensor) -> Grid:
        """Return a grid of some of the rows."""
        return type(self)(values, weights, self.bits)

    def sample(self, masses: torch.Tensor, draws: npt.NDArray[np.float64]) -> torch.Tensor:
        """Return for each draw in [0, 1) the first row whose running sum of masses exceeds it.

        The draw is a part of the total. Return 0 if all masses are 0.
        """
        running = masses.cumsum(0)
        return sample(running[-1], running, draws)

    def remove(self, left: torch.Tensor, chosen: torch.Tensor) -> None:
        """Set the remaining masses of these rows to zero."""
        left.index_fill_(0, chosen, 0)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all rows of whole numbers [n, ...]."""
        return self.everywhere(values.sum(0))

    def everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes, which is one here."""
        return tensor

    def potential(self, squares: torch.Tensor) -> torch.Tensor:
        """Return weighted squared distances [n, ...] as whole numbers with a sum of at most 2^62."""
        weights = (self.weights * self.potential_scale).reshape(-1, *[1] * (squares.dim() - 1))
        return (weights * squares.double()).round().long()


def squared_distances(values: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """Compute squared distances [n, m] int64 of values [n, d] and [m, d] on the grid.

    All are whole numbers below 2^53, so float64 products are exact.
    """
    picked = picked.double()
    norms = picked.square().sum(1)
    out = []
    for block in values.split(max(1, _BLOCK_ELEMENTS // values.shape[1])):
        wide = block.double()
        out.append((wide.square().sum(1)[:, None] + norms - 2 * (wide @ picked.T)).long())
    return torch.cat(out)


def nearer(
    distances: Callable[[torch.Tensor], torch.Tensor],
    picked: torch.Tensor,
    nearest: torch.Tensor,
    owner: torch.Tensor,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``Grid.nearer`` with a function that returns distances.

    It returns the distances [n, m] to some of the picked rows.
    """
    for group in picked.split(_LANES):
        distance = distances(group)
        first = distance.argmin(1, keepdim=True)
        distance = distance.gather(1, first)[:, 0]
        owner = torch.where(distance < nearest, first[:, 0] + count, owner)
        nearest = torch.minimum(nearest, distance)
        count += len(group)
    return nearest, owner


def sample(total: torch.Tensor, running: torch.Tensor, draws: npt.NDArray[np.float64]) -> torch.Tensor:
    """Compute ``Grid.sample`` from the total and the running sums of the masses."""
    # Plain numbers go to a device with the launch; a tensor of them would have to be copied there.
    targets = torch.stack([(total.double() * draw).long() for draw in draws.tolist()]).minimum(total - 1)
    return torch.searchsorted(running, targets, right=True)
