"""The end of an iteration of ``kmeans`` in Triton: means, rows for empty clusters, moves, convergence.

Seeding is in ``triton_seeding.py``. Four small kernels work on the results of ``kmeans_step``. The first two
return at once unless a cluster is empty. After the end of the fit, all four return at once. No kernel waits
for the host. All arithmetic is in float64 in the order of
``composed.update``, launched without contraction to FMA, so the centers have the same bits as on the CPU.
The tests interpret and compile the kernels. Small cases were correct on an H100. They were not timed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
import torch
import triton
import triton.language as tl

from ..kmeans_step import composed as steps
from ..vq_assign.triton import _halve
from ..vq_assign.triton_epilogue import _fixed
from . import composed
from .triton_seeding import TritonGrid as TritonGrid

_LANES = tl.constexpr(8)  # partial sums of a squared distance
_ROWS, _KEYS, _CLUSTERS = 64, 4096, 1024  # sizes of a tile; not tuned on a GPU yet
_PROGRAMS = 256  # programs that look for far rows: several for each multiprocessor
_TREE = 4096  # most values that one program adds up


@triton.jit
def _total(lanes, ROWS: tl.constexpr):
    """Add eight partial sums [ROWS, 8] by halves."""
    left, right = _halve(lanes, ROWS, 8)
    left, right = _halve(left + right, ROWS, 4)
    left, right = _halve(left + right, ROWS, 2)
    return tl.reshape(left + right, (ROWS,))


@triton.jit
def _empty(masses, k, CLUSTERS: tl.constexpr):
    """Count the zeros among k masses."""
    count = tl.zeros((CLUSTERS,), tl.int64)
    for start in range(0, k, CLUSTERS):
        cluster = start + tl.arange(0, CLUSTERS)
        count += (tl.load(masses + cluster, mask=cluster < k, other=1) == 0).to(tl.int64)
    return tl.sum(count, 0)


@triton.jit
def _weighted(x, weights, middle, row, j, valid, stride_n, stride_d, WEIGHTED: tl.constexpr):
    """Compute (x - middle) * weight for elements j of a row."""
    value = tl.load(x + row * stride_n + j * stride_d, mask=valid, other=0.0).to(tl.float64)
    value = value - tl.load(middle + j, mask=valid, other=0.0)
    if WEIGHTED:
        value = value * tl.load(weights + row)
    return value


@triton.jit(do_not_specialize=["n", "k", "spread"])
def _far(
    x,
    weights,
    mass_scale,
    centers,
    labels,
    masses,
    ended,
    keys,
    n: tl.int64,
    k,
    stride_n: tl.int64,
    stride_d: tl.int64,
    spread: tl.int64,
    WEIGHTED: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    CLUSTERS: tl.constexpr,
):
    """Write keys [n]: the bits of the distance of each row to its center, or -1.

    The last bits are replaced by the number of the row.
    """
    if tl.load(ended) != 0:
        return
    if _empty(masses, k, CLUSTERS) == 0:
        return
    lane = tl.arange(0, _LANES)
    for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(n, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        valid = row < n
        label = tl.load(labels + row, mask=valid, other=0)
        total = tl.zeros((ROWS, _LANES), tl.float64)
        for start in range(0, D, _LANES):
            j = start + lane
            inside = valid[:, None] & (j < D)[None, :]
            value = tl.load(x + row[:, None] * stride_n + j[None, :] * stride_d, mask=inside, other=0.0).to(
                tl.float64
            )
            difference = value - tl.load(
                centers + label[:, None] * D + j[None, :], mask=inside, other=0.0
            ).to(tl.float64)
            total += difference * difference
        distance = _total(total, ROWS)
        takes_part = distance > 0
        if WEIGHTED:
            takes_part = takes_part & (
                _fixed(tl.load(weights + row, mask=valid, other=0.0) * tl.load(mass_scale)) > 0
            )
        key = (distance.to(tl.int64, bitcast=True) & (-1 - spread)) | (spread - row)
        tl.store(keys + row, tl.where(takes_part, key, -1), mask=valid)


@triton.jit(do_not_specialize=["n", "k", "spread"])
def _fill(
    masses,
    ended,
    keys,
    taken,
    count,
    n: tl.int64,
    k,
    spread: tl.int64,
    KEYS: tl.constexpr,
    CLUSTERS: tl.constexpr,
):
    """Write taken [count]: the row that each empty cluster takes, the farthest one first.

    One program.
    """
    wanted = _empty(masses, k, CLUSTERS)
    if tl.load(ended) != 0:
        wanted = wanted * 0
    found = wanted * 0
    last = found + 0x7FFFFFFFFFFFFFFF
    while found < wanted:
        best = tl.full((KEYS,), -1, tl.int64)
        for start in range(0, n, KEYS):
            place = start + tl.arange(0, KEYS)
            key = tl.load(keys + place, mask=place < n, other=-1)
            best = tl.maximum(best, tl.where(key < last, key, -1))
        last = tl.max(best, 0)  # no two keys are the same
        if last >= 0:
            tl.store(taken + found, spread - (last & spread))
            found += 1
        else:
            wanted = found
    tl.store(count, found)


@triton.jit
def _mean(
    x, weights, middle, scale, labels, sums, taken, moved, cluster, gained, mass, j, valid,
    stride_n, stride_d, WEIGHTED: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute elements j of the mean of a cluster, with the row it gained and without the rows it lost."""
    sum = tl.load(sums + cluster * D + j, mask=valid, other=0)
    unit = tl.load(scale + j, mask=valid, other=1.0)
    if gained >= 0:
        sum += _fixed(_weighted(x, weights, middle, gained, j, valid, stride_n, stride_d, WEIGHTED) * unit)
    for i in range(0, moved):
        row = tl.load(taken + i)
        if tl.load(labels + row) == cluster:
            sum -= _fixed(_weighted(x, weights, middle, row, j, valid, stride_n, stride_d, WEIGHTED) * unit)
    return tl.load(middle + j, mask=valid, other=0.0) + sum.to(tl.float64) / unit / mass


@triton.jit
def _length(
    x, weights, middle, scale, labels, sums, taken, moved, cluster, gained, mass,
    stride_n, stride_d, WEIGHTED: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute the length of the mean of a cluster."""
    lane = tl.arange(0, _LANES)
    squares = tl.zeros((1, _LANES), tl.float64)
    for start in range(0, D, _LANES):
        j = start + lane
        mean = _mean(
            x, weights, middle, scale, labels, sums, taken, moved, cluster, gained, mass, j, j < D,
            stride_n, stride_d, WEIGHTED, D,
        )  # fmt: skip
        mean = tl.where(j < D, mean, 0.0)
        squares += (mean * mean)[None, :]
    return tl.sqrt(tl.max(_total(squares, 1), 0))


@triton.jit
def _mass_with_moves(weights, labels, taken, moved, cluster, gained, mass, whole, WEIGHTED: tl.constexpr):
    """Return the mass of a cluster with the row it gained and without the rows it lost."""
    for i in range(0, moved):
        row = tl.load(taken + i)
        own = _fixed(tl.load(weights + row) * whole) if WEIGHTED else whole.to(tl.int64)
        if row == gained:
            mass += own
        if tl.load(labels + row) == cluster:
            mass -= own
    return mass


@triton.jit(do_not_specialize=["k"])
def _move(
    x, weights, middle, scale, mass_scale, labels, sums, masses, taken, count, ended, centers, moves, k,
    stride_n: tl.int64, stride_d: tl.int64,
    WEIGHTED: tl.constexpr, SPHERICAL: tl.constexpr, D: tl.constexpr, CLUSTERS: tl.constexpr,
):  # fmt: skip
    """Move a center to the mean of its cluster, and write the square of the move.

    One program per cluster.
    """
    if tl.load(ended) != 0:
        return
    cluster = tl.program_id(0).to(tl.int64)
    mass, moved, gained = tl.load(masses + cluster), tl.load(count), tl.program_id(0).to(tl.int64) * 0 - 1
    if (mass == 0) & (moved > 0):
        rank = _empty(masses, cluster.to(tl.int32), CLUSTERS)
        if rank < moved:
            gained = tl.load(taken + rank)
    whole = tl.load(mass_scale)
    mass = _mass_with_moves(weights, labels, taken, moved, cluster, gained, mass, whole, WEIGHTED)
    total = tl.zeros((1, _LANES), tl.float64)
    if mass > 0:
        share, lane = mass.to(tl.float64) / whole, tl.arange(0, _LANES)
        norm = share * 0 + 1
        if SPHERICAL:
            norm = _length(
                x, weights, middle, scale, labels, sums, taken, moved, cluster, gained, share,
                stride_n, stride_d, WEIGHTED, D,
            )  # fmt: skip
        if norm > 0:  # a mean of zeros has no direction: the center stays
            for start in range(0, D, _LANES):
                j = start + lane
                valid = j < D
                mean = _mean(
                    x, weights, middle, scale, labels, sums, taken, moved, cluster, gained, share, j, valid,
                    stride_n, stride_d, WEIGHTED, D,
                )  # fmt: skip
                place = centers + cluster * D + j
                new = (mean / norm).to(centers.dtype.element_ty)
                difference = new.to(tl.float64) - tl.load(place, mask=valid, other=0.0).to(tl.float64)
                difference = tl.where(valid, difference, 0.0)
                total += (difference * difference)[None, :]
                tl.store(place, new, mask=valid)
    tl.store(moves + cluster + tl.arange(0, 1), _total(total, 1))


@triton.jit
def _sum_by_halves(values, SIZE: tl.constexpr):
    """Compute ``tree_sum`` of a vector."""
    if SIZE == 1:
        return tl.sum(values, 0)
    else:
        left, right = tl.split(tl.permute(tl.reshape(values, (2, SIZE // 2)), (1, 0)))
        return _sum_by_halves(left + right, SIZE // 2)


@triton.jit(do_not_specialize=["k"])
def _end_iteration(moves, limit, ended, iterations, k, SIZE: tl.constexpr):
    """Add up the moves, count the iteration, and decide whether it was the last.

    One program.
    """
    if tl.load(ended) != 0:
        return
    place = tl.arange(0, SIZE)
    shift = _sum_by_halves(tl.load(moves + place, mask=place < k, other=0.0), SIZE)
    tl.store(iterations, tl.load(iterations) + 1)
    tl.store(ended, (shift > tl.load(limit)) ^ True)  # NaN ends the fit, too


def advance(
    data: composed.Problem,
    state: composed.FitState,
    limit: torch.Tensor,
    found: steps.Result,
    spherical: bool,
) -> None:
    """Compute ``composed.advance``, with the same bits."""
    labels, sums, masses, _ = found
    rows, centers = data.rows, state.centers
    (n, d), k, device, weighted = rows.shape, len(centers), centers.device, data.weights is not None
    weights = data.mass_scale if data.weights is None else data.weights
    spread = (1 << steps.ceil_log2(n)) - 1
    keys = torch.empty(n, dtype=torch.int64, device=device)
    taken = torch.empty(k + 1, dtype=torch.int64, device=device)
    count = taken[k:]
    moves = torch.empty(k, dtype=torch.float64, device=device)
    programs = min(_PROGRAMS, triton.cdiv(n, _ROWS))
    with torch.cuda.device_of(rows):
        _far[(programs,)](
            rows, weights, data.mass_scale, centers, labels, masses, state.ended, keys,
            n, k, *rows.stride(), spread, weighted, d, _ROWS, _CLUSTERS, enable_fp_fusion=False,
        )  # fmt: skip
        _fill[(1,)](masses, state.ended, keys, taken, count, n, k, spread, _KEYS, _CLUSTERS, num_warps=8)
        _move[(k,)](
            rows, weights, data.middle, data.scale, data.mass_scale, labels, sums, masses, taken, count,
            state.ended, centers, moves, k, *rows.stride(), weighted, spherical, d, _CLUSTERS,
            enable_fp_fusion=False, num_warps=1,
        )  # fmt: skip
        if k > _TREE:
            moves = steps.tree_sum(moves).reshape(1)
        size = 1 << steps.ceil_log2(len(moves))
        _end_iteration[(1,)](
            moves, limit, state.ended, state.iterations, len(moves), size, enable_fp_fusion=False
        )
