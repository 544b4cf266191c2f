"""A federation of the user's own arrays, tensors, DataFrames and torch Datasets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from types import NoneType
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..errors import UserError, first_line, listed
from ..isolation import isolate
from . import labeled
from .dataset import DataSet, classes_of, numbered
from .federation import Federation, Split
from .images import ImageList, copied
from .partitions.base import Deal, Share
from .pixels import as_bytes, as_images, as_label, as_labels, is_array, kinds_of, native, pixels_of
from .settings import Data
from .vectors import Vectors, is_frame, joined, numbers_of, of_array

SplitArrays = Any
"""A :class:`Split`, a pair of images and labels, or a torch ``Dataset`` of such pairs."""
_UNORDERED = (str, dict, torch.utils.data.IterableDataset)
LabelsOrNames = torch.Tensor | list[str]
"""``[N]`` int64, or names of classes."""


@isolate
def from_arrays(
    clients: Mapping[str, tuple[SplitArrays, SplitArrays | None]],
    *,
    unseen: Mapping[str, SplitArrays] | None = None,
    classes: Sequence[str] | None = None,
    data: Data | None = None,
    seed: int = 0,
) -> Federation:
    """Make a federation of labeled data that are in memory already, or that Datasets yield.

    Images are arrays or tensors ``[N, H, W]``, ``[N, C, H, W]`` or ``[N, H, W, C]`` with C = 1 or 3: of
    uint8; of uint16: their upper 8 bits are taken; or of floats in [0, 1], which are rounded to 8 bits.
    Labels are ``[N]`` integers counting from 0, or names of classes, as an array, a tensor, a Series or a
    list. A Dataset yields pairs of an image (a tensor or array of one image, or a PIL image) and a label. The
    Dataset is read once, here, so that its random changes are drawn once. A pair of a list of such images and
    their labels is read in the same way.

    Data that are not images: floats ``[N, F]``, or a pandas DataFrame, are the columns of a table. Integers
    ``[N, L]`` are sequences of tokens, with 0 as padding. A Dataset yields them with one axis less.

    Args:
        clients: by name, the training and the test part. If the test part is None, it is taken out of the
            training part.
        unseen: by name, images of clients that are measured only.
        classes: names of the classes; default: the names that occur as labels, sorted; or numbers, up to the
            highest label.
        data: holdout, image size, vocabulary and the share of a test split; the keys for dealing are ignored.
        seed: seed of the splits that are made here.

    Raises:
        UserError: a part has another type or shape, a label is out of range, or a client cannot train.
    """
    data = Data() if data is None else data
    if not isinstance(data, Data):
        raise UserError(f"data: expected an instance of uefl.data.Data; got {type(data).__name__}")
    if not isinstance(seed, Integral) or not -(2**63) <= seed < 2**63:
        raise UserError(f"seed: expected an integer of 64 bits; got {seed!r:.40}")
    if not isinstance(classes, (Iterable, NoneType)):
        raise UserError(f"classes: expected a list of names; got {type(classes).__name__}")
    for what, given in (("clients", clients), ("unseen", unseen or {})):
        if not isinstance(given, Mapping):
            raise UserError(f"{what}: expected a dict of name: (train, test); got {type(given).__name__}")
    if not clients:
        raise UserError("clients is empty; expected a dict of name: (train, test)")
    found: list[list[torch.Tensor] | Vectors] = []
    labels: list[tuple[str, LabelsOrNames]] = []
    names: list[str] = []
    kinds: Counter[str] = Counter()

    def take(part: SplitArrays, where: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the rows of a part, and append them to the others."""
        inputs, of_part = _read(part, where, kinds, data.vocabulary)
        rows = np.arange(len(names), len(names) + len(of_part))
        found.append(inputs)
        labels.append((where, of_part))
        names.extend(f"{where}/{i}" for i in range(len(of_part)))
        return rows

    shares: list[Share] = []
    for name, parts in clients.items():
        if not isinstance(parts, (tuple, list)) or len(parts) != 2:
            raise UserError(
                f"client {name!r}: expected a pair (train, test), where test may be None; got"
                f" {type(parts).__name__}"
            )
        train, test = parts
        rows = take(train, f"{name}/train")
        shares.append(Share(str(name), rows, None if test is None else take(test, f"{name}/test")))
    apart = []
    for name, part in (unseen or {}).items():
        if name in clients:
            raise UserError(f"client {name!r} trains and cannot be unseen; choose another name")
        rows = take(part, f"{name}/test")
        apart.append(Share(str(name), rows[:0], rows))
    everything, known = _numbered(labels, None if classes is None else tuple(map(str, classes)))
    images = _together(found, tuple(names), kinds)
    rows = np.arange(len(everything))
    table = DataSet("arrays", images, everything, known, rows, None, parts={"images": len(rows)})
    return labeled.federate(
        table, Deal(tuple(shares), tuple(apart)), data, int(seed), partition={"scheme": "given"}
    )


def _together(
    found: Sequence[list[torch.Tensor] | Vectors], files: tuple[str, ...], kinds: Mapping[str, int]
) -> ImageList | Vectors:
    """Return the inputs of all parts in one list."""
    tables = [part for part in found if isinstance(part, Vectors)]
    pixels = [image for part in found if isinstance(part, list) for image in part]
    if tables and pixels:
        raise UserError(f"{tables[0].place} has {tables[0].inputs.kind}, and other parts have images")
    return joined(tables, files) if tables else copied(pixels, files, kinds)


def _numbered(
    parts: Sequence[tuple[str, LabelsOrNames]], classes: tuple[str, ...] | None
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], tuple[str, ...]]:
    """Return labels ``[N]`` int64 of all parts, each with its place, and the names of the classes."""
    named = [(where, part) for where, part in parts if isinstance(part, list)]
    integers = [(where, part.numpy()) for where, part in parts if isinstance(part, torch.Tensor)]
    if named and integers:
        raise UserError(
            f"labels are names in {named[0][0]} and integers in {integers[0][0]}; expected one of the two"
        )
    if named:
        known = classes or tuple(sorted({text for _, part in named for text in part}))
        for where, part in named:
            unknown = sorted(set(part) - set(known))
            if unknown:
                raise UserError(
                    f"{where}: label {unknown[0]!r} is not a class; expected one of {listed(known)}"
                )
        return numbered([text for _, part in named for text in part], known)
    known = classes_of(integers, classes or ())
    return np.concatenate([labels for _, labels in integers]), known


def _labels(labels: Any, count: int, where: str) -> LabelsOrNames:
    """Return names of classes if all labels are texts, otherwise integers ``[count]`` int64."""
    if not isinstance(labels, torch.Tensor):
        array = native(labels, where) if is_array(labels) else labels
        texts = array.tolist() if isinstance(array, np.ndarray) and array.ndim else array
        texts = texts if isinstance(texts, (list, tuple)) else []
        are_names = [isinstance(text, str) for text in texts]
        if texts and all(are_names):
            if len(texts) != count:
                raise UserError(f"{where}: expected {count} labels, got {len(texts)}")
            return list(map(str, texts))  # without the type of NumPy
        if any(are_names):
            i = are_names.index(not are_names[0])
            raise UserError(
                f"{where}: label {i}: got {texts[i]!r}, and label 0 is {texts[0]!r}; expected integers alone"
                " or names alone"
            )
    return as_labels(labels, count, where)


def _read(
    part: SplitArrays, where: str, kinds: Counter[str], vocabulary: int
) -> tuple[list[torch.Tensor] | Vectors, LabelsOrNames]:
    """Return images ``[C, H, W]`` uint8, columns or tokens, with labels, and count ``kinds`` of change."""
    if isinstance(part, Split):
        part = part.images, part.labels
    if isinstance(part, (tuple, list)) and len(part) == 2 and (is_array(part[0]) or is_frame(part[0])):
        if is_frame(part[0]) or np.ndim(part[0]) == 2:
            _check_order(part[0], part[1], where)
            inputs = of_array(part[0], where, vocabulary)
            return inputs, _labels(part[1], inputs.count, where)
        images, changed = as_images(part[0], where)
        kinds.update(changed)
        return list(images), _labels(part[1], len(images), where)
    if isinstance(part, (tuple, list)) and len(part) == 2 and _are_inputs(part[0]):
        if not hasattr(part[1], "__len__") or len(part[1]) != len(part[0]):
            raise UserError(f"{where}: expected {len(part[0])} labels, one for each image of the list")
        part = list(zip(part[0], part[1], strict=True))
    if not (hasattr(part, "__getitem__") and hasattr(part, "__len__")) or isinstance(part, _UNORDERED):
        raise UserError(
            f"{where}: expected a pair of images and labels, or a torch Dataset with a length; got"
            f" {type(part).__name__}"
        )
    if len(part) == 0:
        raise UserError(f"{where} has no image")
    items, labels = [], []
    for i in range(len(part)):
        try:
            item = part[i]
        except Exception as error:  # of the user's own code
            why = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"{where}: item {i} of {len(part)} cannot be read ({why})") from error
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise UserError(
                f"{where}: item {i} is {type(item).__name__}; expected a pair of an image and an integer"
                "; a client is (train, test), each a pair of images and labels, or a Dataset"
            )
        items.append(item[0])
        text = isinstance(item[1], str)
        labels.append(item[1] if text else as_label(item[1], f"{where}: item {i}"))
    if is_array(items[0]) and np.ndim(items[0]) == 1:
        return of_array(_stacked(items, where), where, vocabulary), _labels(labels, len(items), where)
    pixels = [_one(item, f"{where}: image {i}", kinds) for i, item in enumerate(items)]
    return pixels, _labels(labels, len(pixels), where)


def _are_inputs(values: Any) -> bool:
    """Return True for a list of images or vectors, and False for a pair of one of them and a label."""
    return isinstance(values, (tuple, list)) and all(
        isinstance(value, Image.Image) or (is_array(value) and np.ndim(value) > 0) for value in values
    )


def _check_order(rows: Any, labels: Any, where: str) -> None:
    """Refuse a DataFrame and a Series that have one index in two orders: they are paired by position."""
    one: Any = getattr(rows, "index", None)
    other: Any = getattr(labels, "index", None)
    if not hasattr(one, "equals") or not hasattr(other, "equals"):
        return
    if not one.equals(other) and len(one) == len(other) and set(one) == set(other):
        raise UserError(
            f"{where}: rows and labels have the same index in another order; sort the labels, as with"
            " labels.loc[rows.index]"
        )


def _stacked(items: Sequence[Any], where: str) -> torch.Tensor:
    """Return the vectors of a Dataset as ``[N, F]``."""
    vectors = [numbers_of(item, f"{where}: item {i}") for i, item in enumerate(items)]
    for i, vector in enumerate(vectors):
        if vector.shape != vectors[0].shape:
            raise UserError(
                f"{where}: item {i} has the shape {list(vector.shape)}, item 0 {list(vectors[0].shape)};"
                " expected one length"
            )
    return torch.stack(
        [vector.double() for vector in vectors] if any(map(torch.is_floating_point, vectors)) else vectors
    )


def _one(image: Any, where: str, kinds: Counter[str]) -> torch.Tensor:
    """Return one image of a Dataset, ``[C, H, W]`` uint8."""
    if isinstance(image, Image.Image):
        try:
            kinds.update(kinds_of(image))
            return pixels_of(image)
        except (OSError, SyntaxError, ValueError) as error:
            raise UserError(f"{where} cannot be read ({error})") from None
    if not is_array(image):
        raise UserError(f"{where} is {type(image).__name__}; expected a tensor, an array or a PIL image")
    pixels, kind = as_bytes(image, where)
    kinds.update([kind] if kind else [])
    if pixels.ndim == 2:
        pixels = pixels[None]
    if pixels.ndim == 3 and pixels.shape[0] not in (1, 3) and pixels.shape[2] in (1, 3):
        pixels = pixels.movedim(2, 0)
    if pixels.ndim != 3 or pixels.shape[0] not in (1, 3) or 0 in pixels.shape:
        raise UserError(f"{where}: expected [C, H, W] with C = 1 or 3, got {list(pixels.shape)}")
    return pixels.contiguous()
