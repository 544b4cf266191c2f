"""CPU kernels for NumPy arrays, without torch.

The results equal the results of the ops.

Importing this module raises ImportError if the kernels are not compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _host
from ._kmeans_checks import METRICS, check_method, check_request, check_shape, native, starts, unknown
from ._numbers import as_integer

__all__ = ["NumpyKMeansResult", "kmeans", "vq_assign"]


class NumpyKMeansResult(NamedTuple):
    """Result of :func:`kmeans`."""

    centers: npt.NDArray[Any]
    """``[k, d]``, the dtype of x."""
    labels: npt.NDArray[np.int64]
    """``[N]``, the index of the nearest of ``centers`` for each row."""
    inertia: float
    """Weighted sum of the squared distances of the rows to their centers."""
    iterations: int
    """Number of updates of the centers."""


def vq_assign(
    x: npt.NDArray[Any],
    codebook: npt.NDArray[Any],
    *,
    metric: str = "l2",
    precision: str = "exact",
    threads: int | None = None,
) -> npt.NDArray[np.int64]:
    """Return the index of the nearest codeword for each segment of each row: ``vq_assign`` for arrays.

    Args:
        x: ``[..., D]`` float32 or float64; any strides and byte order.
        codebook: ``[K, d]`` or ``[S, K, d]``, float32 or float64, finite.
        metric: ``"l2"`` or ``"cosine"``.
        precision: ``"exact"`` or ``"fast"``.
        threads: the largest number of threads; None: all.

    Returns:
        indices ``[..., S]``.

    Raises:
        TypeError: an argument is not an array, has a dtype other than float32 and float64, or has masked
            values; ``threads`` is not an int.
        ValueError: the shapes do not match, or ``metric``, ``precision`` or ``threads`` is not valid.
        RuntimeError: the codebook is not finite.
        MemoryError: the codebook is not contiguous, and there is not enough memory for a contiguous copy.

    Source: van den Oord et al. 2017, "Neural Discrete Representation Learning", eq. 1.

    For a codebook ``[K, d]`` and ``"l2"``, equivalent to the following, but without a matrix of all
    distances::

        rows = x.reshape(*x.shape[:-1], -1, 1, d).astype(float)
        ((rows - codebook) ** 2).sum(-1).argmin(-1)
    """
    for name, word, known in (("metric", metric, METRICS), ("precision", precision, ("exact", "fast"))):
        if not isinstance(word, str) or word not in known:
            raise unknown("vq_assign", name, word, known)
    threads = _threads("vq_assign", threads)
    x, codebook = _floats("vq_assign", "x", x), _floats("vq_assign", "codebook", codebook)
    try:  # make the copy here, because pybind11 would hide the MemoryError
        codebook = np.require(codebook, requirements=("C", "A"))
    except MemoryError as error:
        raise MemoryError(
            f"vq_assign: no memory for a contiguous copy of codebook {list(codebook.shape)}: {error}; pass a"
            " contiguous codebook"
        ) from None
    indices: npt.NDArray[np.int64] = _host.vq_assign(
        x, codebook, metric=metric, exact=precision == "exact", threads=threads
    )
    return indices


def kmeans(
    x: npt.NDArray[Any],
    k: int,
    *,
    weights: npt.NDArray[Any] | None = None,
    init: str | npt.NDArray[Any] = "k-means++",
    n_init: int | str = "auto",
    max_iter: int = 300,
    tol: float = 1e-4,
    seed: int = 0,
    metric: str = "l2",
    threads: int | None = None,
) -> NumpyKMeansResult:
    """Cluster the rows of x, bit for bit as :func:`uefl_kernels.kmeans`.

    Args:
        x: ``[N, d]`` float32 or float64, finite, without masked values; any strides and byte order.
        k, n_init, max_iter, tol, seed, metric: see :func:`uefl_kernels.kmeans`.
        weights: ``[N]``, not negative and not all zero; None: all ones.
        init: ``"k-means++"``, ``"k-means||"``, ``"random"`` or the centers ``[k, d]``.
        threads: the largest number of threads; None: all. The result does not depend on it.

    Returns:
        :class:`NumpyKMeansResult` ``(centers, labels, inertia, iterations)``.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape or a number is not valid.
        RuntimeError: the values of x, the weights or the given centers are not valid.

    Source: see :func:`uefl_kernels.kmeans`.

    If the centers are given and no cluster becomes empty, equivalent to::

        for _ in range(max_iter):
            labels = ((x[:, None] - centers.astype(float)) ** 2).sum(-1).argmin(1)
            centers = np.stack([x[labels == i].mean(0, dtype=float) for i in range(k)]).astype(x.dtype)
    """
    x = _floats("kmeans", "x", x)
    weights = None if weights is None else _numbers("kmeans", "weights", weights).astype(np.float64)
    init = init if isinstance(init, str) else _numbers("kmeans", "init", init)
    if x.ndim != 2:
        raise ValueError(f"kmeans: x must have shape [N, d], got {list(x.shape)}")
    threads = _threads("kmeans", threads)
    n, d = x.shape
    k, max_iter, seed = check_request("kmeans", n, d, k, n_init, max_iter, tol, seed, metric)
    if weights is not None:
        check_shape("kmeans", "weights", weights.shape, [n])
    method, centers = (init, None) if isinstance(init, str) else (None, init)
    if centers is None:
        check_method("kmeans", method)
    else:
        check_shape("kmeans", "init", centers.shape, [k, d])
        with np.errstate(over="ignore"):  # overflow gives infinite centers, which the kernel refuses
            centers = centers.astype(x.dtype)
    numbers = starts(n_init, method), max_iter, float(tol), seed, threads
    return NumpyKMeansResult(
        *_host.kmeans(x, k, weights, centers, method or "", metric == "cosine", *numbers)
    )


def _threads(op: str, threads: int | None) -> int | None:
    if threads is None:
        return None
    number = as_integer(threads)
    if number is None:
        raise TypeError(f"{op}: threads must be an int of at least 1, or None for all, got {threads!r}")
    if number < 1:
        raise ValueError(f"{op}: threads must be at least 1, or None for all, got {number}")
    return min(number, 2**31 - 1)


def _numbers(op: str, name: str, value: Any) -> npt.NDArray[Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{op}: {name} must be a NumPy array, got {type(value).__name__}")
    array = native(op, name, value)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{op}: {name} has dtype {value.dtype}, expected real numbers")
    return array


def _floats(op: str, name: str, value: Any) -> npt.NDArray[Any]:
    array = _numbers(op, name, value)
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(
            f"{op}: {name} has dtype {value.dtype}, expected float32 or float64; convert it with"
            f" {name}.astype(np.float32)"
        )
    return array
