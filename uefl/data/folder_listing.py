"""List folders of images in order, and note the files that are not read."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ..errors import UserError
from ..paths import check_name, special

_LITTER = frozenset(
    (
        *("__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),
        *("icon\r", "lost+found", "@eadir", "#recycle"),
    )
)
"""files of operating systems and network drives in folders and archives, in lower case"""


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
        if kind is None and path.is_symlink() and not path.exists() and not _is_image(path):
            kind = "a link to a path that does not exist"
        if kind is not None:
            raise UserError(f"{path} is {kind}; expected files and folders of data, remove it")
    return entries


def _is_image(path: Path) -> bool:
    """Return True for the name of an image."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return path.suffix.lower() in IMG_EXTENSIONS


def subfolders(folder: Path, layout: str) -> list[Path]:
    """Return the subfolders of a folder, sorted by name.

    Raises:
        UserError: the folder has no subfolder, or has an image outside of its subfolders.
    """
    entries = visible(folder)
    for path in entries:
        if not path.is_dir() and _is_image(path):
            raise UserError(f"{path} is not in a class folder; {layout}")
    folders = [path for path in entries if path.is_dir()]
    if not folders:
        raise UserError(f"{folder} has no subfolders; {layout}")
    return folders


def labeled(folder: Path, layout: str) -> list[tuple[Path, str]]:
    """Return every file of a folder of folders, with the name of its folder.

    Raises:
        UserError: a folder lies among the files, or :func:`subfolders` raises the error.
    """
    files = []
    for by_class in subfolders(folder, layout):
        for path in visible(by_class):
            if path.is_dir():
                raise UserError(f"{path} is a folder among the images of a class; {layout}")
            files.append((path, by_class.name))
    return files


def unused_paths(folders: Iterable[Path], used: Collection[Path] = ()) -> tuple[str, ...]:
    """Return one note on files where folders are expected, without ``used``, and one on empty folders."""
    inside = [path for folder in folders for path in visible(folder) if path not in used]
    files = [path for path in inside if not path.is_dir()]
    empty = [path for path in inside if path.is_dir() and not visible(path)]
    return tuple(
        f"ignored {what}: {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        for what, paths in (("files among the folders", files), ("folders without an image", empty))
        if paths
    )


def case_conflicts(classes: Sequence[str]) -> tuple[str, ...]:
    """Return a note on each pair of classes that differ only in form.

    The form is case, outer spaces, leading zeros or Unicode's form.
    """
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
