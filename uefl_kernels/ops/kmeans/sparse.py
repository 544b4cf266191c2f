"""``kmeans`` of sparse rows by their non-zeros, with the centers and labels of the same dense rows.

Without weights these have the same bits.

* **Labels**: scores |c|^2 / 2 - x.c in float64, with a bound on their rounding.
  A row that the bound does not decide is searched as a dense row.
* **Sums**: an element of zero adds the same whole number to its column in every row, so non-zeros add the
  difference. With weights that number depends on the row: it is then rounded once for a whole cluster, so
  that centers agree with those of dense rows up to rounding.
* **Seeding**: on the grid, rows less a row of zeros are sparse again, and their distances are the same whole
  numbers.

Inertia is the sum of |x|^2 - 2 x.c + |c|^2: it agrees with dense rows up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..._library import resolve
from ..kmeans_labels import kmeans_distances
from ..kmeans_step import composed as steps
from ..vq_assign.distances import square_root
from . import composed, grid

_BLOCK_BYTES = 1 << 24  # of rows that are made dense at once
_CANCELED = 2.0**-20  # a squared distance below this part of |x|^2 + |c|^2 is computed from dense rows


class SparseRows:
    """Rows of a SciPy CSR matrix without duplicates, of float32 or float64.

    Args:
        matrix: the rows.
        unit: scale each to length 1, as ``composed.unit_rows`` does.

    Raises:
        RuntimeError: the values are not finite or too large.
    """

    def __init__(self, matrix: Any, unit: bool) -> None:
        matrix = matrix.tocsr()
        if not matrix.has_canonical_format:
            matrix = matrix.copy()
            matrix.sum_duplicates()
        self.n, self.d = matrix.shape
        dtype = matrix.dtype if matrix.dtype in (np.float32, np.float64) else np.float64
        self._like = matrix
        values = torch.from_numpy(matrix.data.astype(dtype))
        steps.require_valid("kmeans", values, None)
        if unit:
            values = self._scaled(values)
        self.dtype = values.dtype
        self.values = values.double()
        self.matrix, self.wide = self.like(values), self.like(self.values)
        self.squares = torch.from_numpy(self.like(self.values.square()) @ np.ones(self.d))

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """The row of each non-zero."""
        return torch.from_numpy(np.repeat(np.arange(self.n), np.diff(self._like.indptr)))

    @functools.cached_property
    def columns(self) -> torch.Tensor:
        """The column of each non-zero."""
        return torch.from_numpy(self._like.indices.astype(np.int64))

    def like(self, values: torch.Tensor) -> Any:
        """Return a CSR matrix with other values at the same places; SciPy's constructor would look at all of
        these again."""
        made = type(self._like)(self._like.shape, dtype=values.numpy().dtype)
        made.data, made.indices, made.indptr = values.numpy(), self._like.indices, self._like.indptr
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
        low = start.scatter_reduce(0, self.columns, self.values, "amin")
        return low, (-start).scatter_reduce_(0, self.columns, self.values, "amax")

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the dense rows of these numbers."""
        return torch.from_numpy(np.ascontiguousarray(self.matrix[numbers.numpy()].toarray()))

    def dense_blocks(self, numbers: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield some of the numbers at a time, with their dense rows."""
        if len(numbers) > 0:
            for part in numbers.split(max(1, _BLOCK_BYTES // (8 * self.d))):
                yield part, self.take(part)

    def products(self, centers: torch.Tensor) -> torch.Tensor:
        """Return x.c of all rows and centers, [n, k] float64."""
        return torch.from_numpy(self.wide @ np.ascontiguousarray(centers.double().numpy().T))

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
        magnitudes.
        """
        lengths, radius = self.squares.sqrt(), norms.amax().sqrt()
        bound: torch.Tensor = lengths * radius + radius**2 / 2 + (lengths + radius) ** 2 / 2
        return bound.mul_((self.d + 8) * 2.0**-53 * 1.01)

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
        self.sparse, self.n = rows, rows.n
        self.middle, self.scale, self.mass_scale, self.weight_unit = steps.units_within(
            self.n, *rows.extremes(), None if weights is None else weights.max()
        )
        self.weights = None if weights is None else weights / self.weight_unit
        self.masses = steps.row_masses(rows.squares, self.weights, self.mass_scale)
        column = rows.columns
        own = None if self.weights is None else self.weights[rows.rows]
        middle, scale = self.middle[column, None], self.scale[column, None]
        self.terms = steps.terms(rows.values[:, None], own, middle, scale)[:, 0]
        self.terms -= steps.terms(torch.zeros_like(middle), own, middle, scale)[:, 0]
        # of the last step, without the part of a row of zeros
        self._labels, self._sums = self.terms, self.terms[:0]

    @functools.cached_property
    def grid(self) -> grid.Grid:
        """The rows as whole numbers."""
        return SparseGrid(self)

    @functools.cached_property
    def on_grid(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A row of zeros on the grid, [d], and what each non-zero differs from it; float64."""
        zero = (-self.middle * self.grid_scale).round()
        column = self.sparse.columns
        return zero, ((self.sparse.values - self.middle[column]) * self.grid_scale).round() - zero[column]

    def variance(self) -> torch.Tensor:
        """Return what ``composed.Problem`` does."""
        zero, rest = (part.long() for part in self.on_grid)
        column = self.sparse.columns
        squares = (zero * zero * self.n).index_add_(
            0, column, (zero[column] + rest).square() - zero[column].square()
        )
        return self._variance((zero * self.n).index_add_(0, column, rest), squares)

    def step(self, step: composed.Step, centers: torch.Tensor, with_inertia: bool) -> steps.Step:
        """Return what ``composed.Problem.step`` does; ``step`` is not needed."""
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
        """Return what ``composed.Problem`` does."""
        return self.sparse.take(numbers)

    def farthest(self, centers: torch.Tensor, labels: torch.Tensor) -> composed.FarthestRows:
        """Return what ``composed.Problem.farthest`` does, from keys of the rows that may be among the
        farthest."""
        count = min(self.n, len(centers))
        norms = centers.double().square().sum(1)
        own = self.sparse.products(centers).gather(1, labels[:, None])[:, 0]
        squares = self.sparse.squares - 2 * own + norms[labels]
        squares = torch.where(self.masses > 0, squares, -torch.inf)
        most = squares + 4 * self.sparse.error(norms)
        least = (squares - 4 * self.sparse.error(norms)).topk(count).values[-1]
        keys, numbers = [], (~(most < least)).nonzero()[:, 0]
        for part, rows in self.sparse.dense_blocks(numbers):
            distances = steps.distances(rows, centers, labels[part])
            spread = (1 << steps.ceil_log2(self.n)) - 1
            key = (distances.view(torch.int64) & ~spread) | (spread - part)
            keys.append(torch.where((distances > 0) & (self.masses[part] > 0), key, -1))
        top = torch.cat(keys).topk(count)
        numbers = numbers[top.indices]
        weights = None if self.weights is None else self.weights[numbers]
        return composed.FarthestRows(top.values, self.take(numbers), weights, labels[numbers])


class SparseGrid(grid.Grid):
    """``grid.Grid`` of sparse rows, each less a row of zeros."""

    def __init__(self, data: SparseData) -> None:
        self.data, self.bits = data, data.bits
        self.weights = torch.ones_like(data.sparse.squares) if data.weights is None else data.weights
        self.masses = data.masses
        self.potential_scale = 2.0 ** (60 - 2 * self.bits - steps.ceil_log2(data.n * data.sparse.d))
        self.zero, rest = data.on_grid
        self.rest = data.sparse.like(rest)
        self.norms = torch.from_numpy(data.sparse.like(rest.square()) @ np.ones(data.sparse.d))

    def distances(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return what ``grid.Grid`` does; whole numbers below 2^53 make exact products."""
        picked = np.ascontiguousarray(self.rest[chosen.numpy()].toarray().T)
        return (self.norms[:, None] + self.norms[chosen] - 2 * torch.from_numpy(self.rest @ picked)).long()

    def nearer(
        self, nearest: torch.Tensor, owner: torch.Tensor, fresh: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what ``grid.Grid`` does."""
        return grid.nearer(self.distances, fresh, nearest, owner, count)

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return what ``grid.Grid`` does."""
        return (self.zero + torch.from_numpy(self.rest[numbers.numpy()].toarray())).to(torch.int16)

    def few(self, values: torch.Tensor, weights: torch.Tensor) -> grid.Grid:
        """Return what ``grid.Grid`` does."""
        return grid.Grid(values, weights, self.bits)


def kmeans_of_sparse(
    rows: SparseRows,
    weights: torch.Tensor | None,
    asked: composed.FitOptions,
    spherical: bool,
    advance: Callable[[composed.Step], composed.Advance] | None = None,
) -> composed.Fit:
    """Run ``kmeans`` on sparse rows; ``asked`` and ``advance`` as in ``kmeans_of_blocks``."""
    step = resolve("kmeans_step", rows.values)
    ends = composed.advance if advance is None else advance(step)
    parts = composed.Backend(composed.by_steps(step, ends), grid.Grid)
    return composed.fit(parts, SparseData(rows, weights), asked, spherical)
