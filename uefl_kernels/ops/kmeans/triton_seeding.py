"""Seeding of ``kmeans`` in Triton.

It draws the same rows as ``grid.Grid``. The host does not wait, and no distance matrix is stored.

A round of greedy k-means++ reads the grid twice, 4 bytes an element: once for the potential that
each of its few candidates would leave, and once to store the distances to the best. Blocks of rows keep their
share of the potential, so that a draw reads those and one block. All arithmetic is on whole numbers, so
the rows are the same as on the CPU. Interpreted and compiled in the tests; right on an H100 in small cases,
not timed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
import math

import torch
import triton
import triton.language as tl

from ..kmeans_step import composed as steps
from ..vq_assign.triton_epilogue import _fixed
from . import grid

_BLOCK = 1024  # rows that share one partial sum
_ROWS, _ELEMENTS = 64, 32  # of a tile; not tuned on a GPU yet
_SUMS = 1024  # blocks that are added up at once
# where the rows of a round go: every other one is not aligned to 16 bytes; this compiles no second kernel
_DRAWN = ["drawn", "chosen"]


@triton.jit
def _distance(values, row, valid, other, D: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Return squared distances [ROWS] int64 of rows to one other row.

    Two values differ by at most 2^15, so a square has 31 bits.
    """
    total = tl.zeros((ROWS, ELEMENTS), tl.int64)
    for start in range(0, D, ELEMENTS):
        j = start + tl.arange(0, ELEMENTS)
        inside = valid[:, None] & (j < D)[None, :]
        value = tl.load(values + row[:, None] * D + j[None, :], mask=inside, other=0).to(tl.int32)
        target = tl.load(values + other * D + j, mask=j < D, other=0).to(tl.int32)
        difference = value - target[None, :]
        total += (difference * difference).to(tl.int64)
    return tl.sum(total, 1)


@triton.jit
def _potential(units, row, valid, square):
    """Compute ``Grid.potential`` of rows with these weights in units, or 0 for an invalid row."""
    return tl.where(valid, _fixed(tl.load(units + row, mask=valid, other=0.0) * square.to(tl.float64)), 0)


@triton.jit(
    do_not_specialize=["seed", "round", "restart", "purpose", "n", "blocks"],
    do_not_specialize_on_alignment=_DRAWN,
)
def _draw(
    units,
    nearest,
    sums,
    left,
    left_sums,
    drawn,
    seed: tl.int64,
    round: tl.int32,
    restart: tl.int32,
    purpose: tl.int32,
    n: tl.int64,
    blocks: tl.int32,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Write drawn [programs]: each program draws a row by its potential.

    If no row has a potential, it draws by the remaining mass.
    """
    totals, masses = tl.zeros((SUMS,), tl.int64), tl.zeros((SUMS,), tl.int64)
    for start in range(0, blocks, SUMS):
        block = start + tl.arange(0, SUMS)
        totals += tl.load(sums + block, mask=block < blocks, other=0)
        masses += tl.load(left_sums + block, mask=block < blocks, other=0)
    total = tl.sum(totals, 0)
    spread = total > 0
    total = tl.where(spread, total, tl.sum(masses, 0))

    zero = tl.zeros((1,), tl.int32)
    word0, word1, _, _ = tl.philox(
        seed, zero + tl.program_id(0), zero + round, zero + restart, zero + purpose
    )
    upper = (word0.to(tl.uint32, bitcast=True) >> 5).to(tl.float64)
    lower = (word1.to(tl.uint32, bitcast=True) >> 6).to(tl.float64)
    number = tl.max((upper * 2.0**26 + lower) * 2.0**-53, 0)
    target = tl.minimum((total.to(tl.float64) * number).to(tl.int64), total - 1)

    # the sum of the blocks before the block of the row, and their number
    before, found = total * 0, total * 0
    running = total * 0
    for start in range(0, blocks, SUMS):
        block = start + tl.arange(0, SUMS)
        inside = block < blocks
        share = tl.where(
            spread,
            tl.load(sums + block, mask=inside, other=0),
            tl.load(left_sums + block, mask=inside, other=0),
        )
        passed = inside & (running + tl.cumsum(share, 0) <= target)
        before += tl.sum(tl.where(passed, share, 0), 0)
        found += tl.sum(passed.to(tl.int64), 0)
        running += tl.sum(share, 0)
    row = found * BLOCK + tl.arange(0, BLOCK)
    valid = row < n
    share = _potential(units, row, valid, tl.load(nearest + row, mask=valid, other=0))
    share = tl.where(spread, share, tl.load(left + row, mask=valid, other=0))
    passed = valid & (before + tl.cumsum(share, 0) <= target)
    tl.store(drawn + tl.program_id(0), found * BLOCK + tl.sum(passed.to(tl.int64), 0))


@triton.jit(do_not_specialize=["count", "n"], do_not_specialize_on_alignment=_DRAWN)
def _compare(
    values,
    units,
    nearest,
    drawn,
    potentials,
    count: tl.int32,
    n: tl.int64,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Write potentials [blocks, CANDIDATES]: the potential of a block after each candidate.

    One program per block.
    """
    block = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, CANDIDATES)
    sums = tl.zeros((CANDIDATES,), tl.int64)
    for start in range(0, BLOCK, ROWS):
        row = block * BLOCK + start + tl.arange(0, ROWS)
        valid = row < n
        best = tl.load(nearest + row, mask=valid, other=0)
        for c in range(0, count):
            square = tl.minimum(best, _distance(values, row, valid, tl.load(drawn + c), D, ROWS, ELEMENTS))
            sums += tl.where(candidate == c, tl.sum(_potential(units, row, valid, square), 0), 0)
    tl.store(potentials + block * CANDIDATES + candidate, sums)


@triton.jit(do_not_specialize=["count", "blocks"], do_not_specialize_on_alignment=_DRAWN)
def _take(
    potentials,
    drawn,
    chosen,
    left,
    left_sums,
    count: tl.int32,
    blocks: tl.int32,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Write chosen [1]: the candidate with the least remaining potential, the first one in a tie.

    Remove its mass. There is one program.
    """
    candidate = tl.arange(0, CANDIDATES)
    totals = tl.zeros((SUMS, CANDIDATES), tl.int64)
    for start in range(0, blocks, SUMS):
        block = start + tl.arange(0, SUMS)[:, None]
        totals += tl.load(
            potentials + block.to(tl.int64) * CANDIDATES + candidate[None, :], mask=block < blocks, other=0
        )
    sums = tl.where(candidate < count, tl.sum(totals, 0), 0x7FFFFFFFFFFFFFFF)
    row = tl.load(drawn + tl.argmin(sums, 0))
    tl.store(chosen, row)
    share = left_sums + row // BLOCK
    tl.store(share, tl.load(share) - tl.load(left + row))
    tl.store(left + row, tl.zeros((), tl.int64))


@triton.jit(do_not_specialize=["first", "count", "n"], do_not_specialize_on_alignment=_DRAWN)
def _improve(
    values,
    units,
    nearest,
    owner,
    chosen,
    sums,
    first: tl.int32,
    count: tl.int32,
    n: tl.int64,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Update nearest [n], and owner if given, with count more rows.

    The first of them has number ``first``. One program per block.
    """
    block = tl.program_id(0).to(tl.int64)
    total = block * 0
    for start in range(0, BLOCK, ROWS):
        row = block * BLOCK + start + tl.arange(0, ROWS)
        valid = row < n
        best = tl.load(nearest + row, mask=valid, other=0)
        nearer = tl.full((ROWS,), -1, tl.int32)
        for c in range(0, count):
            square = _distance(values, row, valid, tl.load(chosen + c), D, ROWS, ELEMENTS)
            nearer = tl.where(square < best, c, nearer)
            best = tl.minimum(best, square)
        tl.store(nearest + row, best, mask=valid)
        if owner is not None:
            tl.store(owner + row, (first + nearer).to(tl.int64), mask=valid & (nearer >= 0))
        total += tl.sum(_potential(units, row, valid, best), 0)
    tl.store(sums + block, total)


class TritonGrid(grid.Grid):
    """A ``Grid`` with the rows drawn by the kernels above."""

    def random(self, k: int, seed: int, restart: int) -> torch.Tensor:
        """Draw k different rows, with the result of ``Grid.random``."""
        search, chosen = _Search(self), self.masses.new_empty(k)
        for i in range(k):
            search.draw(chosen[i:], 1, i, restart, 0, seed)
            search.take(chosen[i:], 1, chosen[i:])
        return chosen

    def plus_plus(self, k: int, seed: int, restart: int, purpose: int) -> torch.Tensor:
        """Run greedy k-means++, with the result of ``Grid.plus_plus``."""
        search, chosen = _Search(self), self.masses.new_empty(k)
        trials = self.masses.new_empty(2 + int(math.log(k)))
        for i in range(k):
            count = len(trials) if i else 1
            search.draw(trials, count, i, restart, purpose, seed)
            if count > 1:
                search.compare(trials, count)
            search.take(trials, count, chosen[i:])
            search.improve(chosen[i:], 1)
        return chosen

    def oversampled(self, k: int, seed: int, restart: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw rows by squared distance, with the result of ``Grid.oversampled``."""
        search, owner = _Search(self), torch.zeros_like(self.masses)
        drawn = self.masses.new_empty(1 + grid.PARALLEL_ROUNDS * 2 * k)
        first = 0
        for i in range(grid.PARALLEL_ROUNDS + 1):
            count = 2 * k if i else 1
            search.draw(drawn[first:], count, i, restart, 1, seed)
            search.improve(drawn[first:], count, first, owner)
            first += count
        return drawn, owner


class _Search:
    """State of a seeding on the device of its rows."""

    def __init__(self, grid: TritonGrid) -> None:
        self.grid, self.n, self.d = grid, *grid.values.shape
        self.blocks = triton.cdiv(self.n, _BLOCK)
        self.units = grid.weights * grid.potential_scale
        self.candidates = 1
        # squared distance to the nearest chosen row; 2^62 while none is chosen
        self.nearest = torch.full_like(grid.masses, 1 << 62)
        self.sums = grid.masses.new_zeros(self.blocks)  # of the potentials, by block
        self.left = grid.masses.clone()  # masses of rows that are not chosen
        self.left_sums = (
            torch.nn.functional.pad(self.left, (0, self.blocks * _BLOCK - self.n)).reshape(-1, _BLOCK).sum(1)
        )
        self.potentials = self.sums

    def draw(
        self, drawn: torch.Tensor, count: int, round: int, restart: int, purpose: int, seed: int
    ) -> None:
        """Draw the first ``count`` of ``drawn``."""
        with torch.cuda.device_of(drawn):
            _draw[(count,)](
                self.units,
                self.nearest,
                self.sums,
                self.left,
                self.left_sums,
                drawn,
                seed,
                round,
                restart,
                purpose,
                self.n,
                self.blocks,
                _BLOCK,
                _SUMS,
                enable_fp_fusion=False,
            )

    def compare(self, drawn: torch.Tensor, count: int) -> None:
        """Compute the potential that each candidate would leave."""
        self.candidates = 1 << steps.ceil_log2(count)
        if len(self.potentials) != self.blocks * self.candidates:
            self.potentials = self.sums.new_empty(self.blocks * self.candidates)
        with torch.cuda.device_of(drawn):
            _compare[(self.blocks,)](
                self.grid.values,
                self.units,
                self.nearest,
                drawn,
                self.potentials,
                count,
                self.n,
                self.d,
                _BLOCK,
                _ROWS,
                _ELEMENTS,
                self.candidates,
                enable_fp_fusion=False,
            )

    def take(self, drawn: torch.Tensor, count: int, chosen: torch.Tensor) -> None:
        """Write the candidate with the least potential to the first place of ``chosen``."""
        with torch.cuda.device_of(drawn):
            _take[(1,)](
                self.potentials,
                drawn,
                chosen,
                self.left,
                self.left_sums,
                count,
                self.blocks,
                _BLOCK,
                _ROWS,
                self.candidates,
            )

    def improve(
        self, chosen: torch.Tensor, count: int, first: int = 0, owner: torch.Tensor | None = None
    ) -> None:
        """Add the first ``count`` of ``chosen`` to the chosen rows."""
        with torch.cuda.device_of(chosen):
            _improve[(self.blocks,)](
                self.grid.values,
                self.units,
                self.nearest,
                owner,
                chosen,
                self.sums,
                first,
                count,
                self.n,
                self.d,
                _BLOCK,
                _ROWS,
                _ELEMENTS,
                enable_fp_fusion=False,
            )
