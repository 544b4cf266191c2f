"""The definition of ``kmeans``: seeding, Lloyd iterations and inertia, so arranged that every backend agrees to the bit.

What ``kmeans_step`` does is the same everywhere already (``ops/kmeans_step/reference.py``). Seeding looks at the rows on a grid of
whole numbers, at most 2^14 steps from the middle of the data to its edge: distances are then whole numbers too, and so are the
potentials that k-means++ compares.

It is also what runs on a GPU, around the step of that GPU.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..._library import triton_available
from ..._philox import uniforms
from ..kmeans_step import reference as steps
from ..vq_assign.reference import _sqrt as square_root

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Step = Callable[..., steps.Step]
Advance = Callable[["Data", "State", torch.Tensor, steps.Step, bool], None]

_GRID_BITS = 14
_LANES = 8  # candidates that are compared with the rows at once
_BLOCK_ELEMENTS = 1 << 22  # of the float64 copies that are in memory at a time
PARALLEL_ROUNDS = 5  # of k-means||, with 2 k draws each
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
    """A batch of problems (see ``ops/kmeans/__init__.py``)."""
    parts = Parts(steps.kmeans_step, Grid, advance)
    return batch(parts, x, weights, init, sizes, clusters, seeds, method, spherical, n_init, max_iter, tol)


def kmeans_fallback(*arguments: object) -> Result:
    """The same by the faster search."""
    return batch(Parts(steps.kmeans_step_fallback, Grid, advance), *arguments)  # type: ignore[arg-type]


def kmeans_around(kmeans_step: Step, *arguments: object) -> Result:
    """The same around another step; the seeding before it and what follows it in Triton, where that runs."""
    parts = Parts(kmeans_step, Grid, advance)
    if triton_available():
        parts = importlib.import_module(f"{__package__}.triton").parts(kmeans_step)
    return batch(parts, *arguments)  # type: ignore[arg-type]


class Parts(NamedTuple):
    """What a fit is made of."""

    step: Step
    grid: type[Grid]
    advance: Advance


def batch(
    parts: Parts,
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
    """Every problem of a batch on its own, made of these parts."""
    if x.device.type == "cpu":
        _require_valid(x, weights, init, sizes, clusters)
    fits: list[Fit] = []
    row = centre = 0
    for size, k, seed in zip(sizes, clusters, seeds, strict=True):
        rows = x[row : row + size]
        mass = None if weights is None else weights[row : row + size]
        given = None if init is None else init[centre : centre + k]
        data = Data(unit_rows(rows.to(centre_dtype(x))) if spherical else rows, mass, parts.grid)
        tries = []
        for restart in range(n_init):
            start = data.rows[data.grid.seeds(method, k, seed, restart)].to(centre_dtype(x)) if given is None else given
            tries.append(lloyd(parts, data, unit_rows(start) if spherical else start, spherical, max_iter, tol))
        fits.append(_best(tries))
        row, centre = row + size, centre + k
    none = x.new_empty(0, dtype=torch.float64)
    return (
        torch.cat([x.new_empty(0, x.shape[1], dtype=centre_dtype(x)), *(fit.centres for fit in fits)]),
        torch.cat([none.long(), *(fit.labels for fit in fits)]),
        torch.cat([none, *(fit.inertia.reshape(1) for fit in fits)]),
        torch.cat([none.long(), *(fit.iterations.reshape(1) for fit in fits)]),
    )


class Data:
    """One problem: rows [n, d], their weights at most 1 or None, the units in which they are added up, and the grid for seeding."""

    def __init__(self, rows: torch.Tensor, weights: torch.Tensor | None, grid: type[Grid]) -> None:
        self.rows, self._grid = rows, grid
        self.middle, self.scale, self.mass_scale, self.weight_unit = steps.units(rows, weights)
        self.weights = None if weights is None else weights / self.weight_unit

    @functools.cached_property
    def grid(self) -> Grid:
        """The rows as whole numbers."""
        n, d = self.rows.shape
        bits = min(_GRID_BITS, (60 - steps.ceil_log2(n * d)) // 2)
        # The reach of a column is below 2^exponent, and its scale is 2^(mass_bits - exponent).
        self.grid_scale = self.scale.amin() * 2.0 ** (bits - steps.mass_bits(n))
        values = torch.empty(n, d, dtype=torch.int16, device=self.rows.device)
        for block in steps.blocks(self.rows):
            values[block] = ((self.rows[block].double() - self.middle) * self.grid_scale).round().to(torch.int16)
        return self._grid(values, self.rows.new_ones(n, dtype=torch.float64) if self.weights is None else self.weights, bits)

    def variance(self) -> torch.Tensor:
        """Mean over the columns of the variance of the rows, unweighted and on the grid: what ``tol`` is relative to."""
        n, d = self.rows.shape
        values = self.grid.values
        squares = torch.stack([values[block].long().square().sum(0) for block in steps.blocks(values)]).sum(0)
        mean = values.sum(0, dtype=torch.int64).double() / n
        return steps.tree_sum(squares.double() / n - mean * mean) / d / self.grid_scale / self.grid_scale

    def step(self, step: Step, centres: torch.Tensor, with_inertia: bool) -> steps.Step:
        """``kmeans_step`` of these rows."""
        return step(self.rows, centres, self.weights, self.middle, self.scale, self.mass_scale, with_inertia)


class Grid:
    """Rows as whole numbers of at most ``bits`` bits and a sign, for seeding.

    Draw t of a round uses Philox4x32-10 with counter (t, round, restart, stage) and the seed as key; its number in [0, 1) is made
    of the upper 27 and 26 bits of the first two words. Stage 0: the rows; for k-means||, 1 its rounds and 2 the rows drawn.
    """

    def __init__(self, values: torch.Tensor, weights: torch.Tensor, bits: int) -> None:
        n, d = values.shape
        self.values, self.bits = values, bits
        self.weights = weights  # at most 1
        self.masses = (weights * 2.0 ** steps.mass_bits(n)).round().long()
        # A squared distance is at most d (2 * 2^bits)^2; n of them stay within 2^62.
        self.potential_scale = 2.0 ** (60 - 2 * bits - steps.ceil_log2(n * d))

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
            left.index_fill_(0, chosen[i : i + 1], 0)
        return chosen

    def plus_plus(self, k: int, seed: int, restart: int, stage: int) -> torch.Tensor:
        """Greedy k-means++: of 2 + ln k rows drawn by squared distance, the one that lowers the potential most, ties to the first."""
        left, chosen = self.masses.clone(), self.masses.new_zeros(k)
        chosen[:1] = sample(left, uniforms(1, 0, restart, stage, seed))
        left.index_fill_(0, chosen[:1], 0)
        nearest = self.distances(chosen[:1])[:, 0]
        for i in range(1, k):
            potential = self.potential(nearest)
            potential = torch.where(potential.sum() > 0, potential, left)  # fewer different rows than clusters
            trials = sample(potential, uniforms(2 + int(math.log(k)), i, restart, stage, seed))
            closer = torch.minimum(nearest[:, None], self.distances(trials))
            best = self.potential(closer).sum(0).argmin(0, keepdim=True)  # not a number: an index on a GPU would be waited for
            chosen[i : i + 1] = trials.index_select(0, best)
            left.index_fill_(0, chosen[i : i + 1], 0)
            nearest = closer.index_select(1, best)[:, 0]
        return chosen

    def parallel(self, k: int, seed: int, restart: int) -> torch.Tensor:
        """k-means||: five rounds of 2 k draws by squared distance, with replacement; then k-means++ among the rows drawn."""
        drawn, owner = self.oversampled(k, seed, restart)
        masses = torch.zeros_like(drawn).index_add_(0, owner, self.masses)
        few = type(self)(self.values[drawn], masses.double() / steps.least_power_of_two(masses.max().double()), self.bits)
        return drawn[few.plus_plus(k, seed, restart, 2)]

    def oversampled(self, k: int, seed: int, restart: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows drawn, and for each row of the grid which of them is nearest, the first of equals."""
        drawn = sample(self.masses, uniforms(1, 0, restart, 1, seed))
        nearest = self.distances(drawn)[:, 0]
        owner = torch.zeros_like(nearest)
        for i in range(1, PARALLEL_ROUNDS + 1):
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
        return drawn, owner

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


class State(NamedTuple):
    """Where a fit is, on its device; ``advance`` writes into it."""

    centres: torch.Tensor
    """``[k, d]``"""
    ended: torch.Tensor
    """scalar, bool: what follows changes nothing."""
    iterations: torch.Tensor
    """scalar, int64"""


def lloyd(parts: Parts, data: Data, centres: torch.Tensor, spherical: bool, max_iter: int, tol: float) -> Fit:
    """Lloyd's algorithm; ends when the centres move by no more than ``tol`` times the variance of the data.

    They do not move at all when no label changes: the sums are integers. An iteration after the end changes nothing, so that the host
    need not know at once.
    """
    limit = data.variance() * tol if tol > 0 else torch.zeros_like(data.weight_unit)
    state = State(centres.clone(), torch.zeros_like(limit, dtype=torch.bool), torch.zeros_like(limit, dtype=torch.int64))
    for i in range(max_iter):
        parts.advance(data, state, limit, data.step(parts.step, state.centres, False), spherical)
        if _looks(state.ended, i) and bool(state.ended):
            break
    labels, _, _, inertia = data.step(parts.step, state.centres, True)
    return Fit(state.centres, labels, inertia * data.weight_unit, state.iterations)


def _looks(ended: torch.Tensor, i: int) -> bool:
    """Whether the host asks after iteration i if the fit has ended: a GPU is stalled by that, and its captured work has no answer."""
    if ended.device.type == "cpu":
        return True
    return i % _LOOK_EVERY == _LOOK_EVERY - 1 and not torch.cuda.is_current_stream_capturing()


def advance(data: Data, state: State, limit: torch.Tensor, found: steps.Step, spherical: bool) -> None:
    """Ends an iteration: moves the centres to the means of what ``kmeans_step`` found."""
    labels, sums, masses, _ = found
    moved = update(data, state.centres, labels, sums, masses, spherical)
    shift = steps.tree_sum(steps.square_norms(moved.double() - state.centres.double()))
    state.centres.copy_(torch.where(state.ended, state.centres, moved))
    state.iterations.add_(~state.ended)
    state.ended.logical_or_(~(shift > limit))


def update(
    data: Data, centres: torch.Tensor, labels: torch.Tensor, sums: torch.Tensor, masses: torch.Tensor, spherical: bool
) -> torch.Tensor:
    """The means of the clusters, [k, d] in the dtype of the centres, of what ``kmeans_step`` found.

    An empty cluster takes the row that is farthest from its centre (the next one the next farthest), which leaves its own cluster.
    A cluster that still has no mass keeps its centre.
    """
    n, k = len(labels), len(centres)
    empty = masses == 0
    # A distance in float64 orders like its bits; the last of them give way to the number of the row, lowest first.
    distances = steps.distances(data.rows, centres, labels)
    row_masses = steps.row_masses(data.rows, data.weights, data.mass_scale)
    spread = (1 << steps.ceil_log2(n)) - 1
    keys = (distances.view(torch.int64) & ~spread) | (spread - torch.arange(n, device=labels.device))
    keys = torch.where((distances > 0) & (row_masses > 0), keys, -1)
    top = keys.topk(min(n, k))
    rank = empty.long().cumsum(0) - 1  # of an empty cluster among the empty ones
    taken = rank.clamp(0, len(top.indices) - 1)
    row = top.indices[taken]
    takes = empty & (rank < len(top.indices)) & (top.values[taken] >= 0)
    weights = None if data.weights is None else data.weights[row]
    terms = steps.terms(data.rows[row], weights, data.middle, data.scale) * takes[:, None]
    mass = row_masses[row] * takes
    sums = (sums + terms).index_add_(0, labels[row], -terms)
    masses = (masses + mass).index_add_(0, labels[row], -mass)
    means = data.middle + (sums.double() / data.scale) / (masses.double() / data.mass_scale)[:, None]
    if spherical:
        means = unit_rows(means)
        masses = masses * (means != 0).any(1)
    return torch.where((masses > 0)[:, None], means.to(centres.dtype), centres)


def centre_dtype(x: torch.Tensor) -> torch.dtype:
    """float64 for float64 rows, and float32 for all else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _require_valid(
    x: torch.Tensor, weights: torch.Tensor | None, init: torch.Tensor | None, sizes: Sequence[int], clusters: Sequence[int]
) -> None:
    masses = [None] * len(sizes) if weights is None else weights.split(list(sizes))
    given = [None] * len(sizes) if init is None else init.split(list(clusters))
    for i, (rows, mass, centres) in enumerate(zip(x.split(list(sizes)), masses, given, strict=True)):
        name = "kmeans" if len(sizes) == 1 else f"kmeans: problem {i}"
        steps.require_valid(name, rows, mass)
        if centres is not None:
            steps.require_valid_centres(name, "init", centres)


def unit_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, d] at length 1, rounded to their dtype; a row of zeros stays."""
    wide = rows.double()
    norms = square_root(steps.square_norms(wide))
    return torch.where(norms[:, None] == 0, 0.0, wide / norms[:, None]).to(rows.dtype)  # NaN stays NaN


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
