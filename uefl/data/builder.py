"""Make a federation from the section ``[data]``: read the source, deal it, and check the result."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import UserError, nearest
from ..fields import check_unused
from ..isolation import isolate
from ..paths import check_name, expanded, other_capitals, special
from . import labeled, unlabeled_sets
from .dataset import DataSet, checked
from .federation import DataKind, Federation
from .images import ImageList
from .partitions.base import Scheme
from .partitions.base import checked as whole_deal
from .partitions.natural import Natural
from .partitions.rotations import Rotations
from .partitions.unlabeled import Unlabeled
from .settings import OF_KIND, Data
from .sources import SOURCES, generated, own_folder, own_npz, own_sets, own_table

_DEALT = (
    "partition",
    "clients",
    "train_per_client",
    "test_per_client",
    "labeled",
    "validation",
    "first_classes",
)


@isolate
def build(data: Data, *, kind: DataKind, seed: int, data_root: Path | None = None) -> Federation:
    """Make the federation that the section ``[data]`` describes.

    The pixels of one client at a time are read, to check and to hash them; :attr:`ClientData.load` reads them
    again.

    Args:
        kind: the kind of data that the algorithms need, ``labeled`` or ``sets``.
        seed: seed of the run. The images of a client of ``rotations`` and ``imbalanced`` do not depend on the
            seed.
        data_root: folder of the files of data sets; default: environment variable UEFL_DATA.

    Raises:
        UserError: the data are missing or damaged, a client has too few images, or a key does not fit the
            data.
        InvalidPriors: a classifier cannot be trained with the sets or priors.
    """
    root = data_root or (expanded(os.environ["UEFL_DATA"]) if os.environ.get("UEFL_DATA") else None)
    _check_kind(data, kind)
    path = data.path
    if path is not None:
        check_name(path, "key 'source':")
    if data.source == generated.NAME:
        if kind == "sets":
            raise UserError(
                f"key 'source': {generated.NAME!r} makes labeled images; these arms need"
                f" {OF_KIND[kind]}, choose another source"
            )
        for key in ("partition", "first_classes", "image_size"):
            check_unused(data, key, f"{generated.NAME!r} makes the images of each client")
        return generated.federate(data, seed)
    if kind == "sets" and path is not None and path.is_dir():
        for key in _DEALT:
            check_unused(data, key, "a folder of sets has its own")
        return unlabeled_sets.federate(own_sets.read(path), {"scheme": "given"}, data, seed)
    table = _read_source(data, root)
    scheme = data.partition or _default_scheme(table, kind)
    _check_scheme(table, scheme)
    partition = scheme.model_dump(mode="json")
    if kind == "sets":
        return unlabeled_sets.federate(unlabeled_sets.deal(table, scheme, data, seed), partition, data, seed)
    deal = whole_deal(scheme.deal(table, data, seed), scheme.name, len(table.labels))
    if data.clients not in (None, len(deal.clients)):
        raise UserError(
            f"key 'clients': partition {scheme.name!r} needs clients = {len(deal.clients)}; set this number,"
            f" or omit the key; got {data.clients}"
        )
    return labeled.federate(table, deal, data, seed, partition=partition, one_class=scheme.one_class)


def _read_source(data: Data, root: Path | None) -> DataSet:
    """Return the data, or with ``first_classes`` the part of them, that ``source`` names, before the deal."""
    path = data.path
    if path is None:
        table = checked(SOURCES[data.source](root), data.source)
    elif path.suffix.lower() == ".npz":
        table = own_npz.read(path)
    elif own_table.is_folder(path) or (path.suffix.lower() in own_table.SUFFIXES and path.is_file()):
        table = own_table.read(path, data)
    elif path.is_dir():
        table = own_folder.read(path)
    else:
        check_name(path, "key 'source':")
        if special(path) is not None or path.is_file():
            raise UserError(
                f"key 'source': {data.source!r} is {special(path) or 'a file of another kind'}; expected a"
                " folder, an .npz, a .csv or a .parquet"
            )
        raise UserError(
            f"key 'source': {data.source!r} is none of {', '.join(SOURCES)}{nearest(data.source, SOURCES)},"
            f" and no folder or file of that name is there{other_capitals(path)}; give the path of your data;"
            " `uefl presets own-silos` and `uefl presets own-sets` show the layout"
        )
    if isinstance(table.images, ImageList):
        for key in ("label", "vocabulary"):
            check_unused(data, key, "the data are images")
    return table.first_classes(data.first_classes) if data.first_classes else table


def _default_scheme(table: DataSet, kind: DataKind) -> Scheme:
    """Return the partition if none is named: clients as they are, or a data set dealt in equal parts."""
    if kind == "sets":
        return Unlabeled()
    return Natural() if table.groups else Rotations()


def _check_kind(data: Data, kind: DataKind) -> None:
    """Refuse keys and the partition of the other kind of data, which have no effect here."""
    if not data.source.strip():
        raise UserError(
            "key 'source': is empty, expected the name of a data set or the path of your own data; '.' is the"
            " current folder"
        )
    if data.partition is not None and data.partition.kind != kind:
        raise UserError(
            f"partition {data.partition.name!r} makes {OF_KIND[data.partition.kind]}; these arms need"
            f" {OF_KIND[kind]}"
        )
    data.check_kind(kind)


def _check_scheme(table: DataSet, scheme: Scheme) -> None:
    """Refuse to deal given clients again, and refuse domains for a data set without them."""
    if table.groups and not scheme.of_groups:
        raise UserError(
            f"partition {scheme.name!r} deals a data set; {table.name} has clients of its own: leave the"
            " partition out, or take 'natural'"
        )
    if scheme.of_groups and not table.groups:
        raise UserError(
            f"partition {scheme.name!r} needs a data set with clients or domains; {table.name} has none;"
            " choose another partition"
        )
