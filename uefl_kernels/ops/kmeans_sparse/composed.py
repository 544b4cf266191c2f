"""k-means of sparse rows in plain PyTorch and SciPy, with the centers and labels of the same dense rows.

Without weights, centers and labels have the same bits as for dense rows.

* **Labels**: scores |c|^2 / 2 - x.c in float64, with a bound on their rounding.
  A row that the bound does not decide is searched as a dense row.
* **Sums**: a zero adds the same whole number to its column in every row, so a non-zero adds only its
  difference from this number. With weights the number depends on the row. It is then rounded once for a whole
  cluster, and centers agree with the centers of dense rows up to rounding.
* **Seeding**: a row of zeros on the grid is subtracted from all rows. The differences are sparse, and they
  have the same distances.

Inertia is the sum of |x|^2 - 2 x.c + |c|^2: it agrees with dense rows up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from ..._library import forced, resolve
from ..kmeans import composed, grid
from ..kmeans_labels import kmeans_distances
from ..kmeans_step import composed as steps
from ..vq_assign.distances import square_root

_BLOCK_BYTES = 1 << 24  # of rows that are made dense at once
_CANCELED = 2.0**-20  # a squared distance below this part of |x|^2 + |c|^2 is computed from dense rows
LabelsAndDistances = tuple[torch.Tensor, torch.Tensor]


class Arguments(NamedTuple):
    """Arguments of ``kmeans_sparse``."""

    values: torch.Tensor
    """``[nnz]`` float32 or float64; this and the next two arguments are the CSR format, with ascending
    columns"""
    columns: torch.Tensor
    """``[nnz]`` int32"""
    offsets: torch.Tensor
    """``[N + 1]`` int64"""
    init: torch.Tensor
    """``[k, d]`` in the dtype of the values"""
    weights: torch.Tensor | None
    """``[N]`` float64"""
    spherical: bool
    max_iter: int
    tol: float


class SearchArguments(NamedTuple):
    """Arguments of ``kmeans_sparse_labels``, ``kmeans_sparse_distances`` and ``kmeans_sparse_products``.

    Rows are as in ``Arguments``.
    """

    values: torch.Tensor
    columns: torch.Tensor
    offsets: torch.Tensor
    centers: torch.Tensor
    """``[k, d]`` float64"""


def kernels() -> Any:
    """Return the namespace of the ops.

    They run on the CPU for every backend, as SciPy does.
    """
    return torch.ops.uefl_reference if forced() == "reference" else torch.ops.uefl


def fallback(given: Arguments) -> composed.Fit:
    """Compute ``kmeans_sparse`` where no kernel runs."""
    lloyd = composed.by_steps(torch.ops.uefl.kmeans_step.default, composed.advance)
    data = SparseData(SparseRows(*given[:3], given.init.shape[1]), given.weights)
    return lloyd(data, given.init, data.limit(given.tol), given.spherical, given.max_iter)


def require_order(given: SearchArguments) -> None:
    """Raise RuntimeError if columns do not ascend in each row within the columns of the centers."""
    _, columns, offsets, centers = given
    falls = columns.diff() <= 0
    starts = offsets[1:-1][(offsets[1:-1] > 0) & (offsets[1:-1] < len(columns))].unique()
    falls[starts - 1] = False  # between two rows
    inside = len(columns) == 0 or (int(columns.min()) >= 0 and int(columns.max()) < centers.shape[1])
    if not inside or bool(falls.any()) or bool((offsets.diff() < 0).any()):
        raise RuntimeError("kmeans_sparse: columns must ascend in each row, from 0 to d - 1")


def labels(given: SearchArguments) -> LabelsAndDistances:
    """Compute ``kmeans_sparse_labels``."""
    require_order(given)
    steps.require_valid("kmeans", given.values, None)
    rows = SparseRows(*given[:3], given.centers.shape[1])
    return rows.nearest(given.centers.to(rows.dtype))


def distances(given: SearchArguments) -> torch.Tensor:
    """Compute ``kmeans_sparse_distances``."""
    require_order(given)
    steps.require_valid("kmeans", given.values, None)
    rows = SparseRows(*given[:3], given.centers.shape[1])
    return rows.distances(given.centers.to(rows.dtype))


def products(given: SearchArguments) -> torch.Tensor:
    """Compute ``kmeans_sparse_products``."""
    return SparseRows(*given[:3], given.centers.shape[1]).products(given.centers)


class SparseRows:
    """Rows [n, d] in the CSR format of ``Arguments``."""

    def __init__(self, values: torch.Tensor, columns: torch.Tensor, offsets: torch.Tensor, d: int) -> None:
        self.values, self.offsets, self.n, self.d = values, offsets, len(offsets) - 1, d
        self.column_numbers, self.dtype = columns, values.dtype

    @property
    def format(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the first arguments of an op."""
        return self.values, self.column_numbers, self.offsets

    def unit(self) -> SparseRows:
        """Return the rows scaled to length 1, as ``composed.unit_rows`` does."""
        steps.require_valid("kmeans", self.values, None)
        return SparseRows(self._scaled(self.values), self.column_numbers, self.offsets, self.d)

    @functools.cached_property
    def wide(self) -> torch.Tensor:
        """Return the values in float64."""
        return self.values.double()

    @functools.cached_property
    def squares(self) -> torch.Tensor:
        """Return the squared length of each row."""
        return torch.from_numpy(self.matrix_of(self.wide.square()) @ np.ones(self.d))

    @functools.cached_property
    def matrix(self) -> Any:
        """Return the rows in SciPy."""
        return self.matrix_of(self.values)

    @functools.cached_property
    def wide_matrix(self) -> Any:
        """Return the rows in SciPy, in float64."""
        return self.matrix_of(self.wide)

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """Return the row of each non-zero."""
        return torch.arange(self.n).repeat_interleave(self.offsets.diff())

    @functools.cached_property
    def columns(self) -> torch.Tensor:
        """Return the column of each non-zero."""
        return self.column_numbers.long()

    def matrix_of(self, values: torch.Tensor) -> Any:
        """Return a CSR matrix of SciPy with these values at the places of the rows.

        SciPy's constructor would check all places again.
        """
        from scipy.sparse import csr_array

        made = csr_array((self.n, self.d), dtype=values.numpy().dtype)
        made.data, made.indices = values.numpy(), self.column_numbers.numpy()
        made.indptr = self.offsets.numpy()
        made.has_canonical_format = True
        return made

    def _scaled(self, values: torch.Tensor) -> torch.Tensor:
        lanes = (self.rows * 8 + self.columns % 8).numpy()
        wide = values.double()
        total = torch.from_numpy(
            np.bincount(lanes, weights=wide.square().numpy(), minlength=8 * self.n)
        ).reshape(-1, 8)
        total = total[:, :4] + total[:, 4:]
        total = total[:, :2] + total[:, 2:]
        norms = square_root(total[:, 0] + total[:, 1])[self.rows]
        return torch.where(norms == 0, 0.0, wide / norms).to(values.dtype)

    def extremes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lowest and highest values of each column, [d] float64."""
        some_zero = torch.bincount(self.columns, minlength=self.d) < self.n
        start = torch.where(some_zero, 0.0, torch.inf).double()
        low = start.scatter_reduce(0, self.columns, self.wide, "amin")
        return low, (-start).scatter_reduce_(0, self.columns, self.wide, "amax")

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the dense rows of these numbers."""
        return torch.from_numpy(np.ascontiguousarray(self.matrix[numbers.numpy()].toarray()))

    def dense_blocks(self, numbers: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield some of the numbers at a time, with their dense rows."""
        if len(numbers) > 0:
            for chosen in numbers.split(max(1, _BLOCK_BYTES // (8 * self.d))):
                yield chosen, self.take(chosen)

    def products(self, centers: torch.Tensor) -> torch.Tensor:
        """Return x.c of all rows and centers, [n, k] float64."""
        return torch.from_numpy(self.wide_matrix @ np.ascontiguousarray(centers.double().numpy().T))

    def nearest(self, centers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the nearest center of each row, exactly, and the squared distance to it, up to rounding."""
        norms = centers.double().square().sum(1)
        products = self.products(centers)
        scores = norms / 2 - products
        best, labels = scores.min(1)
        if len(centers) > 1:
            second = scores.scatter_(1, labels[:, None], torch.inf).amin(1)
            uncertain = (~(second - best > 2 * self.error(norms))).nonzero()[:, 0]
            for numbers, rows in self.dense_blocks(uncertain):
                labels[numbers] = resolve("vq_assign", rows)(rows, centers, "l2", True)[:, 0]
        own = products.gather(1, labels[:, None])[:, 0]
        return labels, (self.squares - 2 * own + norms[labels]).clamp(min=0)

    def error(self, norms: torch.Tensor) -> torch.Tensor:
        """Return a bound [n] on the error of scores.

        The exact score is half the float64 distance of the definition, less |x|^2 / 2.

        Both are sums of at most d terms: their rounding is at most (d + 8) 2^-53 of the sum of the
        magnitudes, and 2^-1000 covers underflow.
        """
        lengths, radius = self.squares.sqrt(), norms.amax().sqrt()
        bound: torch.Tensor = lengths * radius + radius**2 / 2 + (lengths + radius) ** 2 / 2
        return bound.mul_((self.d + 8) * 2.0**-53 * 1.01).add_(2.0**-1000)

    def distances(self, centers: torch.Tensor) -> torch.Tensor:
        """Return the distance of each row to each center, [n, k] in the dtype of the centers."""
        sizes = self.squares[:, None] + centers.double().square().sum(1)
        squares = (sizes - 2 * self.products(centers)).clamp_(min=0)
        found: torch.Tensor = squares.sqrt().to(centers.dtype)
        for numbers, rows in self.dense_blocks((~(squares >= _CANCELED * sizes)).any(1).nonzero()[:, 0]):
            found[numbers] = kmeans_distances(rows, centers)
        return found


class SparseData(composed.Problem):
    """``composed.Problem`` of sparse rows."""

    looks_for_empty = True

    def __init__(self, rows: SparseRows, weights: torch.Tensor | None) -> None:
        steps.require_valid("kmeans", rows.values, None)
        self.sparse, self.n = rows, rows.n
        self.middle, self.scale, self.mass_scale, self.weight_unit = steps.units_within(
            self.n, *rows.extremes(), None if weights is None else weights.max()
        )
        self.weights = None if weights is None else weights / self.weight_unit
        self.masses = steps.row_masses(torch.empty(self.n, 0), self.weights, self.mass_scale)
        # of the last step; the sums lack the part of the zeros
        self._labels = self._sums = torch.empty(0, dtype=torch.int64)

    @functools.cached_property
    def terms(self) -> torch.Tensor:
        """Return how much more each non-zero adds to its column than a zero."""
        column = self.sparse.columns
        own = None if self.weights is None else self.weights[self.sparse.rows]
        middle, scale = self.middle[column, None], self.scale[column, None]
        found: torch.Tensor = steps.terms(self.sparse.wide[:, None], own, middle, scale)[:, 0]
        found -= steps.terms(torch.zeros_like(middle), own, middle, scale)[:, 0]
        return found

    @functools.cached_property
    def grid(self) -> grid.Grid:
        """Return the rows as whole numbers."""
        return SparseGrid(self)

    @functools.cached_property
    def on_grid(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a row of zeros on the grid, [d], and the difference of each non-zero from it.

        Both are float64.
        """
        zero = (-self.middle * self.grid_scale).round()
        column = self.sparse.columns
        return zero, ((self.sparse.wide - self.middle[column]) * self.grid_scale).round() - zero[column]

    def variance(self) -> torch.Tensor:
        """Return the mean variance of the columns."""
        zero, rest = (tensor.long() for tensor in self.on_grid)
        column = self.sparse.columns
        squares = (zero * zero * self.n).index_add_(
            0, column, (zero[column] + rest).square() - zero[column].square()
        )
        return self._variance((zero * self.n).index_add_(0, column, rest), squares)

    def step(
        self, step: composed.KMeansStepFunction, centers: torch.Tensor, with_inertia: bool
    ) -> steps.Result:
        """Run a step of Lloyd's algorithm on these rows.

        ``step`` is not needed.
        """
        labels, squares = self.sparse.nearest(centers)
        masses = self.masses.new_zeros(len(centers)).index_add_(0, labels, self.masses)
        # Sums are whole numbers, so it is enough to move rows with a new label.
        if len(self._sums) != len(centers):
            self._labels, self._sums = (
                torch.full_like(labels, -1),
                self.terms.new_zeros(len(centers), self.sparse.d),
            )
        moved = (
            (labels != self._labels)[self.sparse.rows].nonzero()[:, 0]
            if bool((self._labels >= 0).all())
            else slice(None)
        )
        rows, columns, terms = self.sparse.rows[moved], self.sparse.columns[moved], self.terms[moved]
        flat = self._sums.view(-1)
        flat.index_add_(0, labels[rows] * self.sparse.d + columns, terms)
        if not isinstance(moved, slice):
            flat.index_add_(0, self._labels[rows] * self.sparse.d + columns, -terms)
        self._labels = labels
        sums = self._sums + self._of_zeros(masses)
        if self.weights is not None:
            squares = self.weights * squares
        inertia = steps.tree_sum(squares) if with_inertia else squares.new_zeros(())
        return labels, sums, masses, inertia

    def _of_zeros(self, masses: torch.Tensor) -> torch.Tensor:
        """Return the sums [k, d] of clusters of these masses if all elements of their rows were zero."""
        zero = -self.middle * self.scale
        if self.weights is None:
            return (masses // int(self.mass_scale))[:, None] * zero.round().long()
        return ((masses.double() / self.mass_scale)[:, None] * zero).round().long()

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the rows with these numbers."""
        return self.sparse.take(numbers)

    def farthest(self, centers: torch.Tensor, labels: torch.Tensor) -> composed.FarthestRows:
        """Return the rows that are farthest from their centers.

        It works from keys of the rows that may be among the farthest.
        """
        count = min(self.n, len(centers))
        norms = centers.double().square().sum(1)
        own = self.sparse.products(centers).gather(1, labels[:, None])[:, 0]
        squares = self.sparse.squares - 2 * own + norms[labels]
        squares = torch.where(self.masses > 0, squares, -torch.inf)
        most = squares + 4 * self.sparse.error(norms)
        least = (squares - 4 * self.sparse.error(norms)).topk(count).values[-1]
        keys, numbers = [], (~(most < least)).nonzero()[:, 0]
        for chosen, rows in self.sparse.dense_blocks(numbers):
            distances = steps.distances(rows, centers, labels[chosen])
            spread = (1 << steps.ceil_log2(self.n)) - 1
            key = (distances.view(torch.int64) & ~spread) | (spread - chosen)
            keys.append(torch.where((distances > 0) & (self.masses[chosen] > 0), key, -1))
        top = torch.cat(keys).topk(count)
        numbers = numbers[top.indices]
        weights = None if self.weights is None else self.weights[numbers]
        return composed.FarthestRows(top.values, self.take(numbers), weights, labels[numbers])


class SparseGrid(grid.Grid):
    """``grid.Grid`` of sparse rows, each less a row of zeros."""

    def __init__(self, data: SparseData) -> None:
        self.data, self.bits = data, data.bits
        self.weights = torch.ones(data.n, dtype=torch.float64) if data.weights is None else data.weights
        self.masses = data.masses
        self.potential_scale = 2.0 ** (60 - 2 * self.bits - steps.ceil_log2(data.n * data.sparse.d))
        self.zero, rest = data.on_grid
        self.rest = SparseRows(rest, data.sparse.column_numbers, data.sparse.offsets, data.sparse.d)
        self.norms = self.rest.squares

    def distances(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return squared distances to the rows with these numbers.

        Whole numbers below 2^53 make exact products.
        """
        found: torch.Tensor = kernels().kmeans_sparse_products(*self.rest.format, self.rest.take(chosen))
        return (self.norms[:, None] + self.norms[chosen] - 2 * found).long()

    def nearer(
        self, nearest: torch.Tensor, owner: torch.Tensor, fresh: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the squared distance to the nearest draw, and its number."""
        return grid.nearer(self.distances, fresh, nearest, owner, count)

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the values of the rows with these numbers."""
        return (self.zero + self.rest.take(numbers)).to(torch.int16)

    def few(self, values: torch.Tensor, weights: torch.Tensor) -> grid.Grid:
        """Return a grid of some of the rows."""
        return grid.Grid(values, weights, self.bits)
