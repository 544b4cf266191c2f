"""One set of rules for the pixels of an image, whether it comes as a file, as an array or as a PIL image.

All images become uint8 ``[C, H, W]`` with C = 1 (gray) or 3 (RGB). Each change of values has a kind, and a
run notes each kind with the number of its images.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from ..errors import UserError

TRANSPARENT = "have transparency, which is put on white"
TURNED = "are turned upright, as their EXIF orientation says"
DEEP = "have 9 to 16 bits per value, and only the upper 8 are used (65535 becomes 255)"
ROUNDED = "have 9 to 16 bits per value, rounded to 8 bits (65535 becomes 255)"
FLOATS = "are floats in [0, 1], rounded to 8 bits"
CONVERTED = "are neither gray nor RGB (such as CMYK), and are converted to RGB"
FRAMES = "have several frames or pages, and only the first is used"
HUGE = "have more than 89 million pixels"

_GRAY = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N")
_RGB = ("RGB", "RGBA", "RGBa", "RGBX", "P", "PA")
_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
_ORIENTATION = 0x0112  # the EXIF tag
_BITS = 0x0102  # the TIFF tag
_PHOTOMETRIC = 0x0106  # the TIFF tag; 0 means that 0 is white
# bits per value in JPEG 2000, without and with boxes, and in AVIF
_DEPTH = re.compile(rb"^\xff\x4f\xff\x51.{38}(.)|ihdr.{10}(.)|pixi.{5}(.)", re.DOTALL)
_HEAD = 4096  # bytes of a file that hold its depth


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Pillow's warnings, which name no file, because a run has its own notes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def is_gray(image: Image.Image) -> bool:
    """Return True if an image that Pillow has opened, but not decoded, has no colors."""
    return image.mode in _GRAY


@_quiet()
def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return height and width of an opened image after its EXIF orientation is applied."""
    height, width = image.height, image.width
    turned = image.format != "TIFF" and _orientation(image) >= 5  # Pillow has turned the size of a TIFF
    return (width, height) if turned else (height, width)


@_quiet()
def kinds_of(image: Image.Image) -> list[str]:
    """List the changes that :func:`pixels_of` makes to an opened image, without decoding its pixels.

    Raises:
        ValueError: the values are floats or integers of 32 bits, which have no known range.
    """
    if image.mode == "F" or (image.mode == "I" and image.format not in (None, "PNG", "PPM")):
        raise ValueError(
            f"its values are {'floats' if image.mode == 'F' else 'integers of 32 bits'}; save it with 8 or 16"
            " bits per value"
        )
    stored_as = _stored_as(image)  # before the orientation, for which Pillow may decode
    found = {
        TRANSPARENT: image.mode in _WITH_ALPHA or "transparency" in image.info,
        TURNED: _orientation(image) > 1,
        DEEP: (deep := _deep(image, stored_as)) == DEEP,
        ROUNDED: deep == ROUNDED,
        CONVERTED: image.mode not in _GRAY and image.mode not in _RGB,
        FRAMES: getattr(image, "n_frames", 1) > 1,
        HUGE: image.width * image.height > (Image.MAX_IMAGE_PIXELS or 2**62),
    }
    return [kind for kind, holds in found.items() if holds]


@_quiet()
def pixels_of(image: Image.Image) -> torch.Tensor:
    """Return the upright pixels ``[C, H, W]`` uint8 of an opened image, C = 1 or 3, on white if transparent.

    Raises:
        ValueError: :func:`kinds_of` raises it. OSError, SyntaxError: the file is damaged.
    """
    clear, stored_as = _clear(image), _stored_as(image)
    inverted = getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0
    kinds_of(image)
    image = ImageOps.exif_transpose(image)
    gray = is_gray(image)
    if image.mode.startswith("I"):
        values = np.array(image).astype(np.int64) << (4 if stored_as == "I;12" else 0)
        if values.size and not 0 <= values.min() <= values.max() < 2**16:
            raise ValueError(
                f"its values are {values.min()} to {values.max()}; save it with 8 or 16 bits per value"
            )
        values = 2**16 - 1 - values if inverted else values  # Pillow inverts 8 bits only
        values = np.where(values == clear, 2**16 - 1, values) if isinstance(clear, int) else values
        return torch.from_numpy((values >> 8).astype(np.uint8))[None]
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        if clear is not None:
            image.info["transparency"] = clear
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    array = np.array(image.convert("L" if gray else "RGB"))
    return torch.from_numpy(array)[None] if array.ndim == 2 else torch.from_numpy(array).movedim(2, 0)


def gray(images: torch.Tensor) -> torch.Tensor:
    """Convert RGB images ``[N, 3, H, W]`` uint8 to ITU-R 601 luma ``[N, 1, H, W]``, as Pillow does."""
    red, green, blue = images.to(torch.int64).unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).to(torch.uint8)[:, None]


def is_array(value: Any) -> bool:
    """Return True if a value is a tensor, or an array that NumPy can read."""
    return isinstance(value, torch.Tensor) or (
        hasattr(value, "__array__") and not isinstance(value, (Image.Image, np.generic))
    )


def described(value: Any) -> str:
    """Return the dtype and the shape of an array or a tensor, or the type of another value."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def as_bytes(images: Any, where: str) -> tuple[torch.Tensor, str | None]:
    """Return images as uint8 on the CPU, in their shape, and the kind of change, if any.

    Args:
        images: an array or a tensor, of uint8, of uint16, or of floats in [0, 1]; of any strides and byte
            order.
        where: begins the message.

    Raises:
        UserError: the images have another type, floats outside of [0, 1], or masked values.
    """
    if not isinstance(images, torch.Tensor):
        images = native(images, where)
        if images.dtype == np.uint16:
            return torch.from_numpy((images >> 8).astype(np.uint8)), DEEP
        if images.dtype.kind not in "uif" or images.dtype.itemsize > 8:
            images = images.astype(np.float64) if images.dtype.kind == "f" else images
        if images.dtype.kind not in "uif":
            raise UserError(
                f"{where}: expected images of uint8, uint16, or floats in [0, 1]; got {images.dtype}"
            )
    tensor = dense(images, where) if isinstance(images, torch.Tensor) else torch.as_tensor(images)
    if tensor.dtype == torch.uint8:
        return tensor, None
    if tensor.dtype == torch.uint16:
        return torch.from_numpy((tensor.numpy() >> 8).astype(np.uint8)), DEEP
    if not tensor.is_floating_point():
        raise UserError(f"{where}: expected images of uint8, uint16, or floats in [0, 1]; got {tensor.dtype}")
    tensor = tensor.double()  # half precision has too few digits for the product
    if tensor.numel() and not (tensor.min() >= 0 and tensor.max() <= 1):  # false for NaN too
        missing = int(tensor.isnan().sum())
        if missing:
            raise UserError(
                f"{where}: {missing} of {tensor.numel()} values are NaN; fill them, or remove their images"
            )
        low, high = float(tensor.min()), float(tensor.max())
        advice = "divide them by 255" if low >= 0 and high <= 255 else "do not normalize them, uefl does"
        raise UserError(f"{where}: floats must lie in [0, 1], found {low:g} to {high:g}; {advice}")
    return (tensor * 255).round().to(torch.uint8), FLOATS


def as_images(images: Any, where: str) -> tuple[torch.Tensor, Counter[str]]:
    """Return images as uint8 ``[N, C, H, W]``, C = 1 or 3, and their number by the kind of change, if any.

    Args:
        images: as for :func:`as_bytes`, with shape ``[N, H, W]``, ``[N, C, H, W]`` or ``[N, H, W, C]``.
        where: begins the message.

    Raises:
        UserError: the images have another type or shape, or there is no image, or the channels may be the
            first or the last axis.
    """
    pixels, kind = as_bytes(images, where)
    if kind == DEEP and pixels.numel() and not pixels.any():
        raise UserError(
            f"{where}: all values of uint16 are below 256 and would become 0; if they have 8 bits, convert"
            " them to uint8"
        )
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif pixels.ndim == 4:
        first, last = pixels.shape[1] in (1, 3), pixels.shape[3] in (1, 3)
        if first == last:
            shape = f"cannot tell the channels of images {list(pixels.shape)}"
            clear = "; images with transparency are put on white if they are PIL images" if not first else ""
            raise UserError(f"{where}: {shape}; expected [N, C, H, W] or [N, H, W, C] with C = 1 or 3{clear}")
        pixels = pixels if first else pixels.movedim(3, 1)
    else:
        raise UserError(
            f"{where}: expected images [N, H, W], [N, C, H, W] or [N, H, W, C], got {list(pixels.shape)}"
        )
    if 0 in pixels.shape:
        raise UserError(f"{where}: there is no image: {list(pixels.shape)}")
    return pixels.contiguous(), Counter({kind: len(pixels)} if kind else {})


def as_labels(labels: Any, count: int, where: str) -> torch.Tensor:
    """Return labels ``[count]`` int64 from integers in a list, a tensor, a Series or any array.

    Raises:
        UserError: a label is not an integer (but a float, a bool or a text), or the number of labels differs.
    """
    expected = f"{where}: expected labels as {count} integers"
    if str(getattr(labels, "dtype", None)) == "object" and np.ndim(labels) == 1:
        labels = list(labels)
    if isinstance(labels, (list, tuple)):  # an array of these values would hide a bool among the integers
        labels = np.array(
            [as_label(label, f"{where}: label {i}") for i, label in enumerate(labels)], np.int64
        )
    if isinstance(labels, torch.Tensor):
        found = dense(labels, where)
    else:
        try:
            array = native(labels, where)
        except (TypeError, ValueError):  # rows of different lengths
            raise UserError(f"{expected}, got {type(labels).__name__}") from None
        if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
            raise UserError(f"{where}: label {array.max()} is above 2**63 - 1; number the labels from 0")
        if array.dtype.kind not in "iu":
            advice = _conversion(array, "labels.astype(int)") if array.shape[:1] == (count,) else ""
            raise UserError(f"{expected}, got {described(array if array.ndim else labels)}{advice}")
        found = torch.from_numpy(array.astype(np.int64))
    if (
        found.is_floating_point()
        or found.is_complex()
        or found.dtype == torch.bool
        or found.shape != (count,)
    ):
        fits = found.shape[:1] == (count,) and not found.is_complex()
        advice = _conversion(found.double().numpy(), "labels.long()") if fits else ""
        raise UserError(f"{expected}, got {found.dtype} {list(found.shape)}{advice}")
    return found.long()


def as_label(label: Any, where: str) -> int:
    """Return one label of a Dataset.

    Raises:
        UserError: the label is not an integer.
    """
    if isinstance(label, torch.Tensor) and label.ndim == 0:
        label = dense(label, where).item()
    array = np.asarray(label)
    if array.ndim or array.dtype.kind not in "iu" or array > np.iinfo(np.int64).max:
        got = f"{label!r:.40}" if not array.ndim else f"{array.dtype} {list(array.shape)}"
        advice = _conversion(array, "int(label)")
        raise UserError(
            f"{where}: expected an integer label, got {got} of type {type(label).__name__}{advice}"
        )
    return int(array)


def _conversion(labels: np.ndarray[Any, Any], call: str) -> str:
    """Return the advice to convert labels, floats or bools by a call, or an empty string."""
    if labels.dtype.kind in "SU":
        return "; number the classes, as with numpy.unique(labels, return_inverse=True)"
    if labels.ndim == 2:
        return "; convert with labels.reshape(-1), or one-hot rows with labels.argmax(1)"
    whole = labels.dtype.kind in "fb" and (labels == np.floor(labels)).all()
    return f"; convert with {call}" if whole else ""


def dense(values: torch.Tensor, where: str) -> torch.Tensor:
    """Return a tensor on the CPU, without its gradient.

    Raises:
        UserError: it is nested, quantized, sparse or on the meta device.
    """
    tensor = values.detach()
    kinds = {"nested": tensor.is_nested, "quantized": tensor.is_quantized, "meta": tensor.is_meta}
    kind = next((kind for kind, holds in kinds.items() if holds), "sparse")
    if any(kinds.values()) or tensor.layout != torch.strided:
        raise UserError(f"{where}: expected a dense tensor; got a {kind} tensor")
    return tensor.cpu()


def native(values: Any, where: str) -> np.ndarray[Any, Any]:
    """Return an array in the machine's byte order, in C order, that can be written to.

    Raises:
        UserError: some values of the array are masked.
    """
    if np.ma.isMaskedArray(values):
        if np.ma.getmaskarray(values).any():
            raise UserError(f"{where}: some values are masked; fill them first, as with array.filled(0)")
        values = values.data
    array = np.asarray(values)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # torch takes no negative strides, and warns of an array that is read-only
    return array if array.flags.c_contiguous and array.flags.writeable else array.copy()


def notes(kinds: Mapping[str, int], total: int) -> list[str]:
    """Return one line for each kind of change, with the number of images that it concerns."""
    return [f"{count} of {total} images {kind}" for kind, count in sorted(kinds.items()) if count]


def _stored_as(image: Image.Image) -> str:
    """Return Pillow's name of the values in the file of an image.

    If the image is decoded, Pillow has only the number of bits in a TIFF.
    """
    tile: Any = getattr(image, "tile", None)
    raw = tile[0][3] if tile else "I;12" if getattr(image, "tag_v2", {}).get(_BITS) == (12,) else ""
    raw = raw[0] if isinstance(raw, tuple) and raw else raw
    return raw if isinstance(raw, str) else ""


def _deep(image: Image.Image, stored_as: str) -> str | None:
    """Return how values of more than 8 bits become 8 bits, or None if the file has no such values."""
    tile: Any = getattr(image, "tile", None) or [(None,) * 4]
    decoder, *_, arguments = tile[0]
    if image.mode.startswith("I") or ";16" in stored_as or decoder == "SGI16":
        return DEEP
    if image.format == "PPM" and isinstance(arguments, tuple):
        return ROUNDED if arguments[1] > 255 else None
    file: Any = getattr(image, "fp", None)
    if image.format not in ("JPEG2000", "AVIF") or file is None:
        return None
    place = file.tell()
    file.seek(0)
    depth = _DEPTH.search(file.read(_HEAD))
    file.seek(place)
    found = next(byte[0] for byte in depth.groups() if byte) if depth else 0
    if image.format == "AVIF":
        return ROUNDED if found > 8 else None
    return DEEP if 7 < found & 0x7F < 16 else None  # one less, and a bit for the sign


def _clear(image: Image.Image) -> Any:
    """Return the value or color that is transparent, or None.

    PNG gives it in the bits of the file. Pillow decodes to 8 bits and leaves it as it is.
    """
    clear, raw = image.info.get("transparency"), _stored_as(image)
    if isinstance(clear, int) and raw in ("L;2", "L;4"):
        return clear * (85 if raw == "L;2" else 17)
    if isinstance(clear, tuple) and (";16" in raw or max(clear) > 255):
        return tuple(value >> 8 for value in clear)
    return clear


def _orientation(image: Image.Image) -> int:
    try:
        found = int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # a damaged block of metadata does not affect the pixels
        return 1
    return found if 1 <= found <= 8 else 1
