"""The user's own tables: a .csv or .parquet with a column of labels, or a folder of one file per client."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import UserError, first_line, listed, nearest
from ...paths import check_file, check_fits, opened
from ..dataset import DataSet, fixed_order, numbered
from ..folder_listing import case_conflicts, visible
from ..vectors import Vectors, joined, of_frame

if TYPE_CHECKING:
    import pandas

    from ..settings import Data

SUFFIXES = (".csv", ".parquet")
_BYTES = 4  # bytes of one value of an input
_TRUE, _FALSE = ("true", "1"), ("false", "0")
_SAMPLE = 1 << 20  # bytes
_BYTES_OF_CELL = 24  # a number, and its place in the text while pandas reads it
_WHOLE = re.compile(r"\s*\+?(-?(?:0|[1-9]\d*))(?:\.0*)?\s*")
"""a whole number, also in the form that pandas writes if the column has empty cells; 007 is a name"""


def is_folder(path: Path) -> bool:
    """Return True if a folder holds tables."""
    return path.is_dir() and any(entry.suffix.lower() in SUFFIXES for entry in visible(path))


def read(path: Path, data: Data) -> DataSet:
    """Read a table, or a folder of tables that are one client each.

    The column ``data.label`` has the class of each row. A column ``silo`` has the name of its client, and a
    column ``test`` is true for test rows and false for others. All other columns are inputs. Without
    ``silo`` a partition deals the rows.

    Raises:
        UserError: a file cannot be read, has no labels, or has values that are not numbers.
    """
    if path.is_dir():
        entries = visible(path)
        files = [entry for entry in entries if entry.suffix.lower() in SUFFIXES]
        first: dict[str, Path] = {}
        for file in files:
            if first.setdefault(file.stem, file) != file:
                raise UserError(f"{first[file.stem]} and {file.name} name the same client; rename one")
        others = [entry for entry in entries if entry not in files]
        folder = next((entry.name for entry in others if entry.is_dir()), None)
        if folder is not None:
            raise UserError(
                f"{path} has the table {files[0].name} and the folder {folder}; expected tables, one for each"
                " client, or folders of images; move the others"
            )
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return _together(
            path,
            [_table(file, frame_of(file, data.label), data, file.stem) for file in files],
            (f"ignored, because it is not a table: {others[0]}{more}",) if others else (),
        )
    return data_set(path, frame_of(path, data.label), data, None)


def frame_of(path: Path, label: str = "label") -> pandas.DataFrame:
    """Read a .csv or .parquet file.

    Args:
        label: the column with the classes. This column, ``silo`` and ``test`` are read as text.

    Raises:
        UserError: the file cannot be read, or the reader of its format is not installed.
    """

    check_file(path, "the table", "expected a .csv or .parquet file")
    check_fits(path)
    parquet = path.suffix.lower() == ".parquet"
    try:
        (_check_parquet if parquet else _check_csv)(path)
        frame = _read_parquet(path) if parquet else _read_csv(path, label)
    except ImportError:
        raise UserError(
            f"{path}: pandas reads Parquet with pyarrow or fastparquet, and none is installed; use"
            " pip install pyarrow, or save it as .csv"
        ) from None
    except UserError:
        raise
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8; save it as UTF-8") from None
    except Exception as error:  # a damaged file may raise any error
        if isinstance(error, MemoryError) or "out of memory" in str(error):
            raise UserError(f"{path} takes more memory than this process may use") from None
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None
    if not len(frame):
        raise UserError(f"{path} has no rows")
    return frame


def _check_csv(path: Path) -> None:
    """Refuse a table whose cells need more than the memory, because short cells take more as numbers."""
    with opened(path) as file:
        sample = file.read(_SAMPLE)
    cells = sample.count(b",") + sample.count(b"\n")
    size = path.stat().st_size
    check_fits(path, size + _BYTES_OF_CELL * cells * size / max(len(sample), 1))


def _check_parquet(path: Path) -> None:
    """Refuse a table that needs more than the memory: a page may store one value for many rows."""
    try:
        from pyarrow import (  # type: ignore[import-not-found, unused-ignore]
            ArrowException,
            compute,
            parquet,
        )
    except ImportError:  # another package reads it
        return
    try:
        about = parquet.read_metadata(path)
    except ArrowException:  # pandas reports this error
        return
    groups = [about.row_group(i) for i in range(about.num_row_groups)]
    columns = range(about.num_columns)
    total = _BYTES * sum(group.column(i).num_values for group in groups for i in columns)
    check_fits(path, total)
    texts = [
        column.path
        for column in map(about.schema.column, columns)
        if column.physical_type == "BYTE_ARRAY" and column.logical_type.type in ("STRING", "NONE")
        if column.name == column.path and column.max_repetition_level == 0
    ]
    if not texts:
        return
    with parquet.ParquetFile(path, read_dictionary=texts) as file:
        for batch in file.iter_batches(columns=texts):
            for column in batch.columns:
                values = getattr(column, "dictionary", column)
                total += len(column) * (compute.max(compute.binary_length(values)).as_py() or 0)
            check_fits(path, total)


def _read_parquet(path: Path) -> pandas.DataFrame:
    """Read a Parquet file, and keep a column that pandas takes for the index."""
    import pandas

    frame = pandas.read_parquet(path)
    return frame.reset_index([name for name in frame.index.names if name is not None])


def _read_csv(path: Path, label: str) -> pandas.DataFrame:
    """Read a CSV file without renaming, moving or dropping a column, and without reading names as numbers."""
    import pandas

    header = pandas.read_csv(path, header=None, nrows=1, dtype=str).iloc[0].dropna().tolist()
    if len(header) == 1 and (sign := re.search("[;\t|]", header[0])):
        raise UserError(f"{path} has columns that are separated by {sign[0]!r}; save it with commas")
    for i, name in enumerate(header):
        if name in header[:i]:
            raise UserError(f"{path} has two columns {name!r}; rename one")
    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        try:
            # read in parts (low memory), a column could have several types
            names = dict.fromkeys((label, "silo", "test"), str)
            return pandas.read_csv(path, index_col=False, low_memory=False, dtype=names)
        except pandas.errors.ParserWarning:
            raise UserError(f"{path}: its rows have more cells than its header; name every column") from None


def _inputs(frame: pandas.DataFrame, path: Path, data: Data) -> Vectors:
    """Return the input columns of a table, without labels, clients and the split."""
    others = (data.label, "silo", "test")
    inputs = frame.drop(columns=list(others), errors="ignore")
    for name in map(str, inputs.columns):
        for other in others:
            if name.strip().casefold() == other.strip().casefold():
                raise UserError(
                    f"{path}: column {name!r} differs from {other!r} in capitals or blanks; rename it"
                )
    return of_frame(inputs, str(path), data.vocabulary)


def data_set(path: Path, frame: pandas.DataFrame, data: Data, client: str | None) -> DataSet:
    """Return a table as the data set of one client, of the clients in ``silo``, or for a partition.

    Raises:
        UserError: the table has no labels, or values that are not numbers.
    """
    return _together(path, [_table(path, frame, data, client)])


class _Columns(NamedTuple):
    """The columns of a file."""

    inputs: Vectors
    labels: list[str]
    test: npt.NDArray[np.bool_] | None
    """whether each row is a test row"""
    owners: list[str]
    """the client of each row; empty: a partition deals the rows"""


def _table(path: Path, frame: pandas.DataFrame, data: Data, client: str | None) -> _Columns:
    if data.label not in frame.columns:
        raise UserError(
            f"{path} has no column {data.label!r}{nearest(data.label, map(str, frame.columns))}; name the"
            f" column with the classes as data.label. It has {listed(frame.columns)}"
        )
    labels = _texts(frame, data.label, path)
    _check_labels(path, data.label, labels)
    test = _test(frame, path) if "test" in frame.columns else None
    owners = _texts(frame, "silo", path) if "silo" in frame.columns else []
    if client is not None:
        other = next((name for name in owners if name != client), None)
        if other is not None:
            raise UserError(
                f"{path}: column 'silo' has {other!r}, but the file belongs to {client!r}; remove the column,"
                " or put the rows of all clients into one file"
            )
        owners = [client] * len(labels)
    return _Columns(_inputs(frame, path, data), labels, test, owners)


def _together(path: Path, tables: list[_Columns], notes: tuple[str, ...] = ()) -> DataSet:
    """Return one table, or put the tables of several clients one after the other."""
    labels, classes = numbered([label for table in tables for label in table.labels])
    owners = [owner for table in tables for owner in table.owners]
    # the files of clients are in order
    group_of, groups = numbered(owners, list(dict.fromkeys(owners)) if len(tables) > 1 else ())
    test = np.concatenate(
        [np.zeros(len(table.labels), bool) if table.test is None else table.test for table in tables]
    )
    rows = np.arange(len(labels)) if groups else fixed_order(len(labels))
    has_test = bool(groups) or tables[0].test is not None
    return DataSet(
        str(path),
        replace(joined([table.inputs for table in tables], ()), place=str(path)),
        labels,
        classes,
        rows[~test[rows]],
        rows[test[rows]] if has_test else None,
        groups,
        group_of if groups else None,
        frozenset(owner for table in tables if table.test is None for owner in table.owners),
        parts={"rows": len(labels)},
        notes=(*notes, *case_conflicts(classes)),
    )


def _texts(frame: pandas.DataFrame, column: str, path: Path) -> list[str]:
    """Return a column as texts, with whole numbers, also from floats, as integers."""
    import pandas

    missing = np.flatnonzero(frame[column].isna().to_numpy())
    if len(missing):
        raise UserError(
            f"{path}: column {column!r} has no value in row {missing[0] + 1}, or a word such as NA, None or"
            " null; write another one"
        )
    values = frame[column].tolist()
    for i, value in enumerate(values):
        if not pandas.api.types.is_scalar(value):
            kind = type(value).__name__
            raise UserError(
                f"{path}: column {column!r} has a {kind} in row {i + 1}; expected a name or a number"
            )
    return [_text(value) for value in values]


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    whole = _WHOLE.fullmatch(text)
    return text if whole is None else str(int(whole[1]))


def _check_labels(path: Path, column: str, texts: list[str]) -> None:
    """Refuse measurements as names of classes."""
    for i, text in enumerate(texts):
        if re.fullmatch(r"[+-]?(\d*\.\d*(e[+-]?\d+)?|\d+e[+-]\d+)", text, re.IGNORECASE):
            raise UserError(
                f"{path}: column {column!r} has {text} in row {i + 1}; expected classes, not measurements"
            )


def _test(frame: pandas.DataFrame, path: Path) -> npt.NDArray[np.bool_]:
    """Return whether each row is a test row."""
    texts = [text.lower() for text in _texts(frame, "test", path)]
    for i, text in enumerate(texts):
        if text not in (*_TRUE, *_FALSE):
            raise UserError(f"{path}: column 'test' has {text!r} in row {i + 1}; expected true or false")
    return np.array([text in _TRUE for text in texts])
