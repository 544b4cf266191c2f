"""``kmeans`` and ``kmeans_batched``: a whole fit, or a batch of fits, in one op.

``kmeans_lloyd`` has the iterations of a fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..._checks import check_dense, check_tensor
from ..._dtypes import result_dtype
from ..._kmeans_checks import check_method, check_request, check_shape, starts
from ..._library import define, define_composed, resolve
from ..._numbers import as_integer
from .. import kmeans_step as _kmeans_step  # noqa: F401
from . import composed


class KMeansResult(NamedTuple):
    """Result of a fit, on the device of x.

    Centers are float64 for float64 x and float32 for all else.
    """

    centers: torch.Tensor
    """``[k, d]``"""
    labels: torch.Tensor
    """``[N]`` int64: the nearest of these centers."""
    inertia: torch.Tensor
    """scalar, float64: weighted sum of the squared distances of the rows to their centers."""
    iterations: torch.Tensor
    """scalar, int64: the number of iterations."""


def _fake(given: composed.Arguments) -> composed.Result:
    x, problems = given.x, len(given.sizes)
    return (
        x.new_empty(sum(given.clusters), x.shape[1], dtype=result_dtype(x)),
        x.new_empty(x.shape[0], dtype=torch.int64),
        x.new_empty(problems, dtype=torch.float64),
        x.new_empty(problems, dtype=torch.int64),
    )


def _fake_lloyd(given: composed.LloydArguments) -> composed.Result:
    x = given.x
    return (
        torch.empty_like(given.centers),
        x.new_empty(x.shape[0], dtype=torch.int64),
        x.new_empty((), dtype=torch.float64),
        x.new_empty((), dtype=torch.int64),
    )


define(
    __name__,
    "kmeans_lloyd",
    composed.LloydArguments,
    ["centers", "labels", "inertia", "iterations"],
    fake=_fake_lloyd,
    fallback=composed.lloyd_fallback,
)
define_composed("kmeans_lloyd", composed.lloyd_around, kernel="kmeans_step")
define(
    __name__,
    "kmeans",
    composed.Arguments,
    ["centers", "labels", "inertia", "iterations"],
    fake=_fake,
    fallback=composed.fallback,
)
define_composed("kmeans", composed.around, kernel="kmeans_lloyd")


def kmeans(
    x: torch.Tensor,
    k: int,
    *,
    weights: torch.Tensor | None = None,
    init: str | torch.Tensor = "k-means++",
    n_init: int | str = "auto",
    max_iter: int = 300,
    tol: float = 1e-4,
    seed: int = 0,
    metric: str = "l2",
) -> KMeansResult:
    """Cluster the rows of x: seeding, Lloyd's algorithm with exact labels, and inertia.

    The same input and seed give the same bits on every backend and for any number of threads: labels are the
    argmin of the float64 distance, and sums over rows are sums of integers. Seeding compares distances on a
    grid of whole numbers, with 2^14 steps from the middle of the data to its edge. In the seeding, and only
    there, rows on the same point of the grid are equal.

    Args:
        x: ``[N, d]``, float32, bfloat16, float16 or float64; any strides. It must be finite, and at most
            2^480 in float64, so that no sum of squares overflows. The CPU checks this. A check would stall a
            GPU, so there the inertia becomes NaN or infinite instead. Differences below 1e-160, which only
            float64 has, count as zero, because their squares are zero.
        k: the number of clusters, 1 <= k <= N.
        weights: ``[N]``, not negative, not all zero, at most 2^1000; a row of weight 2 counts as two rows.
            Checked on the CPU. They are rounded to 2^-(62 - log2 N) of the largest, so smaller ones count as
            zero. Default: ones.
        init: ``"k-means++"``: greedy. Each of the k centers is the best of 2 + ln k rows, which are drawn
            with probabilities proportional to the squared distance. ``"k-means||"``: five rounds draw 2 k
            rows each, then k-means++ runs on these rows; it reads x fewer times. ``"random"``: different
            rows. Or the centers, ``[k, d]``.
        n_init: the number of starts; the lowest inertia wins. ``"auto"``: 10 for ``"random"``, else 1.
        max_iter: the largest number of iterations.
        tol: stop when the squared movement of the centers, summed, is at most this times the mean variance of
            the columns; and in any case when no label changes.
        seed: seed of Philox4x32-10 (counters: ``Grid`` in ``grid.py``).
        metric: ``"l2"``; or ``"cosine"``: rows and centers are scaled to length 1 (spherical k-means), also
            for the inertia. A row of zeros stays zero.

    The error of a center is its own rounding, or 2^-(62 - log2 N) (at least 2^-52) of the reach of a column
    if that is larger. The reach is half the distance between the extremes of the column. So a single value of
    1e20 removes the digits of the other centers, as in every method that first centers the data.

    A cluster that loses all its rows takes the row that is farthest from its center. Distances are compared
    up to about 2^-(52 - log2 N) of their size; of equal distances, the lowest row is taken. If every
    remaining row equals its center, the cluster keeps its center.

    Returns:
        :class:`KMeansResult` ``(centers, labels, inertia, iterations)``. No gradient. On a GPU the host asks
        every 16 iterations whether the fit has converged; iterations after the end change nothing. The host
        cannot ask while a CUDA graph is captured, so all ``max_iter`` iterations are in the graph.

    Raises:
        TypeError, ValueError: shapes, dtypes, devices or numbers that do not fit.
        RuntimeError: x, weights or given centers are not valid, or a forced backend is absent.

    Source: Lloyd 1982; Arthur & Vassilvitskii 2007, "k-means++" (greedy version, section 4); Bahmani et al.
    2012, "Scalable k-means++" (drawn with replacement: Bachem et al. 2017).

    Equivalent to (given centers, no empty cluster)::

        for _ in range(max_iter):
            labels = torch.cdist(x.double(), centers.double()).argmin(1)
            centers = torch.stack([x[labels == i].double().mean(0) for i in range(k)]).to(centers.dtype)
    """
    _check_rows("kmeans", x)
    return _call("kmeans", x, [x.shape[0]], [k], [seed], weights, init, n_init, max_iter, tol, metric)[0]


def kmeans_batched(
    xs: Sequence[torch.Tensor] | torch.Tensor,
    k: int | Sequence[int],
    *,
    weights: Sequence[torch.Tensor] | None = None,
    init: str | Sequence[torch.Tensor] = "k-means++",
    n_init: int | str = "auto",
    max_iter: int = 300,
    tol: float = 1e-4,
    seed: int | Sequence[int] = 0,
    metric: str = "l2",
) -> list[KMeansResult]:
    """Solve several independent problems in one call, each with its own rows, k and seed.

    On the CPU each thread takes one problem.

    Args:
        xs: tensors ``[N_p, d]`` of one dtype and device, or one tensor ``[P, N, d]``.
        k: one number for all, or one for each.
        weights: one tensor ``[N_p]`` for each.
        init: the name of a seeding, or centers ``[k_p, d]`` for each.
        n_init, max_iter, tol, metric: as for :func:`kmeans`.
        seed: one number for all, or one for each.

    Returns:
        the result of :func:`kmeans` for each problem, to the bit.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`kmeans`; with several problems, the message has the
            number of the problem.

    Source: as :func:`kmeans`.

    Equivalent to::

        [kmeans(x, k, weights=w, seed=s, ...) for x, k, w, s in zip(xs, ks, weights, seeds)]
    """
    op = "kmeans_batched"
    if isinstance(xs, torch.Tensor):
        check_dense(op, "xs", xs)
    if isinstance(xs, torch.Tensor) and xs.dim() != 3:
        raise ValueError(
            f"{op}: xs must be tensors [N, d], or one tensor [P, N, d], got {list(xs.shape)}; kmeans takes a"
            " single problem"
        )
    if not hasattr(xs, "__iter__"):
        raise TypeError(f"{op}: xs must be tensors [N, d], or one tensor [P, N, d], got {type(xs).__name__}")
    xs = list(xs)
    for i, x in enumerate(xs):
        _check_rows(op, x, f"xs[{i}]")
    if not xs:
        return []
    if any((x.shape[1], x.dtype, x.device) != (xs[0].shape[1], xs[0].dtype, xs[0].device) for x in xs):
        raise ValueError(f"{op}: the problems must have the same number of columns, dtype and device")
    clusters, seeds = (_for_each(op, name, value, len(xs)) for name, value in (("k", k), ("seed", seed)))
    several: dict[str, Any] = {} if weights is None else {"weights": weights}
    several |= {} if isinstance(init, str) else {"init": init}
    for name, tensors in several.items():
        if isinstance(tensors, str) or not hasattr(tensors, "__len__") or getattr(tensors, "ndim", 1) == 0:
            raise TypeError(f"{op}: {name} must be one tensor for each problem, got {tensors!r}")
    for name, values in ({"k": clusters, "seed": seeds} | several).items():
        if len(values) != len(xs):
            raise ValueError(f"{op}: {name} has {len(values)} entries for {len(xs)} problems")
    for name, tensors in several.items():
        for i, (tensor, x) in enumerate(zip(tensors, xs, strict=True)):
            check_tensor(op, f"{name}[{i}]", tensor)
            expected = [x.shape[0]] if name == "weights" else [clusters[i], x.shape[1]]
            check_shape(op, f"{name}[{i}]", tensor.shape, expected)
    given = init if isinstance(init, str) else torch.cat(list(init))
    mass = None if weights is None else torch.cat(list(weights))
    return _call(
        op,
        torch.cat(xs),
        [x.shape[0] for x in xs],
        clusters,
        seeds,
        mass,
        given,
        n_init,
        max_iter,
        tol,
        metric,
    )


def _for_each(op: str, name: str, value: int | Sequence[int], problems: int) -> list[int]:
    if (number := as_integer(value)) is not None:
        return [number] * problems
    if not hasattr(value, "__iter__") or isinstance(value, str) or getattr(value, "ndim", 1) == 0:
        raise TypeError(f"{op}: {name} must be an int, or one for each problem, got {value!r}")
    # check_request refuses other values and names the problem
    return [entry if (number := as_integer(entry)) is None else number for entry in value]


def _check_rows(op: str, x: torch.Tensor, name: str = "x") -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}; uefl_kernels.numpy takes arrays"
        )
    check_tensor(op, name, x)
    if x.dim() != 2:
        raise ValueError(f"{op}: {name} must have shape [N, d], got {list(x.shape)}")


def _tensors(
    op: str, x: torch.Tensor, weights: torch.Tensor | None, init: str | torch.Tensor, clusters: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the weights in float64 and the given centers, each None if there are none."""
    mass, centers = None, None
    if weights is not None:
        check_tensor(op, "weights", weights)
        check_shape(op, "weights", weights.shape, [x.shape[0]])
        mass = weights.detach().double()
    if isinstance(init, torch.Tensor):
        check_tensor(op, "init", init)
        check_shape(op, "init", init.shape, [clusters, x.shape[1]])
        centers = init.detach().to(result_dtype(x))
    else:
        check_method(op, init)
    for name, tensor in (("weights", mass), ("init", centers)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{op}: x is on {x.device} and {name} on {tensor.device}; move one of them")
    return mass, centers


def _call(
    op: str,
    x: torch.Tensor,
    sizes: list[int],
    clusters: list[int],
    seeds: list[int],
    weights: torch.Tensor | None,
    init: str | torch.Tensor,
    n_init: int | str,
    max_iter: int,
    tol: float,
    metric: str,
) -> list[KMeansResult]:
    requests = [
        check_request(
            op if len(sizes) == 1 else f"{op}: problem {i}",
            n,
            x.shape[1],
            k,
            n_init,
            max_iter,
            tol,
            seed,
            metric,
        )
        for i, (n, k, seed) in enumerate(zip(sizes, clusters, seeds, strict=True))
    ]
    clusters, seeds = [request.k for request in requests], [request.seed for request in requests]
    mass, centers = _tensors(op, x, weights, init, sum(clusters))
    method = "given" if isinstance(init, torch.Tensor) else init
    restarts = starts(n_init, None if isinstance(init, torch.Tensor) else init)
    given = composed.Arguments(
        x.detach(),
        mass,
        centers,
        sizes,
        clusters,
        seeds,
        method,
        metric == "cosine",
        restarts,
        requests[0].max_iter,
        float(tol),
    )
    found = resolve("kmeans", x)(*given)
    columns = zip(
        found[0].split(clusters), found[1].split(sizes), found[2].unbind(), found[3].unbind(), strict=True
    )
    return [KMeansResult(*column) for column in columns]
