"""Convert arrays, lists, data frames and tensors to tensors, and results back."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .._checks import DTYPES, check_dense
from .._kmeans_checks import native
from ..ops.kmeans.blocks import Blocks
from ..ops.kmeans_sparse import SparseRows

Back = Callable[[torch.Tensor], Any]

_BLOCK_BYTES = 1 << 26  # most bytes of rows, as float64, that are read or made dense at once
_FLOATS = (np.float16, np.float32, np.float64)
_COMPLEX = "Complex data not supported: {} needs real numbers."


def rows_of(name: str, X: Any, *, none_is_legal: bool = False) -> tuple[torch.Tensor, Back]:
    """Return rows [n, d] of one of the four dtypes, and a function that converts results.

    Rows are not copied if possible. The function converts results to the kind of X.
    """
    given = isinstance(X, torch.Tensor)
    x, back = (real(name, "X", X), _keep) if given else (_tensor(name, X), to_numpy)
    if x.dim() != 2:
        raise ValueError(
            f"Expected 2D array, got {x.dim()}D array instead. Reshape your data: {name} needs one row per"
            " sample."
        )
    if x.dtype not in DTYPES:
        x = x.double()
    n, d = x.shape
    if (n == 0 and not none_is_legal) or d == 0:
        kind = f"{n} sample(s)" if n == 0 else f"{d} feature(s)"
        raise ValueError(
            f"Found array with {kind} (shape=({n}, {d})) while a minimum of 1 is required by {name}."
        )
    return x, back


@dataclass(frozen=True)
class RowSource:
    """Rows [n, d] of a memory-mapped file or a sparse matrix, in dense blocks."""

    n: int
    d: int
    select: Callable[[Any], torch.Tensor]
    """Return the rows of a slice or of an array of numbers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        step = max(1, _BLOCK_BYTES // (8 * self.d))
        for start in range(0, self.n, step):
            yield self.select(slice(start, start + step))

    def blocks(self) -> Blocks:
        """Return the rows for a fit."""
        return Blocks(self.__iter__, lambda numbers: self.select(numbers.numpy()))


def source_of(name: str, X: Any) -> RowSource | None:
    """Return the rows of a ``numpy.memmap`` or a sparse matrix, and None for other types."""
    if hasattr(X, "tocsr"):
        X, dense = csr_of(name, X), lambda rows: rows.toarray()
    elif isinstance(X, np.memmap):
        dense = np.asarray
    else:
        return None
    if X.ndim != 2 or 0 in X.shape:
        rows_of(name, np.empty(X.shape))  # raises the error
    n, d = X.shape
    return RowSource(n, d, lambda index: rows_of(name, dense(X[index]))[0])


def csr_of(name: str, X: Any, *, full: bool | None = None) -> Any:
    """Return a sparse matrix in CSR format, without the flags of X, which are wrong if its arrays changed.

    Damaged arrays are refused: SciPy would read outside of them. ``full``: check all indices; by default
    where the conversion reads them.
    """
    try:
        if hasattr(X, "check_format"):
            X = type(X)((X.data, X.indices, X.indptr), shape=X.shape)
            X.check_format(full_check=X.format != "csr" if full is None else full)
        return X.tocsr()
    except ValueError as error:
        raise _damaged(name, error) from None


def _damaged(name: str, error: ValueError) -> ValueError:
    return ValueError(f"{name}: X is a damaged sparse matrix ({error}); make it again")


def sparse_rows_of(name: str, X: Any, *, checked: bool = True) -> SparseRows:
    """Return the rows of a sparse matrix of SciPy, without a copy if possible.

    If not ``checked``, their columns may be out of range, in any order or double, which an op refuses.
    """
    matrix = csr_of(name, X)
    if matrix.dtype.kind == "c":
        raise ValueError(_COMPLEX.format(name))
    if matrix.shape[1] > np.iinfo(np.int32).max:
        raise ValueError(f"{name}: X has {matrix.shape[1]} features, more than 2^31 - 1")
    try:
        if (checked or matrix.indices.dtype != np.int32) and not _in_order(matrix):
            matrix.check_format(full_check=True)
            matrix = matrix.copy()
            matrix.sum_duplicates()
    except ValueError as error:
        raise _damaged(name, error) from None
    dtype = matrix.dtype if matrix.dtype in (np.float32, np.float64) else np.float64
    arrays = ((matrix.data, dtype), (matrix.indices, np.int32), (matrix.indptr, np.int64))
    values, columns, offsets = (
        shared(np.ascontiguousarray(array).astype(kind, copy=False)) for array, kind in arrays
    )
    return SparseRows(values, columns, offsets, matrix.shape[1])


def _in_order(matrix: Any) -> bool:
    """Return True if the columns of each row are in range and ascend, after one pass over them.

    SciPy takes three passes.
    """
    columns, offsets, d = matrix.indices, matrix.indptr, matrix.shape[1]
    sizes = np.diff(offsets)
    if (sizes < 0).any():
        return False
    starts, ends = offsets[:-1][sizes > 0], offsets[1:][sizes > 0]
    if len(starts) == 0:
        return True
    falls = columns[1:] <= columns[:-1]  # only between two rows
    between = np.count_nonzero(falls[starts[1:] - 1])
    in_range = columns[starts].min() >= 0 and columns[ends - 1].max() < d
    return bool(np.count_nonzero(falls) == between and in_range)


def blocks_of(name: str, blocks: Any) -> Blocks:
    """Return blocks from an iterable that can be read many times.

    It may also be a function that returns an iterator.
    """
    if not callable(blocks) and (not hasattr(blocks, "__iter__") or iter(blocks) is blocks):
        raise TypeError(
            f"{name}: blocks is {type(blocks).__name__}, which can be read only once, but a fit reads the"
            " blocks many times; give a list of arrays, or a function that returns an iterator"
        )
    return Blocks(
        lambda: (
            rows_of(name, block, none_is_legal=True)[0]
            for block in (blocks() if callable(blocks) else blocks)
        )
    )


def numbers(name: str, argument: str, value: Any) -> torch.Tensor:
    """Return weights or centers in float64, or in float32 if that is their dtype."""
    if isinstance(value, torch.Tensor):
        found = real(name, argument, value)
        return found if found.dtype == torch.float32 else found.double()
    array = without_na(native(name, argument, value))
    if array.dtype.kind == "c":
        raise ValueError(_COMPLEX.format(name))
    try:
        single = array.dtype == np.float32
        return shared(np.asarray(array, np.float32 if single else np.float64, order="C"))
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}: {argument} must hold real numbers, got an array of dtype {array.dtype}"
        ) from None


def codes_of(name: str, codes: Any) -> torch.Tensor:
    """Return codes as a tensor of int64 or of floats, or raise ValueError for other values."""
    refused = f"{name}: codes must be whole numbers, got "
    if isinstance(codes, torch.Tensor):
        if codes.is_complex() or codes.dtype == torch.bool:
            raise ValueError(f"{refused}{codes.dtype}")
        found = real(name, "codes", codes)
        return found if found.is_floating_point() else found.long()
    array = native(name, "codes", codes)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{refused}{array.dtype}")
    return torch.from_numpy(array.astype(np.float64 if array.dtype.kind == "f" else np.int64, order="C"))


def real(name: str, argument: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its gradient.

    Raises:
        TypeError: it is sparse, nested or quantized.
        ValueError: it is complex or on the meta device.
    """
    check_dense(name, argument, tensor, (tensor.dtype,))
    if tensor.is_meta:
        raise ValueError(
            f"{name}: {argument} is on the meta device and has no values; move it to another one"
        )
    if tensor.is_complex():
        raise ValueError(_COMPLEX.format(name))
    return tensor.detach()


def shared(array: Any) -> torch.Tensor:
    """Return a tensor that shares the memory of an array.

    It is only read, so torch's warning about read-only arrays is suppressed.
    """
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def without_na(array: Any) -> Any:
    """Replace missing dates of NumPy and missing values of pandas in an array by NaN."""
    if array.dtype.kind in "mM":
        return np.where(np.isnat(array), np.nan, array.astype(np.float64))
    pandas = sys.modules.get("pandas")
    return array if pandas is None or array.dtype.kind != "O" else np.where(pandas.isna(array), np.nan, array)


def column_names(X: Any) -> Any:
    """Return the column names of a data frame if all are strings, and None if none is.

    A mixture is an error, as in scikit-learn.
    """
    if isinstance(X, torch.Tensor) or _is_lazy(X):
        return None
    columns = getattr(X, "column_names", getattr(X, "columns", None))  # PyArrow has column_names
    if columns is None or len(columns) == 0:
        return None
    kinds = sorted({type(name).__qualname__ for name in columns})
    if "str" not in kinds:
        return None
    if len(kinds) > 1:
        raise TypeError(
            "Feature names are only supported if all input features have string names, but your input has"
            f" {kinds} as feature name / column name types. Convert them all to strings, as by X.columns ="
            " X.columns.astype(str)."
        )
    return np.asarray(list(columns), dtype=object)


def check_names(estimator: str, seen: Any, names: Any) -> None:
    """Raise ValueError if the column names, or their order, differ from the fit.

    Warn if only one of the two has names.
    """
    if seen is None and names is None:
        return
    if seen is None:
        warnings.warn(f"X has feature names, but {estimator} was fitted without feature names", stacklevel=4)
        return
    if names is None:
        warnings.warn(
            f"X does not have valid feature names, but {estimator} was fitted with feature names",
            stacklevel=4,
        )
        return
    if list(seen) == list(names):
        return
    message = "The feature names should match those that were passed during fit.\n"
    unseen, missing = sorted(set(names) - set(seen)), sorted(set(seen) - set(names))
    for title, differing in (
        ("Feature names unseen at fit time", unseen),
        ("Feature names seen at fit time, yet now missing", missing),
    ):
        if differing:
            message += (
                f"{title}:\n"
                + "".join(f"- {name}\n" for name in differing[:5])
                + ("- ...\n" if len(differing) > 5 else "")
            )
    if not unseen and not missing:
        message += "Feature names must be in the same order as they were in fit.\n"
    raise ValueError(message)


def seed_of(random_state: Any) -> int:
    """Return a seed for the kernels."""
    if random_state is None:
        return int(
            torch.randint(2**31, (), device="cpu")
        )  # on the CPU, even if the default device is another one
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31))
    return random_state  # type: ignore[no-any-return]  # an int, which is checked


def _keep(result: torch.Tensor) -> torch.Tensor:
    return result


def to_numpy(result: torch.Tensor) -> Any:
    """Convert a result to NumPy."""
    return result.numpy()


def _array(name: str, X: Any) -> Any:
    """Return X as an array of floating point (or complex) numbers."""
    try:
        array = native(name, "X", X)
        return (
            array
            if array.dtype.kind == "c" or array.dtype in _FLOATS
            else without_na(array).astype(np.float64)
        )
    except (TypeError, ValueError) as error:
        if str(error).startswith(name):
            raise
        if not any(words in str(error) for words in ("sequence", "one element tensors")):
            raise type(error)(f"{name}: X must hold numbers: {error}") from None
        raise ValueError(
            f"{name}: X holds sequences as elements, or rows of different lengths; give numbers [n_samples,"
            " n_features], as by np.stack(X)"
        ) from None


def _is_lazy(X: Any) -> bool:
    """Return True for a polars LazyFrame, which warns where its columns are read."""
    return hasattr(X, "collect") and not hasattr(X, "__array__")


def _tensor(name: str, X: Any) -> torch.Tensor:
    if _is_lazy(X):
        raise TypeError(f"{name}: X is a {type(X).__name__}, which holds no values yet; call .collect()")
    if hasattr(X, "tocsr"):
        X = csr_of(name, X, full=True).toarray()
    array = _array(name, X)
    if array.dtype.kind == "c":
        raise ValueError(_COMPLEX.format(name))
    whole = array.flags.aligned and all(
        stride >= 0 and stride % array.itemsize == 0 for stride in array.strides
    )
    return shared(array if whole else np.array(array, order="C"))
