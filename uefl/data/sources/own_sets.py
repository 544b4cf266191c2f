"""The user's own unlabeled sets.

A folder has the images of every client by set, a table of priors, and labeled images, if any.

::

    FOLDER/
      clients/NAME/SET/*.png    or clients/NAME.npz: images [n, H, W(, C)], set [n] (names or integers)
      priors.csv                or priors.json (see uefl.data.prior_table), unless priors = "estimated"
      test/CLASS/*.png          or test.npz: images, labels [n] (0, 1, ... in the order of the classes);
                                without them no accuracy is measured
      labeled/, validation/     as test, if the server has such images

Set m of a client is the m-th by name, or by value if all names are integers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ...errors import InvalidPriors, UserError, listed
from ...paths import other_capitals
from .. import npz, prior_table
from ..dataset import classes_of, numbered
from ..folder_listing import FORMATS, case_conflicts, labeled, unused_paths, visible
from ..images import ImageList, Rows, on_disk
from ..pixels import as_labels
from ..priors import Matrix
from ..unlabeled_sets import ClientSets, LabeledRows, UnlabeledData

LAYOUT = (
    "expected clients/NAME/SET/*.png or clients/NAME.npz, and priors.csv or priors.json; with test images,"
    " test/CLASS/*.png or test.npz"
)
_PARTS = ("labeled", "validation", "test")


def read(root: Path) -> UnlabeledData:
    """Read a folder with the layout in the docstring of the module, and note files that are not read.

    Raises:
        UserError: files are missing, misplaced or unreadable.
        InvalidPriors: a set has no row of priors, or a row has no set.
    """
    if not (root / "clients").is_dir():
        raise UserError(f"{root} has no folder clients{other_capitals(root / 'clients')}; {LAYOUT}")
    table = prior_table.read(root)
    classes, named_by = table.classes, table.file
    entries = [path for path in visible(root / "clients") if path.is_dir() or path.suffix.lower() == ".npz"]
    if not entries:
        raise UserError(f"{root / 'clients'} holds no client; {LAYOUT}")
    read_in: dict[str, tuple[ImageList, Rows, list[str]]] = {}
    for path in entries:
        name = path.stem if path.suffix.lower() == ".npz" else path.name
        if name in read_in:
            raise UserError(
                f"client {name!r} occurs twice, as {root / 'clients' / name} and as {name}.npz; remove one"
            )
        read_in[name] = _client(root, path)
    parts: dict[str, LabeledRows | None] = {}
    for part in _PARTS:  # without a table, the first of these parts names the classes of the others
        found = _labeled(root, part, classes, named_by)
        parts[part] = found[0] if found else None
        if found and not classes:
            classes, named_by = found[1], f"the folder {part}"
    for who in table.rows.keys() - read_in.keys():
        place = next(iter(table.rows[who].values())).place
        raise InvalidPriors(
            f"{root}: client {who!r} ({place}) is not in {root / 'clients'}, which holds {listed(read_in)}"
        )
    clients = []
    for name, (images, sets, names) in sorted(read_in.items()):
        priors, places = _rows(name, names, table)
        clients.append(ClientSets(name, images, np.arange(len(sets)), sets, priors, None, places))
    notes = (*_unused_files(root, entries, table.file), *case_conflicts(classes))
    source = {"name": str(root), "path": str(root)}
    return UnlabeledData(
        str(root), clients, classes, parts["test"], parts["labeled"], parts["validation"], source, notes
    )


def read_server(root: Path, classes: tuple[str, ...]) -> dict[str, LabeledRows]:
    """Read ``labeled`` and ``validation``, if they exist, without clients and test images.

    Raises:
        UserError: files are misplaced or unreadable.
    """
    found = {part: _labeled(root, part, classes, "the clients") for part in _PARTS if part != "test"}
    return {part: rows[0] for part, rows in found.items() if rows}


def _client(root: Path, path: Path) -> tuple[ImageList, Rows, list[str]]:
    """Return images, their sets, and the names of the sets in order."""
    if path.is_dir():
        files = labeled(path, LAYOUT)
        if not files:
            raise UserError(f"{path} holds no image; {LAYOUT}; {FORMATS}")
        images, ids = on_disk(root, [file for file, _ in files]), np.array([name for _, name in files])
    else:
        arrays = npz.read(path, ("images", "set"))
        if set(arrays) != {"images", "set"}:
            raise UserError(f"{path} holds {npz.held(path)}; expected images and set")
        images, ids = _read_again(root, path, npz.images(path, arrays, "images")), arrays["set"]
        if ids.ndim != 1 or ids.dtype.kind not in "iuSU":
            raise InvalidPriors(
                f"client {path.stem!r}: expected set as one name or integer per image, got {ids.dtype}"
                f" {list(ids.shape)}"
            )
        if len(ids) != images.count:
            raise InvalidPriors(f"client {path.stem!r}: {len(ids)} entries in set for {images.count} images")
        try:
            ids = np.char.decode(ids.astype(np.bytes_), "utf-8") if ids.dtype.kind == "S" else ids
        except UnicodeDecodeError as error:
            raise InvalidPriors(
                f"client {path.stem!r}: a name in set is not UTF-8 text ({error}); save the names as str"
            ) from None
    found, inverse = np.unique(ids, return_inverse=True)
    names = [str(name) for name in found.tolist()]
    order = sorted(
        names, key=int if ids.dtype.kind in "iu" or all(name.isdecimal() for name in names) else None
    )
    return images, np.array([order.index(name) for name in names])[inverse], order


def _read_again(root: Path, path: Path, first: ImageList) -> ImageList:
    """Wrap the images of an .npz that belongs to one client: they are read on each access, and not kept."""

    def there() -> ImageList:
        return npz.images(path, npz.read(path, ("images",)), "images")

    return replace(
        first,
        read=lambda rows, size: there().read(rows, size),
        content=lambda rows: there().content(rows),
        inside=str(path.relative_to(root)),
    )


def _rows(
    client: str, sets: list[str], table: prior_table.PriorTable
) -> tuple[Matrix | None, tuple[str, ...]]:
    """Return a client's priors, and the names of its sets for messages."""
    if not table.rows:
        return None, tuple(map(repr, sets))
    rows = table.rows.get(client, {})
    for m, name in enumerate(sets):
        if name not in rows:
            raise InvalidPriors(
                f"client {client!r}, set {m} ({name!r}): no priors given; add its row to {table.file}"
            )
    for name, row in rows.items():
        if name not in sets:
            raise InvalidPriors(
                f"client {client!r}: priors are given for set {name!r} ({row.place}), which has no image"
            )
    return np.array([rows[name].shares for name in sets]), tuple(
        f"{name!r}, {rows[name].place}" for name in sets
    )


def _labeled(
    root: Path, part: str, classes: tuple[str, ...], named_by: str
) -> tuple[LabeledRows, tuple[str, ...]] | None:
    """Return images and labels of test, labeled or validation, if any, and the classes of the labels."""
    if (root / part).is_dir():
        files = labeled(root / part, LAYOUT)
        if not files:
            raise UserError(f"{root / part} holds no image; {LAYOUT}; {FORMATS}")
        names = classes or tuple(sorted({name for _, name in files}))
        for _, name in files:
            if name not in names:
                raise UserError(
                    f"class {name!r} of the folder {root / part} is not a class of {named_by}"
                    f" ({listed(names)}); write it the same in both"
                )
        images = on_disk(root, [file for file, _ in files])
        labels, _ = numbered([name for _, name in files], names)
        return LabeledRows(images, np.arange(len(files)), labels), names
    path = root / f"{part}.npz"
    if not path.exists():
        return None
    arrays = npz.read(path, ("images", "labels"))
    if set(arrays) != {"images", "labels"}:
        raise UserError(f"{path} holds {npz.held(path)}; expected images and labels")
    images = npz.images(path, arrays, "images")
    labels = as_labels(arrays["labels"], images.count, f"{path}: labels").numpy()
    names = classes_of([(f"{path}: labels", labels)], classes)
    return LabeledRows(replace(images, inside=path.name), np.arange(len(labels)), labels), names


def _unused_files(root: Path, clients: list[Path], table: str) -> tuple[str, ...]:
    """Return notes on files and folders that hold neither images nor priors of the federation."""
    parts = [root / part if (root / part).is_dir() else root / f"{part}.npz" for part in _PARTS]
    known = {root / "clients", *(root / name for part in _PARTS for name in (part, f"{part}.npz"))}
    others = [
        path
        for path in visible(root)
        if path not in known and (path.is_dir() or path.suffix.lower() == ".npz")
    ]
    misnamed = (f"ignored: {listed(others)}; expected test, labeled or validation",) if others else ()
    folders = (root, root / "clients", *(path for path in clients + parts if path.is_dir()))
    return *misnamed, *unused_paths(folders, {root / table, *clients, *parts, *others})
