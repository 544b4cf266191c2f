"""List folders of images in order, and note the files that are not read."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence
from pathlib import Path

from PIL import Image

from ..errors import UserError
from ..paths import check_name, special

_LITTER = frozenset(
    (
        *("__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),
        *("icon\r", "lost+found", "@eadir", "#recycle"),
    )
)
"""files of operating systems and network drives in folders and archives, in lower case"""

FORMATS = "PNG, JPEG, TIFF and other formats of Pillow are read; convert others, such as DICOM, to PNG"


def visible(folder: Path) -> list[Path]:
    """Return the visible entries of a folder, sorted by name.

    Files that operating systems create count as hidden. A broken link with the name of an image is an entry,
    so that the reader of images reports the link with all damaged images.

    Raises:
        UserError: the folder cannot be read, or has a pipe, a socket, a device, another broken link or a name
            that is not UTF-8.
    """
    try:
        entries = sorted(
            path
            for path in folder.iterdir()
            if not path.name.startswith(".") and path.name.lower() not in _LITTER
        )
    except OSError as error:
        raise UserError(f"cannot read folder {folder}: {error.strerror}") from None
    for path in entries:
        check_name(path, "the entry")
        kind = special(path)
        if kind is None and path.is_symlink() and not path.exists() and not is_image(path):
            kind = "a link to a path that does not exist"
        if kind is not None:
            raise UserError(f"{path} is {kind}; expected files and folders of data, remove it")
    return entries


def is_image(path: Path) -> bool:
    """Return True for a suffix of a format that Pillow reads."""
    return Image.registered_extensions().get(path.suffix.lower()) in Image.OPEN


def subfolders(folder: Path, layout: str) -> list[Path]:
    """Return the subfolders of a folder, sorted by name.

    Raises:
        UserError: the folder has no subfolder, or has an image outside of its subfolders.
    """
    entries = visible(folder)
    for path in entries:
        if not path.is_dir() and is_image(path):
            raise UserError(f"{path} is not in a class folder; {layout}")
    folders = [path for path in entries if path.is_dir()]
    if not folders:
        raise UserError(f"{folder} has no subfolders; {layout}")
    return folders


def labeled(folder: Path, layout: str) -> list[tuple[Path, str]]:
    """Return every image of a folder of folders, with the name of its folder.

    :func:`unused_paths` notes the other files.

    Raises:
        UserError: a folder lies among the files, or :func:`subfolders` raises the error.
    """
    files = []
    for by_class in subfolders(folder, layout):
        for path in visible(by_class):
            if path.is_dir():
                raise UserError(f"{path} is a folder among the images of a class; {layout}")
            if is_image(path):
                files.append((path, by_class.name))
    return files


def unused_paths(folders: Collection[Path], used: Collection[Path] = ()) -> tuple[str, ...]:
    """Return one note on files that are not read, and one on empty folders.

    Args:
        folders: folders of folders. The folders in them, other than ``folders`` and ``used``, hold images.
        used: files and folders in ``folders`` that are read in another way.
    """
    inside = [path for folder in folders for path in visible(folder) if path not in used]
    of_images = {path: visible(path) for path in sorted(set(inside).difference(folders)) if path.is_dir()}
    files = [path for path in inside if not path.is_dir()]
    files += [path for entries in of_images.values() for path in entries if not is_image(path)]
    empty = [path for path, entries in of_images.items() if not entries]
    return tuple(
        f"ignored {what}: {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        for what, paths in (("files that are not images", files), ("folders without an image", empty))
        if paths
    )


def case_conflicts(classes: Sequence[str]) -> tuple[str, ...]:
    """Return a note on each pair of classes that differ only in case, outer spaces, zeros or Unicode form."""
    first: dict[str, str] = {}
    pairs = [(first.setdefault(_folded(name), name), name) for name in classes]
    return tuple(
        f"classes {_shown(a, b)} and {_shown(b, a)} differ only in case, spaces, zeros or form; if they are"
        " one class, use the same name everywhere"
        for a, b in pairs
        if a != b
    )


def _folded(name: str) -> str:
    text = unicodedata.normalize("NFKC", name).casefold().strip()
    return text.lstrip("0") if text.isdecimal() else text


def _shown(name: str, other: str) -> str:
    """Return a name as text, with escapes if another name looks the same."""
    same = unicodedata.normalize("NFKC", name) == unicodedata.normalize("NFKC", other)
    return ascii(name) if same else repr(name)
