"""A folder of the user's own silos: one subfolder per silo, in it one folder of images per class."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torchvision.datasets.folder import IMG_EXTENSIONS

from ...errors import UserError
from ..rotate import resize
from .silo import Split
from .sources import OwnSilos

_LAYOUT = "expected FOLDER/SILO/CLASS/image.png or FOLDER/SILO/train|test/CLASS/image.png"


def image_folder(root: Path, image_size: int = 0) -> OwnSilos:
    """Read ``root/SILO/CLASS/*`` or ``root/SILO/{train,test}/CLASS/*``; classes are the union over all silos, sorted by name.

    Every file in a class folder must be an image that Pillow reads; a file that is no image beside folders and a class folder without
    an image are passed over with a note, what is hidden without. So are classes noted that differ in case only. Images are RGB if any
    of them is in colour, else greyscale; transparency is dropped.

    Args:
        root: the folder; its subfolders give the silos their names.
        image_size: resize every image to this square; 0: they must be of one size.

    Raises:
        UserError: folders or images missing or misplaced, a file that cannot be read, images of different sizes.
    """
    files = {silo.name: _parts(silo) for silo in subfolders(root)}
    every = [file for parts in files.values() for part in parts.values() for file in part]
    classes = tuple(sorted({label for _, label in every}))
    images = {path: read_image(path, image_size) for path, _ in every}
    check_sizes(images)
    channels = max(len(image) for image in images.values())

    def split(part: list[tuple[Path, str]]) -> Split:
        pixels = torch.stack([images[path].expand(channels, -1, -1) for path, _ in part])
        return Split(pixels, torch.tensor([classes.index(label) for _, label in part]))

    silos = {name: (split(parts["train"]), split(parts["test"]) if "test" in parts else None) for name, parts in files.items()}
    return OwnSilos(silos, classes, (*_strays(root), *look_alikes(classes)))


def _strays(root: Path) -> tuple[str, ...]:
    """What holds no image of any silo."""
    silos = [f for f in visible(root) if f.is_dir()]
    parts = [f for silo in silos for f in visible(silo) if f.is_dir() and any(inside.is_dir() for inside in visible(f))]
    return passed_over((root, *silos, *parts))


def passed_over(folders: Iterable[Path], used: Collection[Path] = ()) -> tuple[str, ...]:
    """Files that lie where folders are expected, but for ``used``, and folders with nothing in them: a note on each kind."""
    inside = [path for folder in folders for path in visible(folder) if path not in used]
    files = [path for path in inside if path.is_file()]
    empty = [path for path in inside if path.is_dir() and not visible(path)]
    return tuple(
        f"passed over {what}: {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        for what, paths in (("beside the folders", files), ("without an image", empty))
        if paths
    )


def look_alikes(classes: Sequence[str]) -> tuple[str, ...]:
    """A note on each class that is written as another one but for the case: two classes, or a slip."""
    first: dict[str, str] = {}
    pairs = [(first.setdefault(name.casefold(), name), name) for name in classes]
    return tuple(f"classes {a!r} and {b!r} differ in case only; if they are one, write it the same everywhere" for a, b in pairs if a != b)


def _parts(silo: Path) -> dict[str, list[tuple[Path, str]]]:
    """Files and their classes by split; a silo that is not split yet counts as ``train``."""
    inside = subfolders(silo)
    # classes that are called train and test hold images, splits hold folders
    names = {f.name for f in inside}
    split = names <= {"train", "test"} and any(f.is_dir() for part in inside for f in visible(part))
    if split and len(names) == 1:
        (there,) = names
        other = "test" if there == "train" else "train"
        raise UserError(
            f"{silo / there} has no {other} beside it; add {silo / other}, or put the class folders straight into {silo}, from which a "
            "test split is then taken"
        )
    parts = {part.name: labelled(part) for part in inside} if split else {"train": labelled(silo)}
    for name, part in parts.items():
        if not part:
            raise UserError(f"{silo / name if split else silo} holds no image; {_LAYOUT}")
    return parts


def labelled(folder: Path, layout: str = _LAYOUT) -> list[tuple[Path, str]]:
    """Every file of a folder of folders, with the name of its folder."""
    files = []
    for by_class in subfolders(folder, layout):
        for path in visible(by_class):
            if path.is_dir():
                raise UserError(f"{path} is a folder among the images of a class; {layout}")
            files.append((path, by_class.name))
    return files


def subfolders(folder: Path, layout: str = _LAYOUT) -> list[Path]:
    """The folders in a folder, by name; images beside them are misplaced."""
    entries = visible(folder)
    for path in entries:
        if path.is_file() and path.suffix.lower() in IMG_EXTENSIONS:
            raise UserError(f"{path} is not in a class folder; {layout}")
    folders = [path for path in entries if path.is_dir()]
    if not folders:
        raise UserError(f"{folder} has no subfolders; {layout}")
    return folders


def visible(folder: Path) -> list[Path]:
    """What is in a folder and not hidden, by name."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise UserError(f"cannot read folder {folder}: {error.strerror}") from None


def read_image(path: Path, image_size: int) -> torch.Tensor:
    """One image ``[C, H, W]`` uint8, C = 1 or 3."""
    try:
        with Image.open(path) as file:
            if file.mode[0] in "IF":
                raise UserError(f"{path} has more than 8 bits per value; save it as an 8-bit image")
            pixels = np.array(file.convert("L" if file.mode in ("1", "L", "LA") else "RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "of no known format" if isinstance(error, UnidentifiedImageError) else error
        raise UserError(f"cannot read image {path} ({reason}); repair or remove it") from None
    image = torch.from_numpy(pixels)[None] if pixels.ndim == 2 else torch.from_numpy(pixels).movedim(2, 0)
    return resize(image, image_size) if image_size else image


def check_sizes(images: dict[Path, torch.Tensor]) -> None:
    """All images must be of the first one's size."""
    (first, pattern), *others = images.items()
    for path, image in others:
        if image.shape[1:] != pattern.shape[1:]:
            (h, w), (h0, w0) = image.shape[1:], pattern.shape[1:]
            raise UserError(f"{path} is {w}x{h} and {first} is {w0}x{h0}; set image_size to resize all images to one square")
