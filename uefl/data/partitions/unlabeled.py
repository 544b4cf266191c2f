"""Unlabeled sets dealt from a data set, each with its class shares."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from ...errors import UserError
from ..priors import draw_priors, normalized, shares, shares_of_all
from .base import Scheme, SetDeal, SetShare, client_names, generator, partition, wanted_clients

if TYPE_CHECKING:
    from ..dataset import DataSet
    from ..federation import DataKind
    from ..images import Rows
    from ..priors import Matrix
    from ..settings import Data


@partition("unlabeled")
class Unlabeled(Scheme):
    """Clients get unlabeled images in sets, each with its class shares.

    A data set is cut in its order into the unlabeled images (``clients`` x ``train_per_client``), the
    server's ``labeled`` and its ``validation`` images, and the test images (from its test part if it has
    one). Unlabeled images go to the clients, then to the sets of each client. All draws depend on the seed.
    """

    kind: ClassVar[DataKind] = "sets"

    split: Literal["iid", "noniid", "legacy_noniid"] = "iid"
    """`iid`: a random part for each client; `noniid`: two classes dominate each client; `legacy_noniid`: as
    published, so later clients may have no images of a class"""
    sets: int = Field(default=10, ge=2)
    """sets of each client"""
    overlap: bool = False
    """draw sets as the published code does: one image may be in several sets of its client"""
    legacy_column_norm: bool = False
    """with overlap and iid: class weights divided by column sums, as published"""

    @model_validator(mode="after")
    def _norm_needs_overlap(self) -> Self:
        if self.legacy_column_norm and not (self.overlap and self.split == "iid"):
            raise ValueError("legacy_column_norm: true needs overlap = true and split = 'iid'")
        return self

    def deal(self, table: DataSet, data: Data, seed: int) -> SetDeal:
        """Deal to clients, then to sets."""
        clients, classes = wanted_clients(data), len(table.classes)
        unlabeled, labeled, validation, test = _pieces(table, data, clients)
        rng = generator(seed, "sets")
        labels = table.labels[unlabeled]
        parts = client_parts(labels, clients, self.split, rng, classes)
        theta = [draw_priors(rng, self.sets, classes) for _ in range(clients)]
        if self.legacy_column_norm:
            total = np.sum(theta, axis=0)
            theta = [total / total.sum(0)] * clients
        elif self.split == "iid":
            theta = theta[:1] * clients  # one matrix for all
        made = []
        for name, part, weights in zip(client_names("client", clients), parts, theta, strict=True):
            chosen, sets = (overlapping_sets if self.overlap else client_sets)(labels[part], weights, rng)
            made.append(SetShare(name, unlabeled[part[chosen]], sets, weights))
        return SetDeal(tuple(made), labeled, validation, test)


def _pieces(table: DataSet, data: Data, clients: int) -> list[Rows]:
    """Return unlabeled, labeled, validation and test images."""
    wanted = {
        "clients x train_per_client": clients * data.train_per_client,
        "labeled": data.labeled,
        "validation": data.validation,
    }
    tests = clients * data.test_per_client
    if table.test is None:
        wanted["clients x test_per_client"] = tests
    elif tests > len(table.test):
        raise UserError(
            f"clients x test_per_client = {tests}, {table.name} has {len(table.test)} test images; lower"
            " test_per_client"
        )
    if sum(wanted.values()) > len(table.train):
        needs = " + ".join(f"{what} ({n})" for what, n in wanted.items())
        raise UserError(
            f"{needs} need {sum(wanted.values())} images, {table.name} has {len(table.train)}; lower one of"
            " these numbers"
        )
    ends = np.cumsum([0, *wanted.values()])
    pieces = [table.train[int(a) : int(b)] for a, b in pairwise(ends)]
    return pieces if table.test is None else [*pieces, table.test[:tests]]


def client_parts(
    labels: Rows, clients: int, split: str, rng: np.random.Generator, classes: int
) -> list[Rows]:
    """Return the images that each client gets.

    Every image goes to exactly one client. ``iid``: random parts of equal size.

    ``noniid``: classes 2c and 2c + 1 (modulo K) weigh 80 times as much at client c as the others, which have
    weights U(0.45, 0.55). The images of a class are dealt in proportion to its weights at the clients, so if
    several clients have a large weight for a class, all clients get fewer images of it. If a client would get
    no image of a class, it gets one from the client with the most images of this class, provided that this
    client keeps one.

    ``legacy_noniid``: with the same weights client c takes int(share x n / clients) images of each class in
        their order, after the images of the clients before it. As in the published code, there is no message
        if a class has too few images: later clients get fewer of them, or none, and some images stay unused.
    """
    if split == "iid":
        return list(np.array_split(rng.permutation(len(labels)), clients))
    weights = rng.uniform(0.45, 0.55, (clients, classes))
    for c in range(clients):
        weights[c, [2 * c % classes, (2 * c + 1) % classes]] *= 80
    if split == "legacy_noniid":
        counts = (normalized(weights) * len(labels) / clients).astype(np.int64)
        ends = counts.cumsum(0)
        of_class = [np.split(np.flatnonzero(labels == k), ends[:, k]) for k in range(classes)]
        return [np.concatenate([pieces[c] for pieces in of_class]) for c in range(clients)]
    return _deal_by_class(labels, normalized(weights), rng, shares_of_all)


def client_sets(labels: Rows, theta: Matrix, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """Return positions of images and the set of each, ``[n]``, with every image in exactly one set.

    The images of a class are dealt to the sets in proportion to the drawn priors ``theta [M, K]``. If all
    classes have equally many images and all columns of ``theta`` have equal sums, ``theta`` has the priors of
    the sets. A rare class is rare in all sets.
    """
    parts = _deal_by_class(labels, theta, rng, shares)
    return np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])


def overlapping_sets(labels: Rows, theta: Matrix, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """Draw the sets as the published code does.

    Set m takes the first int(floor(n / M) theta[m, k]) images of class k, shuffled again.

    An image can be in several sets. If a class has too few images, a set gets fewer of them, without a
    message. The realized priors are exact nevertheless.
    """
    nominal, positions, sets = len(labels) // len(theta), [], []
    for m, row in enumerate(theta):
        for k, share in enumerate(row):
            chosen = rng.permutation(np.flatnonzero(labels == k))[: int(nominal * share)]
            positions.append(chosen)
            sets.append(np.full(len(chosen), m))
    return np.concatenate(positions), np.concatenate(sets)


def _deal_by_class(
    labels: Rows, weights: Matrix, rng: np.random.Generator, counts: Callable[[int, Matrix], Rows]
) -> list[Rows]:
    """Deal the positions of the images of each class k in the shares ``weights[:, k]``."""
    parts: list[list[Rows]] = [[] for _ in weights]
    for k in range(weights.shape[1]):
        of_class = rng.permutation(np.flatnonzero(labels == k))
        for part, piece in zip(
            parts, np.split(of_class, np.cumsum(counts(len(of_class), weights[:, k]))[:-1]), strict=True
        ):
            part.append(piece)
    return [np.concatenate(part) for part in parts]
