"""Inputs that are not images: the columns of a table, and sequences of tokens.

A table of numbers becomes float64 ``[N, F]``, so that large numbers such as times keep their digits until
they are standardized. Sequences become int64 ``[N, L]``, with 0 as padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import UserError
from .inputs import Inputs
from .pixels import dense, native

if TYPE_CHECKING:
    import pandas

    from .images import Rows

MOST_TOKENS = 1_000_000
"""largest vocabulary: the first layer has a row for each token"""
_LARGEST = 1e36  # largest value of a column, so that float32 and sums of squares in float64 can hold it


@dataclass(frozen=True)
class Vectors:
    """Inputs of one length in memory.

    The attributes are the ones of :class:`uefl.data.images.ImageList` that the builders of federations use.
    """

    values: torch.Tensor
    """``[N, F]`` float64 or ``[N, L]`` int64"""
    inputs: Inputs
    place: str = ""
    """place of the inputs, for messages"""
    files: tuple[str, ...] = ()
    """names in the manifest; empty: inputs are known by their position"""
    inside: str = ""
    kinds: Mapping[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Return the number of inputs."""
        return len(self.values)

    def content(self, rows: Rows) -> Iterator[bytes]:
        """Yield for each input the bytes of its values."""
        for row in rows:
            yield self.values[row].numpy().tobytes()

    def name(self, row: int) -> str:
        """Return the name of an input for a message."""
        return self.files[row] if self.files else f"{self.place}: row {row + 1}"


def of_array(values: Any, where: str, vocabulary: int = 0) -> Vectors:
    """Return floats ``[N, F]`` as columns, integers ``[N, L]`` as tokens, and a pandas DataFrame as columns.

    Args:
        values: an array, a tensor, or a DataFrame of numbers.
        where: begins a message.
        vocabulary: number of different tokens; 0: the highest token plus 1. If it is set, a DataFrame has
            tokens.

    Raises:
        UserError: values have another type or shape or are missing, or tokens are outside of the vocabulary.
    """
    if is_frame(values):
        return of_frame(values, where, vocabulary)
    values = numbers_of(values, where)
    if values.ndim != 2 or 0 in values.shape:
        raise UserError(f"{where}: expected [N, F] with N and F above 0, got {list(values.shape)}")
    if not values.is_floating_point():
        return _tokens(values, where, vocabulary)
    if vocabulary:
        raise UserError(f"key 'data.vocabulary': {where} has floats, and tokens are integers; omit it")
    return _columns(values, where, ())


def numbers_of(values: Any, where: str) -> torch.Tensor:
    """Return an array or a tensor as float64 or int64 on the CPU.

    Raises:
        UserError: values of another type, masked values, or a tensor that is not dense.
    """
    if not isinstance(values, torch.Tensor):
        array = native(values, where)
        if array.dtype.kind not in "iuf":
            raise UserError(f"{where}: expected floats (columns) or integers (tokens), got {array.dtype}")
        return torch.from_numpy(array.astype(np.float64 if array.dtype.kind == "f" else np.int64))
    tensor = dense(values, where)
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise UserError(f"{where}: expected floats (columns) or integers (tokens), got {tensor.dtype}")
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def is_frame(values: Any) -> bool:
    """Return True for a pandas DataFrame, without importing pandas."""
    return hasattr(values, "columns") and hasattr(values, "dtypes") and hasattr(values, "to_numpy")


def of_frame(frame: pandas.DataFrame, where: str, vocabulary: int = 0) -> Vectors:
    """Return the columns of a DataFrame as numbers, or as tokens, where empty cells at the end are padding.

    Raises:
        UserError: a column has another type than numbers, or a missing value.
    """
    if not hasattr(frame, "iloc"):
        raise UserError(f"{where}: expected a pandas DataFrame, as of .to_pandas(), got {type(frame)}")
    names = tuple(map(str, frame.columns))
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise UserError(f"{where} has two columns {twice!r}; rename one")
    unnamed = [name for name in names if name.startswith("Unnamed: ")]  # the names that pandas makes up
    if unnamed:
        raise UserError(
            f"{where}: a column has no name; name it, or remove it if it has the row numbers (pandas does"
            " not write row numbers with index=False)"
        )
    for i, (name, dtype) in enumerate(zip(names, frame.dtypes, strict=True)):
        if dtype.kind in "iufb":
            continue
        cells = enumerate(frame.iloc[:, i].astype(object).where(frame.iloc[:, i].notna(), None))
        # pandas keeps decimals, and integers of more than 64 bits, as objects
        others = [cell for cell in cells if not isinstance(cell[1], (int, float, Decimal, NoneType))]
        for row, value in sorted(others, key=lambda cell: _is_number(cell[1]))[:1]:
            raise UserError(
                f"{where}: column {name!r} has {value!r:.40} in row {row + 1}; expected a number: encode"
                " categories, as with pandas.get_dummies, or remove the column"
            )
    try:
        values = torch.from_numpy(np.array(frame.to_numpy(dtype=np.float64, na_value=np.nan)))
    except OverflowError:
        raise UserError(
            f"{where}: a column has an integer above 1e308; rescale columns to at most {_LARGEST:g}"
        ) from None
    if values.ndim != 2 or 0 in values.shape:
        raise UserError(f"{where}: expected rows and columns of inputs, got {list(values.shape)}")
    if not vocabulary:
        return _columns(values, where, names)
    empty = values.isnan()
    if bool((empty[:, :-1] & ~empty[:, 1:]).any()):
        raise UserError(f"{where}: a row has an empty cell before a token; padding stands at the end")
    values = values.nan_to_num()
    if bool((values != values.round()).any()):
        raise UserError(f"{where}: expected integers as tokens, got other numbers; omit data.vocabulary")
    return _tokens(values.long(), where, vocabulary, names)


def _is_number(value: Any) -> bool:
    """Return True for a text of a number, which stands in a column with other texts."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _columns(values: torch.Tensor, where: str, names: tuple[str, ...]) -> Vectors:
    missing = (~(values.abs() <= _LARGEST)).nonzero()
    if len(missing):
        row, column = missing[0].tolist()
        name = repr(names[column]) if names else str(column)
        found = float(values[row, column])
        more = f", and {len(missing) - 1} more like it" if len(missing) > 1 else ""
        raise UserError(
            f"{where}: column {name} has {'no value' if found != found else found} in row {row + 1}{more};"
            f" fill missing values, rescale columns to at most {_LARGEST:g}, or remove these rows"
        )
    return Vectors(values.contiguous(), Inputs("columns", names), where)


def _tokens(values: torch.Tensor, where: str, vocabulary: int, names: tuple[str, ...] = ()) -> Vectors:
    low, high = int(values.min()), int(values.max())
    most = vocabulary or MOST_TOKENS
    if low < 0 or high >= most:
        advice = (
            "set data.vocabulary to the highest token plus 1"
            if vocabulary and low >= 0
            else ("integers are tokens: give the numbers of a table as floats")
        )
        raise UserError(f"{where}: tokens {low} to {high}; expected 0 to {most - 1}; {advice}")
    return Vectors(values.contiguous(), Inputs("tokens", names, vocabulary or high + 1), where)


def joined(parts: Sequence[Vectors], files: tuple[str, ...]) -> Vectors:
    """Concatenate the inputs of several parts, with the largest vocabulary.

    Raises:
        UserError: parts have different kinds, lengths or columns.
    """
    first = parts[0]
    for part in parts:
        if part.inputs.kind != first.inputs.kind:
            raise UserError(
                f"{part.place} has {part.inputs.kind}, {first.place} has {first.inputs.kind}; expected one"
                " kind"
            )
        length, expected = part.values.shape[1], first.values.shape[1]
        if length != expected:
            raise UserError(
                f"{part.place} has {length} {part.inputs.kind} in a row, {first.place} {expected}; expected"
                " the same number"
            )
        names, known = part.inputs.names, first.inputs.names
        if bool(names) != bool(known):
            named, other = (part, first) if names else (first, part)
            raise UserError(
                f"{named.place} has names of columns, and {other.place} has none; expected names in all"
                " parts, as in a DataFrame, or in none"
            )
        if names != known:
            ours, theirs = next(pair for pair in zip(names, known, strict=True) if pair[0] != pair[1])
            raise UserError(
                f"{part.place} has {ours!r} in place of {theirs!r} of {first.place}; expected the same"
                " columns in the same order"
            )
    vocabulary = max(part.inputs.vocabulary for part in parts)
    inputs = replace(first.inputs, vocabulary=vocabulary)
    return Vectors(torch.cat([part.values for part in parts]), inputs, files=files)
