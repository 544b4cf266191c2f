"""Schemes of partitions, their results, and the registry of schemes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import SerializerFunctionWrapHandler, model_serializer

from ...errors import UserError
from ...fields import Section, tuples
from ...registry import Registry

if TYPE_CHECKING:
    from ..dataset import DataSet
    from ..federation import DataKind
    from ..images import Rows
    from ..settings import Data


@dataclass(frozen=True)
class Share:
    """The part of a data set that one client gets."""

    name: str
    train: Rows
    """images to train on, in order; the holdout is taken from them"""
    test: Rows | None
    """None: test images are cut from ``train``, a share of each class"""
    angle: float = 0.0
    """rotation of all of them, in degrees counter-clockwise"""
    legacy_center: bool = False


@dataclass(frozen=True)
class Deal:
    """The clients of a federation with labeled images."""

    clients: tuple[Share, ...]
    unseen: tuple[Share, ...] = ()
    """measured only: all their images are test images"""


@dataclass(frozen=True)
class SetShare:
    """The part of a data set that one client gets as unlabeled sets."""

    name: str
    rows: Rows
    """images of the client; an image may occur several times"""
    sets: Rows
    """``[n]`` int64, the set of each"""
    weights: npt.NDArray[np.float64]
    """``[M, K]`` the class weights that the sets were drawn with"""


@dataclass(frozen=True)
class SetDeal:
    """The clients of a federation with unlabeled sets, the images of the server, and all test images."""

    clients: tuple[SetShare, ...]
    labeled: Rows
    validation: Rows
    test: Rows


class Scheme(Section):
    """A way to deal the images of a source, with the keys of ``[data.partition]`` as fields."""

    name: ClassVar[str]
    """value of ``scheme``; set by :func:`partition`"""
    kind: ClassVar[DataKind] = "labeled"
    of_groups: ClassVar[bool] = False
    """whether the scheme takes only sources with clients or domains"""
    one_class: ClassVar[bool] = False
    """whether a client may have training images of a single class"""

    @model_serializer(mode="wrap")
    def _with_name(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {"scheme": self.name, **fields}

    def deal(self, table: DataSet, data: Data, seed: int) -> Deal | SetDeal:
        """Deal the images of a table.

        Args:
            table: the source; only its labels and groups are used.
            data: how many clients and images are wanted.

        Raises:
            UserError: the source has too few images, or the scheme does not fit it.
        """
        raise NotImplementedError


def checked(deal: object, scheme: str, count: int) -> Deal:
    """Return the deal of ``count`` labeled images after a check that all of it is valid.

    Raises:
        TypeError: the object is not a deal, or rows are not int64 arrays of NumPy.
        ValueError: there are no clients, a row is not an image, or an unseen client has training images or no
            test images.
    """
    from ..images import check_rows  # which imports torch

    place = f"partition {scheme!r}"
    if not isinstance(deal, Deal):
        raise TypeError(f"{place}: expected a Deal, got {type(deal).__name__}")
    if not deal.clients:
        raise ValueError(f"{place}: dealt images to no client")
    for share in (*deal.clients, *deal.unseen):
        check_rows(f"{place}: training images of {share.name!r}", share.train, count)
        if share.test is not None:
            check_rows(f"{place}: test images of {share.name!r}", share.test, count)
    for share in deal.unseen:
        if len(share.train) or share.test is None:
            raise ValueError(f"{place}: {share.name!r} is measured only; expected test images only")
    return deal


class _Partitions(Registry[type[Scheme]]):
    def add(self, name: str, entry: type[Scheme]) -> None:
        """Register a scheme, and set its name."""
        super().add(name, entry)
        entry.name = name


PARTITIONS = _Partitions(__package__, "partition", "uefl.partitions")
"""the schemes by name, among them those of installed packages (entry points ``uefl.partitions``)"""

AnyScheme = TypeVar("AnyScheme", bound=type[Scheme])


def partition(name: str) -> Callable[[AnyScheme], AnyScheme]:
    """Register a scheme under the name that ``[data.partition] scheme = ...`` gives it."""
    return PARTITIONS.decorator(name)


def from_table(value: Any) -> Any:
    """Return the scheme that a table names, for pydantic, and another value unchanged.

    Raises:
        ValueError: the table has no ``scheme``, or names one that does not exist; a name without a table.
    """
    if isinstance(value, str):
        raise ValueError(f"is a table; name its scheme, data.partition.scheme={value}")
    if not isinstance(value, dict):
        return value
    table = dict(value)
    name = table.pop("scheme", None)
    if not isinstance(name, str):
        raise ValueError(f"give the name of a partition as scheme; there are {', '.join(PARTITIONS)}")
    return PARTITIONS[name].model_validate({key: tuples(entry) for key, entry in table.items()})


# --- what schemes have in common --------------------------------------------------------------------------


def generator(seed: int, purpose: str = "partition") -> np.random.Generator:
    """Return the generator for the draws of a partition."""
    from ...seeds import derive  # which imports torch

    return np.random.default_rng(derive(seed, purpose))


def client_names(stem: str, count: int) -> list[str]:
    """Return names with numbers of equal length, so that sorting by name keeps the order."""
    digits = len(str(count - 1))
    return [f"{stem}-{i:0{digits}}" for i in range(count)]


def wanted_clients(data: Data, implied: int | None = None) -> int:
    """Return the number of clients, from the key or from the scheme.

    Raises:
        UserError: neither the key nor the scheme has the number.
    """
    count = data.clients if data.clients is not None else implied
    if count is None:
        raise UserError(f"key 'clients': give the number of clients that {data.source} is dealt to")
    return count


def slices(table: DataSet, data: Data, clients: int) -> list[tuple[Rows, Rows]]:
    """Return disjoint slices in order, client by client, cut into train and test if the source is not.

    Raises:
        UserError: there are too few images.
    """
    s, t = data.train_per_client, data.test_per_client
    if table.test is None:
        check_enough(table, data, clients, "", clients * (s + t), table.train)
        begins = range(0, clients * (s + t), s + t)
        return [(table.train[i : i + s], table.train[i + s : i + s + t]) for i in begins]
    check_enough(table, data, clients, "training ", clients * s, table.train)
    check_enough(table, data, clients, "test ", clients * t, table.test)
    return [(table.train[i * s : (i + 1) * s], table.test[i * t : (i + 1) * t]) for i in range(clients)]


def check_enough(table: DataSet, data: Data, clients: int, kind: str, needed: int, rows: Rows) -> None:
    """Refuse to deal more images than there are.

    Raises:
        UserError: the clients need more of this ``kind``.
    """
    if needed > len(rows):
        raise UserError(
            f"{clients} clients with train_per_client = {data.train_per_client} and test_per_client ="
            f" {data.test_per_client} need {needed} {kind}images, {table.name} has {len(rows)}; lower one of"
            " the three"
        )


def angle_of_each(angles: tuple[float, ...], clients: int) -> tuple[float, ...]:
    """Return one angle per client: each angle goes to an equal number of consecutive clients.

    Raises:
        UserError: the number of angles does not divide the number of clients.
    """
    if not angles:
        return (0.0,) * clients
    if clients % len(angles):
        raise UserError(
            f"key 'data.partition.angles': expected {clients} angles (one per client), a divisor of this"
            f" number, or an empty list; got {len(angles)}: {list(angles)}. Set a multiple of {len(angles)}"
            " clients, or other angles"
        )
    return tuple(angle for angle in angles for _ in range(clients // len(angles)))
