"""The definition of ``kmeans``: seeding, Lloyd iterations and inertia, so arranged that every backend agrees to the bit.

Three things could differ between machines, and each one is taken care of:

* **Labels** are the argmin of the float64 distance (``vq_assign``).
* **Sums over rows** are sums of 64-bit integers. Every column has a unit of its own, far below the precision of the data.
* **Seeding** looks at the rows on a grid of whole numbers, at most 2^14 steps from the middle of the data to its edge. Distances
  are then whole numbers too, and so are the potentials that k-means++ compares.

It is also what runs on a GPU, around the search kernel of that GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..._philox import uniforms
from ..vq.reference import power_of_two
from ..vq_assign.reference import _sqrt as square_root
from ..vq_assign.reference import search

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Assign = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_GRID_BITS = 14
_LARGEST = 2.0**480  # of an element: the squares of 2^60 of them add up in float64
_HEAVIEST = 2.0**1000  # of a weight
_LANES = 8  # partial sums of a squared distance
_BLOCK_ELEMENTS = 1 << 22  # of the float64 copies that are in memory at a time
_PARALLEL_ROUNDS = 5  # of k-means||, with 2 k draws each
_LOOK_EVERY = 16  # iterations between two looks at whether a fit on a GPU has converged


def kmeans(
    x: torch.Tensor,
    weights: torch.Tensor | None,
    init: torch.Tensor | None,
    sizes: Sequence[int],
    clusters: Sequence[int],
    seeds: Sequence[int],
    method: str,
    spherical: bool,
    n_init: int,
    max_iter: int,
    tol: float,
) -> Result:
    """Every problem of a batch on its own (see ``ops/kmeans/__init__.py``)."""

    def assign(rows: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
        return search(rows, centres, "l2")

    return _batch(assign, x, weights, init, sizes, clusters, seeds, method, spherical, n_init, max_iter, tol)


def kmeans_around(vq_assign: Callable[..., torch.Tensor], *arguments: object) -> Result:
    """The same around another search kernel: what the Triton and CUDA backends run today."""

    def assign(rows: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
        return vq_assign(rows, centres, "l2", True)

    return _batch(assign, *arguments)  # type: ignore[arg-type]


def _batch(
    assign: Assign,
    x: torch.Tensor,
    weights: torch.Tensor | None,
    init: torch.Tensor | None,
    sizes: Sequence[int],
    clusters: Sequence[int],
    seeds: Sequence[int],
    method: str,
    spherical: bool,
    n_init: int,
    max_iter: int,
    tol: float,
) -> Result:
    if x.device.type == "cpu":
        _require_valid(x, weights, init, sizes)
    x = x.to(centre_dtype(x))
    fits: list[Fit] = []
    row = centre = 0
    for size, k, seed in zip(sizes, clusters, seeds, strict=True):
        rows = x[row : row + size]
        mass = None if weights is None else weights[row : row + size]
        given = None if init is None else init[centre : centre + k]
        data = Data(unit_rows(rows) if spherical else rows, mass)
        tries = []
        for restart in range(n_init):
            start = data.rows[data.grid.seeds(method, k, seed, restart)] if given is None else given
            tries.append(lloyd(assign, data, unit_rows(start) if spherical else start, spherical, max_iter, tol))
        fits.append(_best(tries))
        row, centre = row + size, centre + k
    none = x.new_empty(0, dtype=torch.float64)
    return (
        torch.cat([x.new_empty(0, x.shape[1]), *(fit.centres for fit in fits)]),
        torch.cat([none.long(), *(fit.labels for fit in fits)]),
        torch.cat([none, *(fit.inertia.reshape(1) for fit in fits)]),
        torch.cat([none.long(), *(fit.iterations.reshape(1) for fit in fits)]),
    )


class Data:
    """One problem: rows [n, d], float32 or float64, and the units in which they are added up."""

    def __init__(self, rows: torch.Tensor, weights: torch.Tensor | None) -> None:
        self.rows = rows
        n, d = rows.shape
        low, high = rows.amin(0).double(), rows.amax(0).double()
        self.middle = low / 2 + high / 2
        reach = torch.maximum(high - self.middle, self.middle - low)
        self.scale = power_of_two(_mass_bits(n) - _exponent(reach))  # of sums, [d]
        bits = min(_GRID_BITS, (60 - _ceil_log2(n * d)) // 2)
        self.grid_scale = power_of_two(bits - _exponent(reach.max()))
        values = torch.empty(n, d, dtype=torch.int16, device=rows.device)
        for block in self.blocks():
            values[block] = ((rows[block].double() - self.middle) * self.grid_scale).round().to(torch.int16)
        self.grid = Grid(values, rows.new_ones(n, dtype=torch.float64) if weights is None else weights, bits)

    def blocks(self) -> list[slice]:
        """Rows in portions whose float64 copies fit in little memory."""
        n, d = self.rows.shape
        step = max(1, _BLOCK_ELEMENTS // max(1, d))
        return [slice(start, min(n, start + step)) for start in range(0, n, step)]

    def variance(self) -> torch.Tensor:
        """Mean over the columns of the variance of the rows, unweighted and on the grid: what ``tol`` is relative to."""
        n, d = self.rows.shape
        values = self.grid.values
        squares = torch.stack([values[block].long().square().sum(0) for block in self.blocks()]).sum(0)
        mean = values.sum(0, dtype=torch.int64).double() / n
        return tree_sum(squares.double() / n - mean * mean) / d / self.grid_scale / self.grid_scale

    def distances(self, centres: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Squared distance of each row to its centre, [n] float64."""
        return torch.cat([square_norms(self.rows[block].double() - centres[labels[block]].double()) for block in self.blocks()])

    def sums(self, labels: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For each cluster the sum [k, d] of its rows less the middle, and its mass [k]; int64, in their units."""
        sums = torch.zeros(k, self.rows.shape[1], dtype=torch.int64, device=self.rows.device)
        for block in self.blocks():
            sums.index_add_(0, labels[block], self.terms(self.rows[block], self.grid.weights[block]))
        return sums, torch.zeros_like(sums[:, 0]).index_add_(0, labels, self.grid.masses)

    def terms(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What rows add to the sum of their cluster."""
        return ((rows.double() - self.middle) * weights[:, None] * self.scale).round().long()


class Grid:
    """Rows as whole numbers of at most ``bits`` bits and a sign, for seeding.

    Draw t of a round uses Philox4x32-10 with counter (t, round, restart, stage) and the seed as key; its number in [0, 1) is made
    of the upper 27 and 26 bits of the first two words. Stage 0: the rows; for k-means||, 1 its rounds and 2 the rows drawn.
    """

    def __init__(self, values: torch.Tensor, weights: torch.Tensor, bits: int) -> None:
        n, d = values.shape
        self.values, self.bits = values, bits
        self.weight_unit = _least_power_of_two(weights.max())
        self.weights = weights / self.weight_unit  # at most 1
        self.mass_scale = 2.0 ** _mass_bits(n)
        self.masses = (self.weights * self.mass_scale).round().long()
        # A squared distance is at most d (2 * 2^bits)^2; n of them stay within 2^62.
        self.potential_scale = 2.0 ** (60 - 2 * bits - _ceil_log2(n * d))

    def seeds(self, method: str, k: int, seed: int, restart: int) -> torch.Tensor:
        """Which rows a fit begins with, [k]."""
        if method == "random":
            return self.random(k, seed, restart)
        if method == "k-means++":
            return self.plus_plus(k, seed, restart, 0)
        return self.parallel(k, seed, restart)

    def random(self, k: int, seed: int, restart: int) -> torch.Tensor:
        """k different rows, each with a probability in proportion to its weight among those that are left."""
        left, chosen = self.masses.clone(), self.masses.new_zeros(k)
        for i in range(k):
            chosen[i : i + 1] = sample(left, uniforms(1, i, restart, 0, seed))
            left[chosen[i]] = 0
        return chosen

    def plus_plus(self, k: int, seed: int, restart: int, stage: int) -> torch.Tensor:
        """Greedy k-means++: of 2 + ln k rows drawn by squared distance, the one that lowers the potential most, ties to the first."""
        left, chosen = self.masses.clone(), self.masses.new_zeros(k)
        chosen[:1] = sample(left, uniforms(1, 0, restart, stage, seed))
        left[chosen[0]] = 0
        nearest = self.distances(chosen[:1])[:, 0]
        for i in range(1, k):
            potential = self.potential(nearest)
            potential = torch.where(potential.sum() > 0, potential, left)  # fewer different rows than clusters
            trials = sample(potential, uniforms(2 + int(math.log(k)), i, restart, stage, seed))
            closer = torch.minimum(nearest[:, None], self.distances(trials))
            best = self.potential(closer).sum(0).argmin()
            chosen[i] = trials[best]
            left[chosen[i]] = 0
            nearest = closer[:, best]
        return chosen

    def parallel(self, k: int, seed: int, restart: int) -> torch.Tensor:
        """k-means||: five rounds of 2 k draws by squared distance, with replacement; then k-means++ among the rows drawn."""
        drawn = sample(self.masses, uniforms(1, 0, restart, 1, seed))
        nearest = self.distances(drawn)[:, 0]
        owner = torch.zeros_like(nearest)
        for i in range(1, _PARALLEL_ROUNDS + 1):
            potential = self.potential(nearest)
            potential = torch.where(potential.sum() > 0, potential, self.masses)
            fresh = sample(potential, uniforms(2 * k, i, restart, 1, seed))
            for group in fresh.split(_LANES):
                distance = self.distances(group)
                first = distance.argmin(1, keepdim=True)
                distance = distance.gather(1, first)[:, 0]
                owner = torch.where(distance < nearest, first[:, 0] + len(drawn), owner)
                nearest = torch.minimum(nearest, distance)
                drawn = torch.cat([drawn, group])
        masses = torch.zeros_like(drawn).index_add_(0, owner, self.masses)
        few = Grid(self.values[drawn], masses.double(), self.bits)
        return drawn[few.plus_plus(k, seed, restart, 2)]

    def distances(self, chosen: torch.Tensor) -> torch.Tensor:
        """Squared distances [n, len(chosen)] int64: whole numbers below 2^53 all the way, so float64 products are exact."""
        picked = self.values[chosen].double()
        norms = picked.square().sum(1)
        out = []
        for values in self.values.split(max(1, _BLOCK_ELEMENTS // self.values.shape[1])):
            wide = values.double()
            out.append((wide.square().sum(1)[:, None] + norms - 2 * (wide @ picked.T)).long())
        return torch.cat(out)

    def potential(self, squares: torch.Tensor) -> torch.Tensor:
        """Weighted squared distances [n, ...] in whole numbers whose sum is at most 2^62."""
        weights = (self.weights * self.potential_scale).reshape(-1, *[1] * (squares.dim() - 1))
        return (weights * squares.double()).round().long()


class Fit(NamedTuple):
    """The outcome of one start."""

    centres: torch.Tensor
    labels: torch.Tensor
    inertia: torch.Tensor
    iterations: torch.Tensor


def lloyd(assign: Assign, data: Data, centres: torch.Tensor, spherical: bool, max_iter: int, tol: float) -> Fit:
    """Lloyd's algorithm; ends when no label changes or the centres move by no more than ``tol`` times the variance of the data.

    An iteration after the end changes nothing, so that the host need not know at once.
    """
    limit = data.variance() * tol
    labels = torch.full_like(data.grid.masses, -1)
    ended = torch.zeros((), dtype=torch.bool, device=labels.device)
    iterations = torch.zeros((), dtype=torch.int64, device=labels.device)
    on_cpu = labels.device.type == "cpu"
    for i in range(max_iter):
        found = assign(data.rows, centres)[:, 0]
        moved, empty = update(data, centres, found, spherical)
        same = (found == labels).all() & ~empty
        shift = tree_sum(square_norms(moved.double() - centres.double()))
        centres = torch.where(ended, centres, moved)
        labels = torch.where(ended, labels, found)
        iterations += (~ended).long()
        ended = ended | same | (shift <= limit)
        if (on_cpu or i % _LOOK_EVERY == _LOOK_EVERY - 1) and bool(ended):
            break
    labels = assign(data.rows, centres)[:, 0]
    inertia = tree_sum(data.grid.weights * data.distances(centres, labels)) * data.grid.weight_unit
    return Fit(centres, labels, inertia, iterations)


def update(data: Data, centres: torch.Tensor, labels: torch.Tensor, spherical: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The means of the clusters, [k, d] in the dtype of the rows, and whether one was empty.

    An empty cluster takes the row that is farthest from its centre (the next one the next farthest), which leaves its own cluster.
    A cluster that still has no mass keeps its centre.
    """
    k = len(centres)
    sums, masses = data.sums(labels, k)
    empty = masses == 0
    # A distance in float64 orders like its bits; the last of them give way to the number of the row, lowest first.
    distances = data.distances(centres, labels)
    n = len(labels)
    spread = (1 << _ceil_log2(n)) - 1
    keys = (distances.view(torch.int64) & ~spread) | (spread - torch.arange(n, device=labels.device))
    keys = torch.where((distances > 0) & (data.grid.masses > 0), keys, -1)
    top = keys.topk(min(n, k))
    rank = empty.long().cumsum(0) - 1  # of an empty cluster among the empty ones
    taken = rank.clamp(0, len(top.indices) - 1)
    row = top.indices[taken]
    takes = empty & (rank < len(top.indices)) & (top.values[taken] >= 0)
    terms = data.terms(data.rows[row], data.grid.weights[row]) * takes[:, None]
    mass = data.grid.masses[row] * takes
    sums = (sums + terms).index_add_(0, labels[row], -terms)
    masses = (masses + mass).index_add_(0, labels[row], -mass)
    means = data.middle + (sums.double() / data.scale) / (masses.double() / data.grid.mass_scale)[:, None]
    if spherical:
        means = unit_rows(means)
        masses = masses * (means != 0).any(1)
    return torch.where((masses > 0)[:, None], means.to(centres.dtype), centres), empty.any()


def centre_dtype(x: torch.Tensor) -> torch.dtype:
    """float64 for float64 rows, and float32 for all else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _require_valid(x: torch.Tensor, weights: torch.Tensor | None, init: torch.Tensor | None, sizes: Sequence[int]) -> None:
    if not bool(torch.isfinite(x).all()):
        raise RuntimeError("kmeans: x holds NaN or infinity; remove or replace those rows")
    if bool((x.abs() > _LARGEST).any()):
        raise RuntimeError("kmeans: x holds values beyond 2^480 (3e144), whose squares overflow; scale x down")
    for mass in () if weights is None else weights.split(list(sizes)):
        if not bool((mass >= 0).all() and (mass <= _HEAVIEST).all() and (mass > 0).any()):
            raise RuntimeError("kmeans: weights must be finite (at most 2^1000), not negative and not all zero")
    if init is not None and not bool((init.double().abs() <= _LARGEST).all()):
        raise RuntimeError("kmeans: init must be finite, and at most 2^480 (3e144)")


def unit_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, d] at length 1, rounded to their dtype; a row of zeros stays."""
    wide = rows.double()
    norms = square_root(square_norms(wide))
    return torch.where(norms[:, None] > 0, wide / norms[:, None], 0.0).to(rows.dtype)


def square_norms(rows: torch.Tensor) -> torch.Tensor:
    """Sum of squares of each row [n, d] of float64: eight partial sums over every eighth element, in order."""
    total = rows.new_zeros(len(rows), _LANES)
    for start in range(0, rows.shape[1], _LANES):
        part = rows[:, start : start + _LANES]
        total[:, : part.shape[1]] += part * part
    total = total[:, :4] + total[:, 4:]
    total = total[:, :2] + total[:, 2:]
    return total[:, 0] + total[:, 1]


def tree_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum of values [n] by halves: value i and value i + half, half a power of two."""
    size = 1 << _ceil_log2(max(1, len(values)))
    values = torch.cat([values, values.new_zeros(size - len(values))])
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    return values.sum()


def sample(masses: torch.Tensor, draws: npt.NDArray[np.float64]) -> torch.Tensor:
    """For each draw in [0, 1) the first row whose running sum of masses [n] int64 exceeds that part of their total; 0 if all are 0."""
    running = masses.cumsum(0)
    total = running[-1]
    # Plain numbers go to a device with the launch; a tensor of them would have to be copied there.
    targets = torch.stack([(total.double() * draw).long() for draw in draws.tolist()]).minimum(total - 1)
    return torch.searchsorted(running, targets, right=True)


def _best(fits: list[Fit]) -> Fit:
    """The fit of the lowest inertia, the first of equals."""
    best, *others = fits
    for fit in others:
        better = fit.inertia < best.inertia
        best = Fit(*(torch.where(better, new, old) for new, old in zip(fit, best, strict=True)))
    return best


def _exponent(values: torch.Tensor) -> torch.Tensor:
    """The least e >= -900 with values < 2^e."""
    return torch.frexp(values).exponent.clamp(min=-900).long()


def _least_power_of_two(value: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below a value, 2^-900 at least."""
    mantissa, exponent = torch.frexp(value)
    return power_of_two((exponent - (mantissa == 0.5).int()).clamp(min=-900).long())


def _mass_bits(n: int) -> int:
    """n whole numbers of at most 2^this add up to at most 2^62."""
    return 62 - _ceil_log2(n)


def _ceil_log2(n: int) -> int:
    return (n - 1).bit_length()
