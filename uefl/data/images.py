"""Images of a source that are read on request: from memory, or from files that Pillow decodes."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError

from ..errors import UserError, listed
from ..paths import check_file, opened
from . import pixels
from .rotate import resize

Rows = npt.NDArray[np.int64]
"""``[n]`` int64, positions of images in their source"""


def check_rows(place: str, rows: object, count: int) -> None:
    """Refuse an object that does not have positions of ``count`` images.

    Raises:
        TypeError: the object is not a NumPy array ``[n]`` of int64.
        ValueError: a position is below 0, or no image has it.
    """
    if not isinstance(rows, np.ndarray) or rows.ndim != 1 or rows.dtype != np.int64:
        expected = "expected positions of images, a NumPy array [n] of int64"
        raise TypeError(f"{place}: {expected}; got {pixels.described(rows)}")
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:
        raise ValueError(
            f"{place}: positions {rows.min()} to {rows.max()}; expected 0 to {count - 1}, there are {count}"
            " images"
        )


@dataclass(frozen=True)
class ImageList:
    """Images that all have the same number of channels.

    ``read(rows, size)`` returns ``[n, C, H, W]`` uint8, resized to ``size`` x ``size`` where size is not 0.
    ``content(rows)`` yields for each image the bytes that identify it: of its pixels or of its file, before
    any change.
    """

    count: int
    channels: int
    shapes: npt.NDArray[np.int64]
    """``[N, 2]``, or ``[1, 2]`` where all are of one size: height and width before resizing"""
    read: Callable[[Rows, int], torch.Tensor]
    content: Callable[[Rows], Iterator[bytes]]
    files: tuple[str, ...] = ()
    """names in the manifest; empty: images are known by their position"""
    place: str = ""
    """where the images lie, for messages"""
    inside: str = ""
    """the file below the source that contains all images of this list, if a source has several such files"""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """number of images for each kind of change that reading makes in their values; see
    :mod:`uefl.data.pixels`"""

    def fitted(self, rows: Rows, shape: tuple[int, ...]) -> torch.Tensor:
        """Return images ``[n, C, H, W]`` uint8, fitted to the model's shape (C, H, W).

        The images are resized. For a model of RGB images, gray images become RGB. For a model of gray images,
        color images become their luma.
        """
        channels, *size = shape
        fitted, damaged = [torch.zeros(0, *shape, dtype=torch.uint8)], DamagedImages()
        for i in range(len(rows)):
            with damaged.gathered():
                image = self.read(rows[i : i + 1], 0)
                image = image if list(image.shape[2:]) == size else resize(image, (size[0], size[1]))
                fitted.append(
                    pixels.gray(image) if channels < image.shape[1] else image.expand(-1, channels, -1, -1)
                )
        damaged.check()
        return torch.cat(fitted)

    def name(self, row: int) -> str:
        """Return the name of an image for a message."""
        return str(Path(self.place) / self.files[row]) if self.files else self.place


def in_memory(
    values: torch.Tensor, place: str = "", files: tuple[str, ...] = (), kinds: Mapping[str, int] | None = None
) -> ImageList:
    """Wrap images that are in memory.

    Args:
        values: a torch tensor ``[N, C, H, W]`` uint8.
        files: names in the manifest; empty: images are known by their position.
        kinds: images by the kind of change that was made in their values.

    Raises:
        TypeError: ``values`` is something else.
    """
    if not isinstance(values, torch.Tensor) or values.dtype != torch.uint8 or values.ndim != 4:
        kind = "a NumPy array of " if isinstance(values, np.ndarray) else ""
        raise TypeError(
            f"{place or 'images'}: expected pixels as a torch tensor [N, C, H, W] of uint8; got"
            f" {kind}{pixels.described(values)}"
        )

    def read(rows: Rows, size: int) -> torch.Tensor:
        chosen = values[torch.from_numpy(rows)]
        if not size:
            return chosen
        return resize(chosen, size) if len(chosen) else chosen.new_zeros(0, values.shape[1], size, size)

    def content(rows: Rows) -> Iterator[bytes]:
        for row in rows:
            yield values[row].numpy().tobytes()

    shapes = np.array([values.shape[2:]])
    return ImageList(len(values), values.shape[1], shapes, read, content, files, place, kinds=kinds or {})


def copied(values: Sequence[torch.Tensor], files: tuple[str, ...], kinds: Mapping[str, int]) -> ImageList:
    """Copy images ``[C, H, W]`` uint8 that may differ in size and channels."""
    channels = max(len(image) for image in values)
    even = [image.expand(channels, -1, -1) for image in values]
    if len({image.shape for image in even}) == 1:
        return in_memory(torch.stack(even), files=files, kinds=kinds)
    kept = [image.clone() for image in even]

    def read(rows: Rows, size: int) -> torch.Tensor:
        if not len(rows):
            return torch.zeros(0, channels, *((size, size) if size else kept[0].shape[1:]), dtype=torch.uint8)
        return torch.stack([resize(kept[row], size) if size else kept[row] for row in rows])

    def content(rows: Rows) -> Iterator[bytes]:
        for row in rows:
            yield kept[row].numpy().tobytes()

    return ImageList(
        len(kept), channels, np.array([image.shape[1:] for image in kept]), read, content, files, kinds=kinds
    )


class File(NamedTuple):
    """An image file: its name below the source, and a function that opens it."""

    name: str
    open: Callable[[], BinaryIO]


def on_disk(root: Path, paths: Sequence[Path]) -> ImageList:
    """List image files in a folder, as :func:`from_files` does."""
    return from_files(str(root), [File(str(path.relative_to(root)), partial(opened, path)) for path in paths])


def on_files(paths: Sequence[Path]) -> ImageList:
    """List image files at any place, under the names that are given, as :func:`from_files` does.

    Raises:
        UserError: a path is not a file, or :func:`from_files` raises the error.
    """
    for path in paths:
        check_file(path, "the image", "expected an image file")
    return from_files("", [File(str(path), partial(opened, path)) for path in paths])


def from_files(place: str, files: Sequence[File]) -> ImageList:
    """List image files.

    Only the headers of the files are read now. All images are RGB if one of them is in color. See
    :mod:`uefl.data.pixels`.

    Raises:
        DamagedImages: files that are not images, or have values of no known range. If a file has a good
            header and damaged pixels, the error comes when the pixels are read. But if the header of another
            file is damaged, the error comes here and names both files.
    """
    names = tuple(file.name for file in files)
    shapes, color = np.empty((len(files), 2), np.int64), False
    kinds, damaged = Counter[str](), DamagedImages()
    for i, file in enumerate(files):
        with damaged.noted(place, file), file.open() as opened, _opened(opened) as image:
            # before the EXIF data are read, because Pillow may decode the image for them
            found = pixels.kinds_of(image)
            shapes[i] = pixels.upright_size(image)
            color |= not pixels.is_gray(image)
            kinds.update(found)
    if damaged.found:  # all damaged files are named at once
        for file in files:
            if not damaged.names(place, file):
                with damaged.noted(place, file):
                    _decode(file, 0)
    damaged.check()
    channels = 3 if color else 1

    def read(rows: Rows, size: int) -> torch.Tensor:
        if not len(rows):
            return torch.zeros(
                0, channels, *((size, size) if size else shapes[0].tolist()), dtype=torch.uint8
            )
        damaged, decoded = DamagedImages(), []
        for row in rows:
            with damaged.noted(place, files[row]):
                decoded.append(_decode(files[row], size).expand(channels, -1, -1))
        damaged.check()
        return torch.stack(decoded)

    def content(rows: Rows) -> Iterator[bytes]:
        for row in rows:
            with files[row].open() as file:
                yield file.read()

    return ImageList(len(files), channels, shapes, read, content, names, place, kinds=kinds)


class DamagedImages(UserError):
    """Image files that cannot be read, all named in the message up to a hundred."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        """for each damaged file, by path, why it cannot be read"""

    def __str__(self) -> str:
        """Return the message."""
        count, reasons = len(self.found), (f"{path} ({why})" for path, why in self.found.items())
        files = listed(reasons, "; ", most=100)
        if count == 1:
            return f"cannot read image {files}; repair, convert or remove it"
        return f"cannot read {count} images: {files}; repair, convert or remove them"

    @contextmanager
    def noted(self, place: str, file: File) -> Iterator[None]:
        """Note a file that cannot be read, and continue."""
        try:
            yield
        except _UNREADABLE as error:
            reason = getattr(error, "strerror", None) or str(error)
            if isinstance(error, UnidentifiedImageError):
                reason = "of no known format"
            self.found[str(Path(place) / file.name)] = reason

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Note all files that the block could not read, and continue."""
        try:
            yield
        except DamagedImages as error:
            self.found |= error.found

    def names(self, place: str, file: File) -> bool:
        """Return True if a file was noted."""
        return str(Path(place) / file.name) in self.found

    def check(self) -> None:
        """Raise this error if a file was noted."""
        if self.found:
            raise self


@cache
def _formats() -> list[str]:
    """Return the formats that Pillow reads itself: for EPS it starts another program, Ghostscript."""
    Image.init()
    return [name for name in Image.ID if name != "EPS"]


@contextmanager
def _opened(file: BinaryIO) -> Iterator[Image.Image]:
    """Open a file with Pillow, without the warning about large images, because it does not name the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = Image.open(file, formats=_formats())
    with image:
        yield image


def _decode(file: File, size: int) -> torch.Tensor:
    """Decode one image ``[C, H, W]`` uint8, C = 1 or 3."""
    with file.open() as opened, _opened(io.BytesIO(opened.read())) as image:
        decoded = pixels.pixels_of(image)
    return resize(decoded, size) if size else decoded


_UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
