"""Checks of the arguments of k-means, and their defaults, without torch: the NumPy front end shares them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ._numbers import as_integer

INITS = ("k-means++", "k-means||", "random")
METRICS = ("l2", "cosine")
ALGORITHMS = ("lloyd", "elkan")  # scikit-learn's names, for the estimator


def native(op: str, name: str, value: Any) -> npt.NDArray[Any]:
    """Return a value as an array in the byte order of this machine.

    Masked arrays are refused: their mask would be lost.
    """
    if np.ma.is_masked(value):
        raise TypeError(
            f"{op}: {name} is a masked array with masked values, which have no meaning here; remove those"
            " rows or fill them"
        )
    array = np.asarray(value)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


class FitIntegers(NamedTuple):
    """The integers of a problem, as ints of Python."""

    k: int
    max_iter: int
    seed: int


def unknown(op: str, name: str, value: Any, known: tuple[str, ...]) -> ValueError:
    """Return the error for a word that is not known, or no word."""
    return ValueError(f"{op}: {name} {value!r} is not known, expected one of {known}")


def check_request(
    op: str,
    n: int,
    d: int,
    k: int,
    n_init: int | str,
    max_iter: int,
    tol: float,
    seed: int,
    metric: str,
    *,
    k_name: str = "k",
    seed_name: str = "seed",
) -> FitIntegers:
    """Return the integers of a problem of n rows of d elements.

    Raise TypeError or ValueError if it cannot be solved.
    """
    k, max_iter, seed = (
        _integer(op, name, value) for name, value in ((k_name, k), ("max_iter", max_iter), (seed_name, seed))
    )
    if d < 1:
        raise ValueError(f"{op}: x [{n}, {d}] has no elements; it needs at least one column")
    if k < 1:
        raise ValueError(f"{op}: {k_name} must be at least 1, got {k}")
    if n < k:
        raise ValueError(f"{op}: {k} clusters need at least {k} rows, got {n}; lower k or give more data")
    count = 1 if isinstance(n_init, str) and n_init == "auto" else as_integer(n_init)
    if count is None or not 1 <= count < 2**63:
        raise ValueError(f"{op}: n_init must be 'auto' or an int of at least 1, below 2^63, got {n_init!r}")
    if max_iter < 1:
        raise ValueError(f"{op}: max_iter must be at least 1, got {max_iter}")
    if isinstance(tol, bool) or not isinstance(tol, (int, float, np.integer, np.floating)):
        raise TypeError(f"{op}: tol must be a number, got {tol!r}")
    if not (math.isfinite(tol) and tol >= 0):
        raise ValueError(
            f"{op}: tol must be finite and not negative, got {tol}; use 0 to continue until no label changes"
        )
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"{op}: {seed_name} must be from -2^63 to 2^63 - 1, got {seed}")
    if not isinstance(metric, str) or metric not in METRICS:
        raise unknown(op, "metric", metric, METRICS)
    return FitIntegers(k, min(max_iter, 2**63 - 1), seed)


def _integer(op: str, name: str, value: Any) -> int:
    number = as_integer(value)
    if number is None:
        # the elements of an array take many lines
        got = type(value).__name__ if getattr(value, "ndim", 0) else repr(value)
        raise TypeError(f"{op}: {name} must be an int, got {got}")
    return number


def check_method(op: str, init: object) -> None:
    """Raise TypeError or ValueError for a seeding that does not exist."""
    if not isinstance(init, str):
        raise TypeError(
            f"{op}: init must be one of {INITS} or the centers themselves, [k, d], got {type(init).__name__}"
        )
    if init not in INITS:
        raise ValueError(
            f"{op}: init {init!r} is not known, expected one of {INITS} or the centers themselves, [k, d]"
        )


def check_shape(op: str, name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    """Raise ValueError when a shape is not the expected one."""
    if tuple(shape) != tuple(expected):
        raise ValueError(f"{op}: {name} must have shape {list(expected)}, got {list(shape)}")


def starts(n_init: int | str, init: str | None) -> int:
    """Return the number of starts.

    Given centers need one; random rows need the most.
    """
    if init is None:
        return 1
    if isinstance(n_init, str):
        return 10 if init == "random" else 1
    return int(n_init)
