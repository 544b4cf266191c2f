"""``kmeans`` of rows in blocks or in several processes, with the same bits as ``kmeans`` of all rows.

A fit needs sums of whole numbers, extremes, and draws by such sums. These do not depend on how the rows are
cut into blocks. Only the inertia adds real numbers. It adds all squared distances by halves, so each process
gathers them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ..._checks import DTYPES
from ..._dtypes import result_dtype
from ..._library import resolve
from ..kmeans_step import composed as steps
from . import composed, grid


class Blocks:
    """Rows [n, d] that are read in blocks, again for every pass.

    Args:
        read: gives the blocks, tensors [n_i, d] of one dtype and device, from the first one.
        take: returns the rows of given numbers; None: :meth:`take` reads the blocks once.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[torch.Tensor]],
        take: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._read, self._take = read, take
        self.n: int | None = None  # known after the first pass
        self.like: torch.Tensor | None = None  # no rows, with the width, dtype and device of the blocks

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each block with the number of its first row."""
        start = 0
        for block in self._read():
            if self.like is None:
                self.like = block[:0]
            if block.shape[1:] != self.like.shape[1:] or block.dtype != self.like.dtype:
                raise ValueError(
                    f"kmeans: the blocks must have one width and dtype, got {list(block.shape)} of"
                    f" {block.dtype} after [*, {self.like.shape[1]}] of {self.like.dtype}"
                )
            self._require(start + len(block), longer=True)
            yield start, block
            start += len(block)
        self._require(start, longer=False)
        self.n = start

    def _require(self, rows: int, longer: bool) -> None:
        """Raise ValueError if the number of rows differs from the first pass.

        With ``longer`` raise only for too many rows: an array of the first pass's length has no room for
        them.
        """
        if self.n is not None and (rows > self.n if longer else rows != self.n):
            raise ValueError(
                f"kmeans: the blocks had {self.n} rows when they were read first, and {rows} now; each pass"
                " must give the same"
            )

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the rows with these numbers."""
        if self._take is not None:
            return self._take(numbers)
        assert self.like is not None
        rows = self.like.new_zeros(len(numbers), self.like.shape[1])
        for start, block in self:
            inside = (numbers >= start) & (numbers < start + len(block))
            rows[inside] = block[numbers[inside] - start]
        return rows


class RankGroup:
    """Processes of a group, in the order of their ranks, each with a part of the rows.

    There may be only this process.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.count = (
            (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        )

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of whole numbers."""
        if self.group is not None:
            tensor = tensor.clone()
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the tensors [n_p, ...] of all processes."""
        if self.group is None:
            return tensor
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(tensor)]), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded, group=self.group)
        return torch.cat([rows[: int(size)] for rows, size in zip(found, sizes, strict=True)])

    def agree(self, what: str, values: list[int]) -> None:
        """Raise ValueError in every process when these numbers are not the same in all."""
        if len(self.gather(torch.tensor([values])).unique(dim=0)) > 1:
            raise ValueError(f"kmeans: the processes do not agree on {what}")

    def together(self, work: Callable[[], None]) -> None:
        """Guard work that may fail in one process, so that no other process waits for it."""
        error: Exception | None = None
        try:
            work()
        except Exception as caught:
            error = caught
        failed = self.gather(torch.tensor([error is not None])).nonzero()[:, 0].tolist()
        if error is not None:
            raise error
        if failed:
            raise RuntimeError(f"kmeans: process {failed[0]} could not use its rows; see its own error")


class BlockData(composed.Problem):
    """``composed.Problem`` of the rows of all processes.

    Each process reads its own rows in blocks.

    Results are written into tensors that exist before a block is read. A small tensor made while a block
    exists would stop the allocator from reusing the memory of the block, and memory would grow with the data.
    """

    looks_for_empty = True

    def __init__(
        self, blocks: Blocks, weights: torch.Tensor | None, spherical: bool, processes: RankGroup
    ) -> None:
        self.blocks, self.spherical, self.processes = blocks, spherical, processes
        self._low = self._high = torch.empty(0)
        processes.together(lambda: self._scan(weights))
        assert blocks.like is not None
        assert blocks.n is not None
        processes.agree(
            "the width or dtype of the rows", [self._low.shape[0], DTYPES.index(blocks.like.dtype)]
        )
        processes.agree("whether rows have weights", [weights is not None])
        counts = processes.gather(torch.tensor([blocks.n]))
        self.n, self.first = int(counts.sum()), int(counts[: processes.rank].sum())
        low, high = processes.gather(self._low[None]).amin(0), processes.gather(self._high[None]).amax(0)
        heaviest = None if weights is None else processes.gather(weights.max()[None]).max()
        if heaviest is not None and not heaviest > 0:
            raise RuntimeError(
                "kmeans: weights must be finite (at most 2^1000), not negative and not all zero"
            )
        self.middle, self.scale, self.mass_scale, self.weight_unit = steps.units_within(
            self.n, low, high, heaviest
        )
        self.weights = None if weights is None else weights / self.weight_unit

    def _scan(self, weights: torch.Tensor | None) -> None:
        """Make the first pass: count the rows, check that they can be clustered, and find their extremes."""
        low = high = torch.empty(0)
        for _, block in self.blocks:
            steps.require_valid("kmeans", block, None)
            if len(block) > 0:
                rows = self._unit(block)
                if len(low) == 0:
                    low, high = (rows[0].to(torch.float64, copy=True) for _ in range(2))
                low.copy_(torch.minimum(low, rows.amin(0)))
                high.copy_(torch.maximum(high, rows.amax(0)))
        if len(low) == 0:
            raise ValueError("kmeans: the blocks hold no rows; each process needs at least one")
        self._low, self._high = low, high
        if weights is not None and len(weights) != self.blocks.n:
            raise ValueError(f"kmeans: weights must have shape [{self.blocks.n}], got {list(weights.shape)}")

    def _unit(self, rows: torch.Tensor) -> torch.Tensor:
        return composed.unit_rows(rows.to(result_dtype(rows))) if self.spherical else rows

    def weighted_blocks(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
        """Yield the slice of each block, its rows as they are clustered, and their weights."""
        for start, block in self.blocks:
            where = slice(start, start + len(block))
            if len(block) > 0:
                yield where, self._unit(block), None if self.weights is None else self.weights[where]

    @property
    def grid(self) -> grid.Grid:
        """Return the rows as whole numbers, made from the blocks in every pass."""
        return BlockGrid(self)

    def variance(self) -> torch.Tensor:
        """Return the mean variance of the columns."""
        sums = torch.zeros_like(self.middle, dtype=torch.int64)
        squares = torch.zeros_like(sums)
        for _, rows, _ in self.weighted_blocks():
            values = self.quantized(rows).long()
            sums += values.sum(0)
            squares += values.square().sum(0)
        return self._variance(self.processes.sum(sums), self.processes.sum(squares))

    def step(
        self, step: composed.KMeansStepFunction, centers: torch.Tensor, with_inertia: bool
    ) -> steps.Result:
        """Compute ``kmeans_step``.

        Labels cover the rows of this process.
        """
        labels, squares = (
            torch.empty(len(self), dtype=torch.int64),
            torch.empty(len(self) if with_inertia else 0, dtype=torch.float64),
        )
        sums = torch.zeros(centers.shape, dtype=torch.int64)
        masses = torch.zeros(len(centers), dtype=torch.int64)
        for where, rows, weights in self.weighted_blocks():
            found = step(*self.step_of(rows, centers, weights, with_inertia=False))
            labels[where] = found[0]
            sums += found[1]
            masses += found[2]
            if with_inertia:
                square = steps.distances(rows, centers, found[0])
                squares[where] = square if weights is None else weights * square
        inertia = self.middle.new_zeros(())
        if with_inertia:
            inertia = steps.tree_sum(self.processes.gather(squares))
        return labels, self.processes.sum(sums), self.processes.sum(masses), inertia

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the rows of these numbers, counted over all processes."""
        own = numbers - self.first
        inside = (own >= 0) & (own < len(self))
        rows = self._unit(self.blocks.take(own[inside]))
        # The process that has a row adds its bits; the other processes add zeros.
        bits = torch.zeros(len(numbers), rows.shape[1], dtype=torch.int64)
        bits[inside] = rows.double().view(torch.int64)
        return self.processes.sum(bits).view(torch.float64).to(rows.dtype)

    def farthest(self, centers: torch.Tensor, labels: torch.Tensor) -> composed.FarthestRows:
        """Return the rows that are farthest from their centers."""
        count = min(self.n, len(centers))
        keys, numbers = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        for where, rows, weights in self.weighted_blocks():
            keys = torch.cat(
                [keys, self.keys(rows, centers, labels[where], weights, self.first + where.start)]
            )
            numbers = torch.cat([numbers, torch.arange(where.start, where.stop)])
            top = keys.topk(min(count, len(keys)))
            keys, numbers = top.values, numbers[top.indices]
        mass = torch.ones(len(keys), dtype=torch.float64) if self.weights is None else self.weights[numbers]
        keys, label, mass = (self.processes.gather(tensor) for tensor in (keys, labels[numbers], mass))
        numbers = self.processes.gather(numbers + self.first)
        top = keys.topk(count)
        mass = mass[top.indices]
        return composed.FarthestRows(
            top.values,
            self.take(numbers[top.indices]),
            None if self.weights is None else mass,
            label[top.indices],
        )

    def counts(self, labels: torch.Tensor, k: int) -> torch.Tensor:
        """Sum the weights of the rows of each cluster."""
        ones = torch.empty(len(self), 0)
        masses = steps.row_masses(ones, self.weights, self.mass_scale)
        masses = self.processes.sum(torch.zeros(k, dtype=torch.int64).index_add_(0, labels, masses))
        return masses.double() / self.mass_scale * self.weight_unit

    def __len__(self) -> int:
        """Return the number of rows of this process."""
        return self.blocks.n or 0


class BlockGrid(grid.Grid):
    """``grid.Grid`` of such rows.

    Masses, potentials and nearest distances cover the rows of this process.
    """

    def __init__(self, data: BlockData) -> None:
        self.data, self.bits = data, data.bits
        self.weights = torch.ones(len(data), dtype=torch.float64) if data.weights is None else data.weights
        self.masses = (self.weights * 2.0 ** steps.mass_bits(data.n)).round().long()
        self.potential_scale = 2.0 ** (60 - 2 * self.bits - steps.ceil_log2(data.n * len(data.middle)))

    def nearer(
        self, nearest: torch.Tensor, owner: torch.Tensor, fresh: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the nearest distances and their draws after more draws."""
        picked, nearest, owner = self.take(fresh), nearest.clone(), owner.clone()
        for where, rows, _ in self.data.weighted_blocks():
            distances = functools.partial(grid.squared_distances, self.data.quantized(rows))
            nearest[where], owner[where] = grid.nearer(distances, picked, nearest[where], owner[where], count)
        return nearest, owner

    def distances(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return squared distances to some rows, whole numbers."""
        picked = self.take(chosen)
        found = torch.empty(len(self.data), len(chosen), dtype=torch.int64)
        for where, rows, _ in self.data.weighted_blocks():
            found[where] = grid.squared_distances(self.data.quantized(rows), picked)
        return found

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the values of some rows on the grid."""
        return self.data.quantized(self.data.take(numbers))

    def few(self, values: torch.Tensor, weights: torch.Tensor) -> grid.Grid:
        """Return a grid in memory of a few rows."""
        return grid.Grid(values, weights, self.bits)

    def sample(self, masses: torch.Tensor, draws: npt.NDArray[np.float64]) -> torch.Tensor:
        """Draw rows.

        Each process counts its own rows before the drawn one.
        """
        totals = self.data.processes.gather(masses.sum()[None])
        running = masses.cumsum(0) + totals[: self.data.processes.rank].sum()
        return self.data.processes.sum(grid.sample(totals.sum(), running, draws))

    def remove(self, left: torch.Tensor, chosen: torch.Tensor) -> None:
        """Set the remaining mass of some rows to zero."""
        own = chosen - self.data.first
        left[own[(own >= 0) & (own < len(left))]] = 0

    def everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes."""
        return self.data.processes.sum(tensor)


class BlockFit(NamedTuple):
    """A fit, and the weight of each cluster, [k] float64."""

    fit: composed.Fit
    counts: torch.Tensor


def kmeans_of_blocks(
    blocks: Blocks,
    weights: torch.Tensor | None,
    request: Callable[[int, int], composed.FitOptions],
    spherical: bool,
    group: Any = None,
    advance: Callable[[composed.KMeansStepFunction], composed.Advance] | None = None,
) -> BlockFit:
    """Cluster the rows of all processes of a group, and return the labels of this process.

    Args:
        blocks: the rows of this process, at least one.
        weights: ``[n]`` of these rows, float64, or None in all processes.
        request: returns the request for a number of rows and columns, or raises an error.
        spherical: the metric is "cosine".
        group: a group of torch.distributed with a backend for tensors on the CPU; None: one process.
        advance: makes a function that ends an iteration from the step; None: ``composed.advance``.
    """
    with torch.device("cpu"):  # whatever the default device of the caller
        processes = RankGroup(group)
        data = BlockData(blocks, weights, spherical, processes)
        assert blocks.like is not None
        asked = request(data.n, len(data.middle))
        numbers = (
            asked.k,
            asked.n_init,
            asked.max_iter,
            int(spherical),
            int(np.float64(asked.tol).view(np.int64)),
        )
        bits = 0 if asked.given is None else int(asked.given.double().view(torch.int64).sum())
        processes.agree("what is asked for", [*numbers, *asked.method.encode().ljust(10), bits])
        # each process draws one, unless it is given
        asked = asked._replace(seed=int(processes.gather(torch.tensor([asked.seed]))[0]))
        step = resolve("kmeans_step", blocks.like)
        ends = composed.advance if advance is None else advance(step)
        backend = composed.Backend(composed.by_steps(step, ends), grid.Grid)
        fit = composed.fit(backend, data, asked, spherical)
        return BlockFit(fit, data.counts(fit.labels, asked.k))
