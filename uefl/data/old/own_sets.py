"""The user's own unlabeled sets: a folder with the images of every client by set, a table of priors, and labeled images, if any.

::

    FOLDER/
      clients/NAME/SET/*.png         or clients/NAME.npz with images [n, H, W(, C)] uint8 and set [n] (names or integers)
      priors.csv                     or priors.json; not needed with priors = "estimated"
      test/CLASS/*.png               or test.npz with images and labels [n] (0, 1, ... in the order of the classes); without them
                                     no accuracy is measured
      labeled/, validation/          as test, where the server has such images

priors.csv: the columns client, set, then one per class; its header gives the classes and their order. priors.json:
``{"NAME": {"SET": {"CLASS": share}}}``. Set m of a client is the m-th by name, or by value where all are integers.
"""

from __future__ import annotations

import csv
import io
import json
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ...errors import InvalidPriors, UserError
from ..priors import Matrix
from ..rotate import resize
from .folder import check_sizes, labelled, look_alikes, passed_over, read_image, visible
from .silo import Split
from .sources import read_npz, read_split

_LAYOUT = (
    "expected clients/NAME/SET/*.png or clients/NAME.npz, and priors.csv or priors.json; with test images, test/CLASS/*.png or test.npz"
)
_PARTS = ("labeled", "validation", "test")


class Row(NamedTuple):
    """The priors of a set, and where they are written."""

    shares: list[float]
    place: str


class Table(NamedTuple):
    """Priors by client and set, and the classes in the order of their columns; all empty where no table is given."""

    file: str
    rows: dict[str, dict[str, Row]]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class ClientImages:
    """One client's images before its priors are settled."""

    name: str
    images: torch.Tensor
    sets: torch.Tensor
    """``[n]`` int64"""
    priors: Matrix | None
    labels: torch.Tensor | None
    set_names: tuple[str, ...] = ()
    """what the user calls each set, and where its priors are written; empty for sets that were dealt"""
    drawn: Matrix | None = None
    """what sets that were dealt weigh the classes; None for the user's own"""


@dataclass(frozen=True)
class Material:
    """What sets are made of: every client's images, and what the server holds."""

    clients: list[ClientImages]
    classes: tuple[str, ...]
    test: Split | None
    labeled: Split | None
    validation: Split | None
    notes: tuple[str, ...] = ()
    """what the user should know about the files"""


def read(root: Path, image_size: int = 0) -> Material:
    """Read a folder laid out as the module's docstring says.

    Args:
        root: the folder. What lies in it and is not read is noted.
        image_size: resize every image to this square; 0: they must be of one size.

    Raises:
        UserError: files missing, misplaced or unreadable. InvalidPriors: a set without a row of priors, or a row without a set.
    """
    if not (root / "clients").is_dir():
        raise UserError(f"{root} has no folder clients; {_LAYOUT}")
    table = _read_table(root)
    classes, named_by = table.classes, table.file
    entries = [path for path in visible(root / "clients") if path.is_dir() or path.suffix == ".npz"]
    if not entries:
        raise UserError(f"{root / 'clients'} holds no client; {_LAYOUT}")
    read_in = {}
    for path in entries:
        name = path.stem if path.suffix == ".npz" else path.name
        if name in read_in:
            raise UserError(f"client {name!r} is there twice, as {root / 'clients' / name} and as {name}.npz; remove one")
        read_in[name] = _client(path, image_size)
    parts: dict[str, tuple[Split, tuple[str, ...]] | None] = {}
    for name in _PARTS:  # without a table the first of them names the classes of the others
        found = parts[name] = _labelled(root, name, classes, named_by, image_size)
        if found and not classes:
            classes, named_by = found[1], f"the folder {name}"
    for who in table.rows.keys() - read_in.keys():
        place = next(iter(table.rows[who].values())).place
        raise InvalidPriors(f"{root}: client {who!r} ({place}) is not in {root / 'clients'}, which holds {', '.join(read_in)}")
    channels = max(len(images[0]) for images in (*(x for x, _, _ in read_in.values()), *(p[0].images for p in parts.values() if p)))
    sizes = {root / name: images[0] for name, (images, _, _) in read_in.items()} | {
        root / name: part[0].images[0] for name, part in parts.items() if part
    }
    check_sizes(sizes)

    def even(images: torch.Tensor) -> torch.Tensor:
        return images.expand(-1, channels, -1, -1).contiguous()

    def split(part: tuple[Split, tuple[str, ...]] | None) -> Split | None:
        return None if part is None else Split(even(part[0].images), part[0].labels)

    clients = []
    for name, (images, sets, names) in sorted(read_in.items()):
        priors, places = _rows(name, names, table)
        clients.append(ClientImages(name, even(images), sets, priors, None, places))
    notes = (*_strays(root, entries, table.file), *look_alikes(classes))
    return Material(clients, classes, split(parts["test"]), split(parts["labeled"]), split(parts["validation"]), notes)


def _strays(root: Path, clients: list[Path], table: str) -> tuple[str, ...]:
    """What holds no image and no priors of the federation."""
    parts = [root / part if (root / part).is_dir() else root / f"{part}.npz" for part in _PARTS]
    known = {root / "clients", *(root / name for part in _PARTS for name in (part, f"{part}.npz"))}
    others = [path for path in visible(root) if path not in known and (path.is_dir() or path.suffix == ".npz")]
    misnamed = (f"passed over: {', '.join(map(str, others))}; expected test, labeled or validation",) if others else ()
    folders = (root, root / "clients", *(path for path in clients + parts if path.is_dir()))
    return *misnamed, *passed_over(folders, {root / table, *clients, *parts, *others})


def _client(path: Path, image_size: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Images, their sets, and the sets' names in order."""
    if path.is_dir():
        files = labelled(path, _LAYOUT)
        images = {file: read_image(file, image_size) for file, _ in files}
        if not images:
            raise UserError(f"{path} holds no image; {_LAYOUT}")
        check_sizes(images)
        channels = max(len(image) for image in images.values())
        pixels, ids = torch.stack([image.expand(channels, -1, -1) for image in images.values()]), np.array([name for _, name in files])
    else:
        arrays = read_npz(path, ("images", "set"))
        if set(arrays) != {"images", "set"}:
            raise UserError(f"{path} holds {', '.join(sorted(arrays)) or 'nothing'}; expected images and set")
        ids = arrays["set"]
        arrays["numbers"] = np.zeros(arrays["images"].shape[:1], dtype=np.int64)
        pixels = read_split(path, arrays, "images", "numbers").images
        if ids.ndim != 1 or ids.dtype.kind not in "iuSU":
            raise InvalidPriors(f"client {path.stem!r}: expected set as one name or integer per image, got {ids.dtype} {list(ids.shape)}")
        if len(ids) != len(pixels):
            raise InvalidPriors(f"client {path.stem!r}: {len(ids)} entries in set for {len(pixels)} images")
        try:
            ids = np.char.decode(ids.astype(np.bytes_), "utf-8") if ids.dtype.kind == "S" else ids
        except UnicodeDecodeError as error:
            raise InvalidPriors(f"client {path.stem!r}: a name in set is not UTF-8 text ({error}); save the names as str") from None
        pixels = resize(pixels, image_size) if image_size else pixels
    found, inverse = np.unique(ids, return_inverse=True)
    names = [str(name) for name in found.tolist()]
    order = sorted(names, key=int if ids.dtype.kind in "iu" or all(name.isdecimal() for name in names) else None)
    return pixels, torch.tensor([order.index(name) for name in names])[torch.from_numpy(inverse.astype(np.int64))], order


def _rows(client: str, sets: list[str], table: Table) -> tuple[Matrix | None, tuple[str, ...]]:
    """A client's priors, and what to call its sets in a message."""
    if not table.rows:
        return None, tuple(map(repr, sets))
    rows = table.rows.get(client, {})
    for m, name in enumerate(sets):
        if name not in rows:
            raise InvalidPriors(f"client {client!r}, set {m} ({name!r}): no priors given; add its row to {table.file}")
    for name, row in rows.items():
        if name not in sets:
            raise InvalidPriors(f"client {client!r}: priors are given for set {name!r} ({row.place}), which has no image")
    return np.array([rows[name].shares for name in sets]), tuple(f"{name!r}, {rows[name].place}" for name in sets)


def _labelled(root: Path, part: str, classes: tuple[str, ...], named_by: str, image_size: int) -> tuple[Split, tuple[str, ...]] | None:
    """Images and labels of test, labeled or validation, and the classes that they are numbered by; None where there are none."""
    if (root / part).is_dir():
        files = labelled(root / part, _LAYOUT)
        names = classes or tuple(sorted({name for _, name in files}))
        for _, name in files:
            if name not in names:
                raise UserError(
                    f"class {name!r} of the folder {root / part} is not one of those of {named_by} ({', '.join(names)}); "
                    "write it the same in both"
                )
        images = {file: read_image(file, image_size) for file, _ in files}
        check_sizes(images)
        channels = max(len(image) for image in images.values())
        pixels = torch.stack([image.expand(channels, -1, -1) for image in images.values()])
        return Split(pixels, torch.tensor([names.index(name) for _, name in files])), names
    path = root / f"{part}.npz"
    if not path.is_file():
        return None
    arrays = read_npz(path, ("images", "labels"))
    if set(arrays) != {"images", "labels"}:
        raise UserError(f"{path} holds {', '.join(sorted(arrays)) or 'nothing'}; expected images and labels")
    split = read_split(path, arrays, "images", "labels")
    names = classes or tuple(str(k) for k in range(int(split.labels.max()) + 1))
    if int(split.labels.min()) < 0 or int(split.labels.max()) >= len(names):
        raise UserError(f"{path}: labels must lie in [0, {len(names)}), the classes of the priors in their order")
    return Split(resize(split.images, image_size) if image_size else split.images, split.labels), names


def _read_table(root: Path) -> Table:
    if (root / "priors.csv").is_file():
        path = root / "priors.csv"
        try:
            text = path.read_text(encoding="utf-8-sig")  # spreadsheets put a mark in front
        except UnicodeDecodeError as error:
            raise InvalidPriors(f"{path} is not UTF-8 text ({error}); save it as CSV UTF-8") from None
        reader = csv.reader(io.StringIO(text))
        try:
            numbered = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]  # a row ends in this line
        except csv.Error as error:
            raise InvalidPriors(f"{path}, line {reader.line_num}: {error}; look for a quotation mark that is not closed") from None
        header = numbered[0][1] if numbered else []
        if header[:2] != ["client", "set"] or len(header) < 4:
            found = ",".join(header) if numbered else "nothing"
            hint = "; separate the cells by commas, not semicolons" if ";" in found else ""
            raise InvalidPriors(f"{path}: expected the header client,set,CLASS,CLASS,...; got {found}{hint}")
        classes = tuple(header[2:])
        if "" in classes:
            raise InvalidPriors(f"{path}: column {classes.index('') + 3} of the header has no class name")
        if len(set(classes)) < len(classes):
            raise InvalidPriors(f"{path}: the header names a class twice: {','.join(classes)}")
        table: dict[str, dict[str, Row]] = {}
        for line, row in numbered[1:]:
            if not any(row):
                continue
            if len(row) != len(header):
                raise InvalidPriors(f"{path}, line {line}: {len(row)} cells, expected {len(header)}")
            if row[1] in table.setdefault(row[0], {}):
                raise InvalidPriors(f"{path}, line {line}: client {row[0]!r}, set {row[1]!r} is there twice")
            shares = [_number(cell, f"{path}, line {line}") for cell in row[2:]]
            table[row[0]][row[1]] = Row(shares, f"{path.name}, line {line}")
        return Table(path.name, table, classes)
    if (root / "priors.json").is_file():
        return _read_json(root / "priors.json")
    return Table("", {}, ())


def _read_json(path: Path) -> Table:
    def entries(pairs: Any, place: str, unit: str) -> dict[str, Any]:
        """What an object holds; json alone would keep the last of several entries of one name."""
        if not (isinstance(pairs, tuple) and pairs):
            got = reprlib.repr(pairs) if pairs else "nothing"
            raise InvalidPriors(f'{path}: expected {{"CLIENT": {{"SET": {{"CLASS": share}}}}}}; got {got}{place}')
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise InvalidPriors(f"{path}: {unit} {name!r} is there twice{place}")
            found[name] = value
        return found

    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise InvalidPriors(f"{path} is not JSON ({error})") from None
    named = {
        client: {
            name: entries(row, f" in client {client!r}, set {name!r}", "class")
            for name, row in entries(rows, f" in client {client!r}", "set").items()
        }
        for client, rows in entries(content, "", "client").items()
    }
    classes = tuple(next(iter(next(iter(named.values())).values())))
    for client, rows in named.items():
        for name, row in rows.items():
            if set(row) != set(classes):
                raise InvalidPriors(f"{path}: client {client!r}, set {name!r} names {', '.join(row)}; expected {', '.join(classes)}")

    def shares(client: str, name: str) -> list[float]:
        return [_number(named[client][name][k], f"{path}, client {client!r}, set {name!r}") for k in classes]

    table = {client: {name: Row(shares(client, name), path.name) for name in rows} for client, rows in named.items()}
    return Table(path.name, table, classes)


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidPriors(f"{where}: {reprlib.repr(value)} is not a number in [0, 1]") from None
