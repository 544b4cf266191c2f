"""Images of a source that are read when they are asked for: from memory, or from files that Pillow decodes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError

from ..errors import UserError
from .rotate import resize

Rows = npt.NDArray[np.int64]
"""``[n]`` int64, positions of images in their source"""


def check_rows(place: str, rows: object, count: int) -> None:
    """Refuse what are no positions of ``count`` images.

    Raises:
        TypeError: no NumPy array ``[n]`` of int64.
        ValueError: a position below 0, or of an image that is not there.
    """
    if not isinstance(rows, np.ndarray) or rows.ndim != 1 or rows.dtype != np.int64:
        got = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, np.ndarray) else type(rows).__name__
        raise TypeError(f"{place}: expected positions of images, a NumPy array [n] of int64; got {got}")
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:
        raise ValueError(f"{place}: positions {rows.min()} to {rows.max()}; expected 0 to {count - 1}, there are {count} images")


@dataclass(frozen=True)
class Images:
    """Images of one number of channels.

    ``read(rows, size)`` returns ``[n, C, H, W]`` uint8, resized to ``size`` x ``size`` where size is not 0. ``content(rows)`` yields for
    each image the bytes that identify it: of its pixels or of its file, before any change.
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
    """file below the source that holds all of them, where a source has several"""

    def name(self, row: int) -> str:
        """Return the name of an image for a message."""
        return str(Path(self.place) / self.files[row]) if self.files else self.place

    def check_one_size(self) -> None:
        """All images must be of the first one's size, unless they are resized.

        Raises:
            UserError: they are not; the message names two of them.
        """
        different = np.flatnonzero((self.shapes != self.shapes[0]).any(1))
        if len(different):
            (h0, w0), (h, w) = self.shapes[0], self.shapes[different[0]]
            pair = f"{self.name(int(different[0]))} is {w}x{h} and {self.name(0)} is {w0}x{h0}"
            raise UserError(f"{pair}; set image_size to resize all images to one square")


def in_memory(pixels: torch.Tensor, place: str = "", files: tuple[str, ...] = ()) -> Images:
    """Images that are in memory.

    Args:
        pixels: a torch tensor ``[N, C, H, W]`` uint8.
        place: where they lie, for messages.
        files: names in the manifest; empty: images are known by their position.

    Raises:
        TypeError: ``pixels`` is something else.
    """
    if not isinstance(pixels, torch.Tensor) or pixels.dtype != torch.uint8 or pixels.ndim != 4:
        got = f"{pixels.dtype} {list(pixels.shape)}" if isinstance(pixels, (torch.Tensor, np.ndarray)) else type(pixels).__name__
        kind = "a NumPy array of " if isinstance(pixels, np.ndarray) else ""
        raise TypeError(f"{place or 'images'}: expected pixels as a torch tensor [N, C, H, W] of uint8; got {kind}{got}")

    def read(rows: Rows, size: int) -> torch.Tensor:
        chosen = pixels[torch.from_numpy(rows)]
        if not size:
            return chosen
        return resize(chosen, size) if len(chosen) else chosen.new_zeros(0, pixels.shape[1], size, size)

    def content(rows: Rows) -> Iterator[bytes]:
        for row in rows:
            yield pixels[row].numpy().tobytes()

    return Images(len(pixels), pixels.shape[1], np.array([pixels.shape[2:]]), read, content, files, place)


def copied(pixels: Sequence[torch.Tensor], files: tuple[str, ...]) -> Images:
    """Images ``[C, H, W]`` uint8 that may differ in size and channels; they are copied, so that later changes do not reach them."""
    channels = max(len(image) for image in pixels)
    even = [image.expand(channels, -1, -1) for image in pixels]
    if len({image.shape for image in even}) == 1:
        return in_memory(torch.stack(even), files=files)
    kept = [image.clone() for image in even]

    def read(rows: Rows, size: int) -> torch.Tensor:
        if not len(rows):
            return torch.zeros(0, channels, *((size, size) if size else kept[0].shape[1:]), dtype=torch.uint8)
        return torch.stack([resize(kept[row], size) if size else kept[row] for row in rows])

    def content(rows: Rows) -> Iterator[bytes]:
        for row in rows:
            yield kept[row].numpy().tobytes()

    return Images(len(kept), channels, np.array([image.shape[1:] for image in kept]), read, content, files)


class File(NamedTuple):
    """An image file: its name below the source, and a function that opens it."""

    name: str
    open: Callable[[], BinaryIO]


def on_disk(root: Path, paths: Sequence[Path]) -> Images:
    """Image files in a folder; see :func:`from_files`."""

    def opener(path: Path) -> Callable[[], BinaryIO]:
        return lambda: path.open("rb")

    return from_files(str(root), [File(str(path.relative_to(root)), opener(path)) for path in paths])


def from_files(place: str, files: Sequence[File]) -> Images:
    """Image files of 8 bits; only their headers are read now. They are RGB if one of them is in colour; transparency is dropped.

    Args:
        place: the folder or archive that they lie in, for messages.
        files: one or more.

    Raises:
        UserError: a file that is no image, or has more than 8 bits per value. A file that is damaged is found when it is read.
    """
    names = tuple(file.name for file in files)
    shapes, colour = np.empty((len(files), 2), np.int64), False
    for i, file in enumerate(files):
        mode, shapes[i] = _header(place, file)
        colour |= mode not in _GREY
    channels = 3 if colour else 1

    def read(rows: Rows, size: int) -> torch.Tensor:
        if not len(rows):
            return torch.zeros(0, channels, *((size, size) if size else shapes[0].tolist()), dtype=torch.uint8)
        return torch.stack([_decode(place, files[row], size).expand(channels, -1, -1) for row in rows])

    def content(rows: Rows) -> Iterator[bytes]:
        for row in rows:
            with files[row].open() as file:
                yield file.read()

    return Images(len(files), channels, shapes, read, content, names, place)


_GREY = ("1", "L", "LA")


def _header(place: str, file: File) -> tuple[str, tuple[int, int]]:
    """Mode, and (height, width)."""
    try:
        with file.open() as opened, Image.open(opened) as image:
            if image.mode[0] in "IF":
                raise UserError(f"{Path(place) / file.name} has more than 8 bits per value; save it as an 8-bit image")
            return image.mode, (image.height, image.width)
    except _UNREADABLE as error:
        raise _unreadable(place, file, error) from None


def _decode(place: str, file: File, size: int) -> torch.Tensor:
    """One image ``[C, H, W]`` uint8, C = 1 or 3."""
    try:
        with file.open() as opened, Image.open(io.BytesIO(opened.read())) as image:
            pixels = pixels_of(image)
    except _UNREADABLE as error:
        raise _unreadable(place, file, error) from None
    return resize(pixels, size) if size else pixels


def pixels_of(image: Image.Image) -> torch.Tensor:
    """The pixels ``[C, H, W]`` uint8 of an image that Pillow has opened, C = 1 or 3."""
    array = np.array(image.convert("L" if image.mode in _GREY else "RGB"))
    return torch.from_numpy(array)[None] if array.ndim == 2 else torch.from_numpy(array).movedim(2, 0)


def as_bytes(images: Any, where: str) -> tuple[torch.Tensor, bool]:
    """Images of the user's own as uint8 on the CPU, in the shape that they have, and whether they were floats.

    Args:
        images: an array or a tensor of uint8, or of floats in [0, 1], which are rounded to 8 bits.
        where: begins the message.

    Raises:
        UserError: another type, or floats outside of [0, 1].
    """
    tensor = torch.as_tensor(images).detach().cpu()
    if tensor.dtype == torch.uint8:
        return tensor, False
    if not tensor.is_floating_point():
        raise UserError(f"{where}: expected images of uint8, or of floats in [0, 1]; got {tensor.dtype}")
    if tensor.numel() and not (tensor.min() >= 0 and tensor.max() <= 1):  # false for NaN too
        raise UserError(f"{where}: floats must lie in [0, 1], found {tensor.min():g} to {tensor.max():g}; do not normalise them, uefl does")
    return (tensor * 255).round().to(torch.uint8), True


_UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


def _unreadable(place: str, file: File, error: Exception) -> UserError:
    reason = "of no known format" if isinstance(error, UnidentifiedImageError) else error
    return UserError(f"cannot read image {Path(place) / file.name} ({reason}); repair or remove it")
