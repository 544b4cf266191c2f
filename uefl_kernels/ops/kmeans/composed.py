"""Compose ``kmeans`` from ``kmeans_lloyd``, and ``kmeans_lloyd`` from ``kmeans_step``.

The parts are seeding, Lloyd iterations and inertia.

All backends give the same bits.

Seeding sees the rows on a grid of whole numbers, with at most 2^14 steps from the middle of the data to its
edge. Distances are then whole numbers, too, and so are the potentials that k-means++ compares.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..._dtypes import result_dtype
from ..._library import SymInts, triton_available
from ..kmeans_step import composed as steps
from ..vq_assign.distances import square_root
from .grid import Grid as Grid

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
KMeansStepFunction = Callable[..., steps.Result]
Advance = Callable[["Problem", "FitState", torch.Tensor, steps.Result, bool], None]
LloydFunction = Callable[["Problem", torch.Tensor, torch.Tensor, bool, int], "Fit"]

_GRID_BITS = 14
_LOOK_EVERY = 16  # iterations after which the host asks a GPU whether the fit has converged


class Arguments(NamedTuple):
    """Arguments of the op: a batch of problems."""

    x: torch.Tensor
    """``[N, d]``, the rows of all problems"""
    weights: torch.Tensor | None
    """``[N]`` float64"""
    init: torch.Tensor | None
    """``[K, d]``, the centers of all problems"""
    sizes: SymInts
    """rows of each problem"""
    clusters: SymInts
    """clusters of each problem"""
    seeds: Sequence[int]
    method: str
    spherical: bool
    n_init: int
    max_iter: int
    tol: float


class LloydArguments(NamedTuple):
    """Arguments of ``kmeans_lloyd``: one problem."""

    x: torch.Tensor
    """``[N, d]``"""
    centers: torch.Tensor
    """``[k, d]``, the first ones"""
    weights: torch.Tensor | None
    """``[N]`` float64, at most 1"""
    middle: torch.Tensor
    """``[d]``; this and the next two arguments are as in :class:`KMeansUnits`"""
    scale: torch.Tensor
    """``[d]``"""
    mass_scale: torch.Tensor
    """scalar"""
    limit: torch.Tensor
    """scalar, float64: the fit ends if the squared movement of the centers, summed, is at most this."""
    spherical: bool
    max_iter: int


def fallback(given: Arguments) -> Result:
    """Compute ``kmeans`` where no kernel runs."""
    return batch(Backend(by_steps(torch.ops.uefl.kmeans_step.default, advance), Grid), given)


def around(kmeans_lloyd: Callable[..., Result], given: Arguments) -> Result:
    """Compute ``kmeans`` around the ``kmeans_lloyd`` of a backend.

    Seeding is in Triton where Triton is installed.
    """

    def lloyd(data: Problem, centers: torch.Tensor, limit: torch.Tensor, *options: Any) -> Fit:
        units = data.middle, data.scale, data.mass_scale
        found = Fit(*kmeans_lloyd(data.rows, centers, data.weights, *units, limit, *options))
        return found._replace(inertia=found.inertia * data.weight_unit)

    return batch(Backend(lloyd, _in_triton("TritonGrid", Grid)), given)


def lloyd_fallback(given: LloydArguments) -> Result:
    """Compute ``kmeans_lloyd`` where no kernel runs."""
    return lloyd_of(torch.ops.uefl.kmeans_step.default, advance, given)


def lloyd_around(kmeans_step: KMeansStepFunction, given: LloydArguments) -> Result:
    """Compute ``kmeans_lloyd`` around the step of a backend.

    All else is in Triton where Triton is installed.
    """
    return lloyd_of(kmeans_step, _in_triton("advance", advance), given)


def lloyd_of(step: KMeansStepFunction, advance: Advance, given: LloydArguments) -> Result:
    """Compute ``kmeans_lloyd`` with a function for the step and one for the end of an iteration."""
    units = given.middle, given.scale, given.mass_scale, torch.ones_like(given.mass_scale)
    data = Problem(given.x, given.weights, Grid, units)
    return lloyd(step, advance, data, given.centers, given.limit, given.spherical, given.max_iter)


def _in_triton(name: str, otherwise: Any) -> Any:
    """Return the part of a fit with this name in Triton, where Triton is installed."""
    return (
        getattr(importlib.import_module(f"{__package__}.triton"), name) if triton_available() else otherwise
    )


class Backend(NamedTuple):
    """The functions of a fit that a backend replaces."""

    lloyd: LloydFunction
    grid: type[Grid]


def batch(backend: Backend, given: Arguments) -> Result:
    """Solve each problem of a batch."""
    x, weights, init, spherical = given.x, given.weights, given.init, given.spherical
    if x.device.type == "cpu":
        _require_valid(given)
    fits: list[Fit] = []
    row = center = 0
    for size, k, seed in zip(given.sizes, given.clusters, given.seeds, strict=True):
        rows = x[row : row + size]
        mass = None if weights is None else weights[row : row + size]
        start = None if init is None else init[center : center + k]
        data = Problem(unit_rows(rows.to(result_dtype(x))) if spherical else rows, mass, backend.grid)
        request = FitOptions(given.method, start, k, seed, given.n_init, given.max_iter, given.tol)
        fits.append(fit(backend, data, request, spherical))
        row, center = row + size, center + k
    none = x.new_empty(0, dtype=torch.float64)
    return (
        torch.cat([x.new_empty(0, x.shape[1], dtype=result_dtype(x)), *(fit.centers for fit in fits)]),
        torch.cat([none.long(), *(fit.labels for fit in fits)]),
        torch.cat([none, *(fit.inertia.reshape(1) for fit in fits)]),
        torch.cat([none.long(), *(fit.iterations.reshape(1) for fit in fits)]),
    )


class FitOptions(NamedTuple):
    """The request of a fit."""

    method: str
    given: torch.Tensor | None
    """first centers ``[k, d]``, instead of seeds"""
    k: int
    seed: int
    n_init: int
    max_iter: int
    tol: float


def fit(backend: Backend, data: Problem, request: FitOptions, spherical: bool) -> Fit:
    """Return the best of ``n_init`` starts from seeds or from given centers."""
    method, given, k, seed, n_init, max_iter, tol = request
    if given is not None and spherical:  # seeds are rows, which have length 1 already
        given = unit_rows(given)
    limit = data.limit(tol)
    tries = []
    for restart in range(n_init):
        start = data.take(data.grid.seeds(method, k, seed, restart)) if given is None else given
        tries.append(backend.lloyd(data, start.to(result_dtype(start)), limit, spherical, max_iter))
    return _best(tries)


class Problem:
    """One problem: rows [n, d], weights of at most 1 or None, units of the sums, and the grid for seeding.

    The default units follow from the rows and weights. ``blocks.py`` and ``kmeans_sparse`` have subclasses.
    """

    looks_for_empty = False

    def __init__(
        self,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        grid: type[Grid],
        units: steps.Units | None = None,
    ) -> None:
        self.rows, self._grid = rows, grid
        self.n = len(rows)
        self.middle, self.scale, self.mass_scale, self.weight_unit = units or steps.units(rows, weights)
        self.weights = None if weights is None else weights / self.weight_unit

    @functools.cached_property
    def grid(self) -> Grid:
        """Return the rows as whole numbers."""
        n, d = self.rows.shape
        values = torch.empty(n, d, dtype=torch.int16, device=self.rows.device)
        for block in steps.blocks(self.rows):
            values[block] = self.quantized(self.rows[block])
        return self._grid(
            values,
            self.rows.new_ones(n, dtype=torch.float64) if self.weights is None else self.weights,
            self.bits,
        )

    @functools.cached_property
    def bits(self) -> int:
        """Return the number of bits of an element on the grid, without the sign."""
        return min(_GRID_BITS, (60 - steps.ceil_log2(self.n * len(self.scale))) // 2)

    @functools.cached_property
    def grid_scale(self) -> torch.Tensor:
        """Return the number of grid steps in a distance of 1.

        The reach of a column is below 2^exponent, and its scale is 2^(mass_bits - exponent).
        """
        return self.scale.amin() * 2.0 ** (self.bits - steps.mass_bits(self.n))

    def quantized(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows on the grid, int16."""
        return ((rows.double() - self.middle) * self.grid_scale).round().to(torch.int16)

    def variance(self) -> torch.Tensor:
        """Return the mean variance of the columns, without weights and on the grid.

        ``tol`` is relative to it.
        """
        values = self.grid.values
        squares = torch.stack([values[block].long().square().sum(0) for block in steps.blocks(values)]).sum(0)
        return self._variance(values.sum(0, dtype=torch.int64), squares)

    def limit(self, tol: float) -> torch.Tensor:
        """Return the squared movement of the centers at which a fit ends."""
        return self.variance() * tol if tol > 0 else torch.zeros_like(self.weight_unit)

    def _variance(self, sums: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        mean = sums.double() / self.n
        return (
            steps.tree_sum(squares.double() / self.n - mean * mean)
            / len(mean)
            / self.grid_scale
            / self.grid_scale
        )

    def step(self, step: KMeansStepFunction, centers: torch.Tensor, with_inertia: bool) -> steps.Result:
        """Run ``kmeans_step`` on these rows."""
        return step(*self.step_of(self.rows, centers, self.weights, with_inertia))

    def step_of(
        self, rows: torch.Tensor, centers: torch.Tensor, weights: torch.Tensor | None, with_inertia: bool
    ) -> steps.Arguments:
        """Return the arguments of ``kmeans_step`` for some rows, in the units of these data."""
        return steps.Arguments(rows, centers, weights, self.middle, self.scale, self.mass_scale, with_inertia)

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the rows with these numbers."""
        return self.rows[numbers]

    def farthest(self, centers: torch.Tensor, labels: torch.Tensor) -> FarthestRows:
        """Return the k rows that are farthest from their centers."""
        keys = self.keys(self.rows, centers, labels, self.weights, 0)
        top = keys.topk(min(self.n, len(centers)))
        row = top.indices
        return FarthestRows(
            top.values, self.rows[row], None if self.weights is None else self.weights[row], labels[row]
        )

    def keys(
        self,
        rows: torch.Tensor,
        centers: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor | None,
        first: int,
    ) -> torch.Tensor:
        """Return whole numbers in the order of the distances of rows to their centers, -1 for zero.

        ``first`` is the number of the first row.

        Distances in float64 have the order of their bits. The number of the row replaces the last bits: of
        equal distances, the lowest row comes first.
        """
        distances = steps.distances(rows, centers, labels)
        spread = (1 << steps.ceil_log2(self.n)) - 1
        numbers = torch.arange(first, first + len(rows), device=labels.device)
        keys = (distances.view(torch.int64) & ~spread) | (spread - numbers)
        return torch.where((distances > 0) & (steps.row_masses(rows, weights, self.mass_scale) > 0), keys, -1)


class FarthestRows(NamedTuple):
    """Rows [m] far from their centers, the farthest first."""

    keys: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor | None
    labels: torch.Tensor


class Fit(NamedTuple):
    """The outcome of one start."""

    centers: torch.Tensor
    labels: torch.Tensor
    inertia: torch.Tensor
    iterations: torch.Tensor


class FitState(NamedTuple):
    """State of a fit on its device.

    ``advance`` updates it.
    """

    centers: torch.Tensor
    """``[k, d]``"""
    ended: torch.Tensor
    """scalar, bool: later iterations change nothing."""
    iterations: torch.Tensor
    """scalar, int64"""


def by_steps(step: KMeansStepFunction, advance: Advance) -> LloydFunction:
    """Return Lloyd's algorithm with a function for the step and one for the end of an iteration."""
    return functools.partial(lloyd, step, advance)


def lloyd(
    step: KMeansStepFunction,
    advance: Advance,
    data: Problem,
    centers: torch.Tensor,
    limit: torch.Tensor,
    spherical: bool,
    max_iter: int,
) -> Fit:
    """Run Lloyd's algorithm until the squared movement of the centers is at most ``limit``.

    Sums are integers, so centers do not move when no label changes. Iterations after the end change nothing,
    so the host may learn of the end later.
    """
    state = FitState(
        centers.clone(), torch.zeros_like(limit, dtype=torch.bool), torch.zeros_like(limit, dtype=torch.int64)
    )
    for i in range(max_iter):
        advance(data, state, limit, data.step(step, state.centers, False), spherical)
        if _looks(state.ended, i) and bool(state.ended):
            break
    labels, _, _, inertia = data.step(step, state.centers, True)
    return Fit(state.centers, labels, inertia * data.weight_unit, state.iterations)


def _looks(ended: torch.Tensor, i: int) -> bool:
    """Return True if the host asks after iteration i whether the fit has ended.

    It seldom asks a GPU, because it would wait for the GPU, and never while a graph is captured.
    """
    if ended.device.type == "cpu":
        return True
    return i % _LOOK_EVERY == _LOOK_EVERY - 1 and not torch.cuda.is_current_stream_capturing()


def advance(
    data: Problem, state: FitState, limit: torch.Tensor, found: steps.Result, spherical: bool
) -> None:
    """End an iteration: move the centers to the means of the clusters."""
    labels, sums, masses, _ = found
    moved = update(data, state.centers, labels, sums, masses, spherical)
    shift = steps.tree_sum(steps.square_norms(moved.double() - state.centers.double()))
    state.centers.copy_(torch.where(state.ended, state.centers, moved))
    state.iterations.add_(~state.ended)
    state.ended.logical_or_(~(shift > limit))


def update(
    data: Problem,
    centers: torch.Tensor,
    labels: torch.Tensor,
    sums: torch.Tensor,
    masses: torch.Tensor,
    spherical: bool,
) -> torch.Tensor:
    """Return the means of the clusters, [k, d] in the dtype of the centers.

    An empty cluster takes the row that is farthest from its center (the next one the next farthest), which
    leaves its own cluster. A cluster that still has no mass keeps its center.
    """
    empty = masses == 0
    # the test may save a read of the rows, but the host would wait for a GPU
    if not data.looks_for_empty or bool(empty.any()):
        far = data.farthest(centers, labels)
        rank = empty.long().cumsum(0) - 1  # number of an empty cluster among the empty ones
        taken = rank.clamp(0, len(far.keys) - 1)
        takes = empty & (rank < len(far.keys)) & (far.keys[taken] >= 0)
        weights = None if far.weights is None else far.weights[taken]
        terms = steps.terms(far.rows[taken], weights, data.middle, data.scale) * takes[:, None]
        mass = steps.row_masses(far.rows[taken], weights, data.mass_scale) * takes
        sums = (sums + terms).index_add_(0, far.labels[taken], -terms)
        masses = (masses + mass).index_add_(0, far.labels[taken], -mass)
    means = data.middle + (sums.double() / data.scale) / (masses.double() / data.mass_scale)[:, None]
    if spherical:
        means = unit_rows(means)
        masses = masses * (means != 0).any(1)
    return torch.where((masses > 0)[:, None], means.to(centers.dtype), centers)


def _require_valid(given: Arguments) -> None:
    sizes, clusters = list(given.sizes), list(given.clusters)
    masses = [None] * len(sizes) if given.weights is None else given.weights.split(sizes)
    starts = [None] * len(sizes) if given.init is None else given.init.split(clusters)
    for i, (rows, mass, centers) in enumerate(zip(given.x.split(sizes), masses, starts, strict=True)):
        name = "kmeans" if len(sizes) == 1 else f"kmeans: problem {i}"
        steps.require_valid(name, rows, mass)
        if centers is not None:
            steps.require_valid_centers(name, "init", centers)


def unit_rows(rows: torch.Tensor) -> torch.Tensor:
    """Scale rows [n, d] to length 1, rounded to their dtype.

    A row of zeros stays.
    """
    wide = rows.double()
    norms = square_root(steps.square_norms(wide))
    return torch.where(norms[:, None] == 0, 0.0, wide / norms[:, None]).to(rows.dtype)  # NaN stays NaN


def _best(fits: list[Fit]) -> Fit:
    """Return the fit with the lowest inertia, and the first one of equal fits."""
    best, *others = fits
    for fit in others:
        better = fit.inertia < best.inertia
        best = Fit(*(torch.where(better, new, old) for new, old in zip(fit, best, strict=True)))
    return best
