"""The user's own tables: a .csv or .parquet with a column of labels, or a folder of one file per client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import UserError
from ...paths import check_file
from ..dataset import DataSet, fixed_order
from ..folder_listing import visible
from ..vectors import Vectors, joined, of_frame

if TYPE_CHECKING:
    import pandas

    from ..settings import Data

SUFFIXES = (".csv", ".parquet")
_TRUE, _FALSE = ("true", "1", "1.0"), ("false", "0", "0.0")


def is_folder(path: Path) -> bool:
    """Return True if a folder holds tables."""
    return path.is_dir() and any(entry.suffix.lower() in SUFFIXES for entry in visible(path))


def read(path: Path, data: Data) -> DataSet:
    """Read a table, or a folder of tables that are one client each.

    The column ``data.label`` has the class of each row. A column ``silo`` has the name of its client, and a
    column ``test`` is true for test rows and false for others. All other columns are inputs. Without
    ``silo`` the rows are dealt by a partition.

    Raises:
        UserError: a file cannot be read, has no labels, or has values that are no numbers.
    """
    if path.is_dir():
        files = [entry for entry in visible(path) if entry.suffix.lower() in SUFFIXES]
        return _together(path, {file.stem: data_set(file, frame_of(file), data, file.stem) for file in files})
    return data_set(path, frame_of(path), data, None)


def frame_of(path: Path) -> pandas.DataFrame:
    """Read a .csv or .parquet file.

    Raises:
        UserError: it cannot be read, or the reader of its format is not installed.
    """
    import pandas

    check_file(path, "the table", "expected a .csv or .parquet file")
    try:
        frame = pandas.read_parquet(path) if path.suffix.lower() == ".parquet" else pandas.read_csv(path)
    except ImportError:
        raise UserError(
            f"{path}: pandas reads Parquet with pyarrow or fastparquet, and none is installed; use"
            " pip install pyarrow, or save it as .csv"
        ) from None
    except Exception as error:  # a damaged file may raise any error
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if not len(frame):
        raise UserError(f"{path} has no rows")
    return frame


def inputs_of(frame: pandas.DataFrame, path: Path, data: Data) -> Vectors:
    """Return the input columns of a table, without labels, clients and the split."""
    inputs = frame.drop(columns=[data.label, "silo", "test"], errors="ignore")
    return of_frame(inputs, str(path), data.vocabulary)


def data_set(path: Path, frame: pandas.DataFrame, data: Data, silo: str | None) -> DataSet:
    """Return a table as a data set: of one client, of the clients in its column, or to be dealt.

    Raises:
        UserError: it has no labels, or values that are no numbers.
    """
    if data.label not in frame.columns:
        raise UserError(
            f"{path} has no column {data.label!r}; name the column with the classes as data.label. It has"
            f" {', '.join(map(str, frame.columns[:20]))}"
        )
    texts = _texts(frame, data.label, path)
    classes = tuple(sorted(set(texts)))
    place = {name: i for i, name in enumerate(classes)}
    labels = np.array([place[text] for text in texts], np.int64)
    test = _test(frame, path) if "test" in frame.columns else None
    if silo is not None:
        owners: list[str] | None = [silo] * len(texts)
    else:
        owners = _texts(frame, "silo", path) if "silo" in frame.columns else None
    groups = tuple(sorted(set(owners))) if owners is not None else ()
    group_of = None if owners is None else np.array([groups.index(owner) for owner in owners], np.int64)
    rows = np.arange(len(texts)) if groups else fixed_order(len(texts))
    return DataSet(
        str(path),
        inputs_of(frame, path, data),
        labels,
        classes,
        rows if test is None else rows[~test[rows]],
        (rows[:0] if groups else None) if test is None else rows[test[rows]],
        groups,
        group_of,
        frozenset(groups) if test is None else frozenset(),
        parts={"rows": len(texts)},
    )


def _texts(frame: pandas.DataFrame, column: str, path: Path) -> list[str]:
    """Return a column as texts."""
    missing = np.flatnonzero(frame[column].isna().to_numpy())
    if len(missing):
        raise UserError(f"{path}: column {column!r} has no value in row {missing[0] + 1}; fill it")
    return [str(value) for value in frame[column].tolist()]


def _test(frame: pandas.DataFrame, path: Path) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return whether each row is a test row."""
    texts = [text.lower() for text in _texts(frame, "test", path)]
    for i, text in enumerate(texts):
        if text not in (*_TRUE, *_FALSE):
            raise UserError(f"{path}: column 'test' has {text!r} in row {i + 1}; expected true or false")
    return np.array([text in _TRUE for text in texts])


def _together(path: Path, tables: dict[str, DataSet]) -> DataSet:
    """Put the tables of several clients one after the other."""
    parts = list(tables.values())
    groups, classes = tuple(tables), tuple(sorted({name for part in parts for name in part.classes}))
    vectors = [part.images for part in parts if isinstance(part.images, Vectors)]
    images = replace(joined(vectors, ()), place=str(path))
    starts = np.cumsum([0, *(part.images.count for part in parts)])
    labels = np.concatenate(
        [np.array([classes.index(name) for name in part.classes])[part.labels] for part in parts]
    )
    tests = [part.test if part.test is not None else part.train[:0] for part in parts]
    return DataSet(
        str(path),
        images,
        labels.astype(np.int64),
        classes,
        np.concatenate([part.train + start for part, start in zip(parts, starts[:-1], strict=True)]),
        np.concatenate([test + start for test, start in zip(tests, starts[:-1], strict=True)]),
        groups,
        np.repeat(np.arange(len(parts)), [part.images.count for part in parts]),
        frozenset(name for part in parts for name in part.undivided),
        parts={"rows": int(starts[-1])},
    )
