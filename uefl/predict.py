"""Predict the classes of image files, or of the rows of tables, for the command ``uefl predict``."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import torch

from .checkpoint import write_text
from .data import pixels
from .data.folder_listing import FORMATS, is_image, visible
from .data.images import ImageList, Rows, on_files
from .data.sources import own_table
from .data.vectors import Vectors, joined
from .errors import UserError, listed, one_line
from .folder import check_no_file_of_a_run, run_around, writing
from .models.saved import SavedModel
from .paths import check_name, check_place, resolved, special
from .report.tables import number
from .text_table import Table

COLUMNS = ("class", "probability", "entropy", "mutual_information")
"""columns after the name; ``class`` has the highest probability, entropies are in nats"""
_BATCH = 500


class NamedPrediction(NamedTuple):
    """The prediction for one image, or for one row of a table."""

    name: str
    label: str
    probability: float
    entropy: float
    mutual_information: float


class Predictor:
    """Predict the classes of image files, or of the rows of tables for columns or tokens.

    Args:
        paths: files, and folders with all images in them and in their subfolders.
        client: the name of the client with the private tensors; None: as in :meth:`SavedModel.predict`.

    Raises:
        UserError: there is no image, a path does not exist, a file cannot be read, or the client is unknown.
    """

    def __init__(
        self, model: SavedModel, paths: Sequence[Path], client: str | None = None, passes: int | None = None
    ) -> None:
        self._model, self._passes = model, passes
        self._skipped: list[Path] = []
        self.images = (
            _rows_of(model, paths) if model.inputs.kind != "images" else _images_of(paths, self._skipped)
        )
        self.client = client
        if client is not None and client not in model.clients:
            raise UserError(f"client {client!r} has no tensors of its own in this model; {_expected(model)}")

    @property
    def count(self) -> int:
        """Return the number of images."""
        return self.images.count

    @property
    def kind(self) -> str:
        """Return the heading of the names: ``image``, or ``row`` of a table."""
        return "row" if isinstance(self.images, Vectors) else "image"

    @property
    def work(self) -> int:
        """Return the total number of reads of images, which ``advance`` of :meth:`rows` counts."""
        return self.count * (2 if self.client is None and self._model.has_codebooks else 1)

    def notes(self) -> list[str]:
        """Return, after :meth:`rows`, the changes to the images and the choice of the client."""
        if isinstance(self.images, Vectors):
            return self._choice
        height, width = self._model.shape[1:]
        resized = int((self.images.shapes != [height, width]).any(1).sum())
        found = pixels.notes(self.images.kinds, self.count)
        found += [f"{resized} of {self.count} images are resized to {width}x{height}"] if resized else []
        found += (
            ["color images become gray, as the model takes them"]
            if self.images.channels > self._model.shape[0]
            else []
        )
        if self._skipped:
            more = f" and {len(self._skipped) - 1} more" if len(self._skipped) > 1 else ""
            found.append(one_line(f"ignored files that are not images: {self._skipped[0]}{more}"))
        return found + self._choice

    def rows(self, advance: Callable[[int], object] = lambda count: None) -> Iterator[NamedPrediction]:
        """Predict for one batch after the other, and give the size of each to ``advance``."""
        model, client = self._model, self.client
        self._choice: list[str] = []
        if client is None and model.clients:
            client = self._fitting(advance)
            best = f"the codebook of client {client!r}, which fits these images best of {len(model.clients)}"
            self._choice = [f"predicted with {best if client else 'the mean of the layers of all clients'}"]
        for start in range(0, self.count, _BATCH):
            rows = np.arange(start, min(start + _BATCH, self.count))
            batch = self._batch(rows)
            prediction = model.predict(batch, client, uncertainty=True, passes=self._passes, seed=start)
            chances, classes = prediction.probs.max(1)
            columns = (column.tolist() for column in (chances, prediction.entropy, prediction.mutual_info))
            for row, k, *numbers in zip(rows, classes.tolist(), *columns, strict=True):
                yield NamedPrediction(self.images.files[row], model.classes[k], *numbers)
            advance(len(rows))

    def _batch(self, rows: Rows) -> torch.Tensor:
        if isinstance(self.images, Vectors):
            return self.images.values[torch.from_numpy(rows)]
        return self.images.fitted(rows, self._model.shape)

    def _fitting(self, advance: Callable[[int], object]) -> str | None:
        """Choose by all images, with one batch at a time in memory."""
        if not self._model.has_codebooks:
            return None
        totals: dict[str, float] = {}
        for start in range(0, self.count, _BATCH):
            rows = np.arange(start, min(start + _BATCH, self.count))
            for name, misfit in self._model.misfits(self._batch(rows)).items():
                totals[name] = totals.get(name, 0.0) + misfit
            advance(len(rows))
        return min(totals, key=lambda name: totals[name])


def write(rows: Iterable[NamedPrediction], kind: str, file: TextIO) -> None:
    """Write rows as CSV with a header, whose first column is ``kind``."""
    table = csv.writer(file, lineterminator="\n")
    table.writerow([kind, *COLUMNS])
    for row in rows:
        table.writerow([row.name, row.label, *(f"{value:.6f}" for value in row[2:])])


@contextmanager
def output(path: Path, images: Sequence[Path]) -> Iterator[None]:
    """Refuse a CSV file that cannot be written, and lock it against other processes.

    Raises:
        UserError: the path is a folder, the folder of the path does not exist, the path is one of ``images``
            or could be a file of a run, or another process writes the file.
    """
    check_name(path, "the file")
    check_place(path)
    check_no_file_of_a_run(path)
    if resolved(path) in [resolved(image) for image in images]:
        raise UserError(f"{path} is one of the files to predict, and would be replaced; choose another file")
    with nullcontext() if special(path) else writing(resolved(path)):
        yield


def write_file(rows: Iterable[NamedPrediction], kind: str, path: Path) -> None:
    """Write a CSV file completely or not at all, or write to a pipe or a device.

    Raises:
        UserError: the file cannot be written.
    """
    text = io.StringIO()
    write(rows, kind, text)
    try:
        if special(path) is None:
            write_text(resolved(path), text.getvalue())  # a link stays a link
        else:  # a file must not replace it
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # an error without a reader
            os.set_blocking(descriptor, True)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text.getvalue())
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be written ({error.strerror})") from None


def table(rows: Iterable[NamedPrediction], kind: str) -> Table:
    """Return rows as a table for the terminal."""
    cells = [[one_line(row.name), row.label, *map(number, row[2:])] for row in rows]
    return Table("predictions", [kind, *(column.replace("_", " ") for column in COLUMNS)], cells)


def _images_of(paths: Sequence[Path], skipped: list[Path]) -> ImageList:
    """Return the images of files and folders, and add other files of the folders to ``skipped``."""
    files = list(dict.fromkeys(file for path in paths for file in _files(path, skipped)))
    if not files:
        raise UserError(f"{listed(paths)}: no image found; {FORMATS}")
    return on_files(files)


def _rows_of(model: SavedModel, paths: Sequence[Path]) -> Vectors:
    """Return the rows of tables, by file and number, without columns that the model does not know."""
    tables, names = [], []
    for path in paths:
        if path.suffix.lower() not in own_table.SUFFIXES:
            raise UserError(f"{path}: the model takes {model.inputs.kind}; expected a .csv or a .parquet")
        frame = own_table.frame_of(path)
        tables.append(model.table(frame, str(path)))
        names += [f"{path}:{i + 1}" for i in range(len(frame))]
    return joined(tables, tuple(names))


def _files(path: Path, skipped: list[Path]) -> Iterator[Path]:
    """Yield a path, or the files of a folder in formats that Pillow reads, in the order of their names."""
    check_name(path, "the image")
    if not path.is_dir() or special(path) is not None:
        yield path
        return
    if run_around(path / "image") == resolved(path):
        raise UserError(f"{path} is a run folder; expected a run, then image files")
    for entry in visible(path):
        if entry.is_dir():
            if resolved(path).is_relative_to(resolved(entry)):
                raise UserError(f"{entry} is a link to a folder that contains the link; remove the link")
            yield from _files(entry, skipped)
        elif is_image(entry):
            yield entry
        else:
            skipped.append(entry)


def _expected(model: SavedModel) -> str:
    if not model.clients:
        return "all clients share all parts of the model; omit --client"
    return f"expected one of {listed(model.clients)}, or none, for a client that was not trained"
