"""A data set before it is dealt to clients: labels, classes and groups of its images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..errors import UserError
from .images import ImageList, Rows, check_rows
from .pixels import described
from .vectors import Vectors

_MANY = 10_000  # labels that are not numbers of classes, such as dates, make many empty classes


@dataclass(frozen=True)
class DataSet:
    """Images with labels, in one list.

    A source of several parts lists the training images first, then the test images.

    Only a source with its own clients or domains has ``groups``: their names, and the group of every image.
    """

    name: str
    """name of the data set, or path of the user's data"""
    images: ImageList | Vectors
    labels: Rows
    """``[N]`` int64"""
    classes: tuple[str, ...]
    train: Rows
    """positions of the training images, in the order of the deal"""
    test: Rows | None
    """positions of the test images, in the order of the deal; None: test images are cut from ``train``"""
    groups: tuple[str, ...] = ()
    group_of: Rows | None = None
    """``[N]`` int64, position in ``groups``"""
    undivided: frozenset[str] = frozenset()
    """groups without a test split of their own"""
    angles: Mapping[str, float] = field(default_factory=dict)
    """rotation of the images of each group, degrees counter-clockwise"""
    parts: Mapping[str, int] = field(default_factory=dict)
    """images of each part of the source, in the order of the list"""
    notes: tuple[str, ...] = ()
    """notes on the files for the user"""

    def of_group(self, group: str) -> tuple[Rows, Rows | None]:
        """Return training and test images of a group, in order, with None for a group without a test part."""
        assert self.group_of is not None
        in_group = self.group_of == self.groups.index(group)
        train = self.train[in_group[self.train]]
        if group in self.undivided or self.test is None:
            return train, None
        return train, self.test[in_group[self.test]]

    def first_classes(self, count: int) -> DataSet:
        """Return the same source with only the images of its first classes.

        Raises:
            UserError: the source has fewer classes.
        """
        if count > len(self.classes):
            raise UserError(
                f"key 'first_classes': expected at most {len(self.classes)}, the classes of {self.name}; got"
                f" {count}"
            )
        kept = self.labels < count
        test = None if self.test is None else self.test[kept[self.test]]
        return replace(self, classes=self.classes[:count], train=self.train[kept[self.train]], test=test)


def checked(table: object, source: str) -> DataSet:
    """Check the return value of the reader of a data set.

    Raises:
        TypeError: ``table`` is not a data set, a label or a row is not an int64 of NumPy, or the name of a
            class is not a text.
        ValueError: the numbers of labels and images differ, or a label or a row is out of range.
    """
    place = f"source {source!r}"
    if not isinstance(table, DataSet):
        raise TypeError(f"{place}: expected a DataSet, got {type(table).__name__}")
    if not isinstance(table.classes, tuple) or not all(isinstance(name, str) for name in table.classes):
        raise TypeError(
            f"{place}: expected the names of the classes as a tuple of texts, got {table.classes!r:.80}"
        )
    labels = table.labels
    if not isinstance(labels, np.ndarray) or labels.dtype != np.int64 or labels.ndim != 1:
        raise TypeError(f"{place}: expected labels as a NumPy array [N] of int64, got {described(labels)}")
    if len(labels) != table.images.count:
        raise ValueError(
            f"{place}: {len(labels)} labels for {table.images.count} images; expected one for each"
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(table.classes):
        raise ValueError(
            f"{place}: labels {labels.min()} to {labels.max()}; expected 0 to {len(table.classes) - 1}"
        )
    check_rows(f"{place}: train", table.train, len(labels))
    if table.test is not None:
        check_rows(f"{place}: test", table.test, len(labels))
    return table


def numbers(count: int) -> tuple[str, ...]:
    """Return the numbers from 0 to ``count`` - 1 as names of classes."""
    return tuple(str(i) for i in range(count))


def classes_of(parts: Sequence[tuple[str, Rows]], classes: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the classes, by default the numbers from 0 to the highest label.

    Args:
        parts: labels ``[n]`` int64, each with its place for a message.
        classes: the names, if they are known.

    Raises:
        UserError: a label is negative, is not a class, or is far above the number of different labels.
    """
    everything = np.concatenate([labels for _, labels in parts])
    count, found = int(everything.max()) + 1, len(np.unique(everything))
    far = not classes and count > max(_MANY, 2 * found)
    most = count - 1 if far else len(classes) or count
    for where, labels in parts:
        wrong = labels[(labels < 0) | (labels >= most)]
        if len(wrong):
            why = f"far above the number of different labels, {found}" if far else f"above {most - 1}"
            why = "negative" if wrong[0] < 0 else why
            raise UserError(f"{where}: label {wrong[0]} is {why}; number the classes from 0")
    return tuple(classes) or numbers(count)


def numbered(names: Sequence[str], known: Sequence[str] = ()) -> tuple[Rows, tuple[str, ...]]:
    """Return the position ``[n]`` of each name in ``known``, by default the sorted names, and ``known``."""
    known = tuple(known) or tuple(sorted(set(names)))
    place = {name: i for i, name in enumerate(known)}
    return np.array([place[name] for name in names], np.int64), known


def fixed_order(count: int) -> Rows:
    """Return a random order of ``count`` images that is the same for every run and every seed."""
    order: Rows = torch.randperm(count, generator=torch.Generator().manual_seed(0)).numpy()
    return order


def two_parts(train: int, test: int, *, shuffle: bool) -> tuple[Rows, Rows]:
    """Return the rows of two parts, training first, in the order of the file or of :func:`fixed_order`."""
    first, second = (fixed_order(n) if shuffle else np.arange(n) for n in (train, test))
    return first, train + second
