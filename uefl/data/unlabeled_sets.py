"""A federation of clients with unlabeled sets.

The federation has the images, the set of each image, and the class shares (priors) of the sets.

All algorithms that learn from sets use this builder, so that every arm has the same images in the same sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..errors import InvalidPriors, UserError
from ..seeds import derive
from . import manifest as record
from . import notes, priors
from .dataset import DataSet
from .federation import ClientData, Federation, ServerData, SetData, Sizes, Split
from .images import Rows
from .partitions.base import Scheme, SetDeal
from .prepare import Preparation, Source
from .priors import Matrix

if TYPE_CHECKING:
    from .settings import Data


@dataclass(frozen=True)
class LabeledRows:
    """Images of a source that have labels."""

    images: Source
    rows: Rows
    labels: Rows

    def part(self, positions: Rows) -> LabeledRows:
        """Return the rows at some positions."""
        return LabeledRows(self.images, self.rows[positions], self.labels[positions])

    def load(self, prepare: Preparation) -> Split:
        """Read the images and their labels."""
        return Split(prepare(self.images, self.rows), torch.from_numpy(self.labels))

    def entry(self, content: record.ImageHashes, part: str, classes: int) -> record.ManifestEntry:
        """Return the record of a part of the server's images, ``labeled`` or ``validation``."""
        use: record.ImageUse = "train" if part == "labeled" else "holdout"
        return content.entry(self.images, self.rows, self.labels, f"server/{part}", use, classes)


@dataclass(frozen=True)
class ClientSets:
    """One client's images and sets, before its priors are computed and checked."""

    name: str
    images: Source
    rows: Rows
    sets: Rows
    """``[n]`` int64, the set of each image"""
    priors: Matrix | None
    """None: the priors are estimated"""
    labels: Rows | None
    set_names: tuple[str, ...] = ()
    """the user's name of each set, and the place of its priors; empty for sets that were dealt"""
    weights: Matrix | None = None
    """the class weights of the deal; None for the user's own sets"""

    @property
    def count(self) -> int:
        """Return the number of sets."""
        return int(self.sets.max(initial=-1)) + 1 if self.priors is None else len(self.priors)


@dataclass(frozen=True)
class UnlabeledData:
    """The parts that a federation of sets is made of."""

    name: str
    """name of the data set, or path of the user's data"""
    clients: Sequence[ClientSets]
    classes: tuple[str, ...]
    test: LabeledRows | None
    labeled: LabeledRows | None
    validation: LabeledRows | None
    source: dict[str, Any]
    """for the manifest"""
    notes: tuple[str, ...] = ()
    """notes about the files for the user"""


def deal(table: DataSet, scheme: Scheme, data: Data, seed: int) -> UnlabeledData:
    """Cut a data set into clients, sets and the images of the server."""
    dealt = scheme.deal(table, data, seed)
    assert isinstance(dealt, SetDeal)

    def rows(chosen: Rows) -> LabeledRows | None:
        return LabeledRows(table.images, chosen, table.labels[chosen]) if len(chosen) else None

    clients = []
    for share in dealt.clients:
        labels = table.labels[share.rows]
        realized = priors.realized(labels, share.sets, len(share.weights), len(table.classes))
        clients.append(
            ClientSets(
                share.name, table.images, share.rows, share.sets, realized, labels, weights=share.weights
            )
        )
    source = {"name": table.name, "path": table.images.place, "images": dict(table.parts)}
    test, labeled, validation = rows(dealt.test), rows(dealt.labeled), rows(dealt.validation)
    return UnlabeledData(table.name, clients, table.classes, test, labeled, validation, source, table.notes)


def federate(
    made: UnlabeledData, partition: dict[str, Any], data: Data, seed: int, *, whole: bool = True
) -> Federation:
    """Compute the priors of all sets, and deal the test images to the clients at random.

    Test images are dealt in equal parts, so that the mean over the clients is the result of the whole test
    set. The function reads the images of one client at a time: for the mean and deviation, for the manifest,
    and to estimate priors.

    Args:
        partition: the scheme for the manifest.
        whole: False: other clients are elsewhere, so checks over all clients are skipped.

    Raises:
        UserError: there is a single class, or priors are missing, or a client has no test image.
        InvalidPriors: a classifier cannot be trained with the sets or priors.
    """
    classes = len(made.classes)
    if classes == 1:
        raise UserError(f"{made.name} has one class, {made.classes[0]!r}; a classifier needs two or more")
    notes.check_names("client", (client.name for client in made.clients))
    notes.check_names("class", made.classes)
    server = {"labeled": made.labeled, "validation": made.validation}
    sources = _sources(made)
    prepare = Preparation.of(sources, data.image_size, data.normalize == "standard")
    prepare.check_memory(sum(len(client.rows) for client in made.clients))
    held = {part: rows.load(prepare) if rows else None for part, rows in server.items()}

    priors_of = _Priors(made, data, seed, held["labeled"])
    content, pixels, clients, entries = record.ImageHashes(), prepare.statistics(), [], {}
    for client, test in zip(made.clients, _tests(made, seed), strict=True):
        images = prepare(client.images, client.rows)
        pixels.add(images)
        table, weights = priors_of(client, images)
        of_sets = tuple(np.bincount(client.sets, minlength=len(table)).tolist())
        sizes = Sizes(len(images), 0, len(test.rows) if test else 0, of_sets)
        load = partial(_load, prepare, client, table, weights, test)
        clients.append(ClientData(client.name, sizes, load))
        entries[client.name] = _entry(client, table, test, content, classes)
    of_priors = priors_of.check(together=whole)
    if held["labeled"] is not None:
        pixels.add(held["labeled"].images)
    manifest = _manifest(made, partition, data, seed, entries, content)
    record.check_disjoint(manifest)
    found = (
        *made.notes,
        *notes.of_clients(len(clients)),
        *priors_of.corrected,
        *of_priors,
        *notes.of_kinds(sources),
        *notes.of_resizing(sources, data.image_size),
        *notes.of_twins(content.twins(), prepare.inputs),
        *notes.of_contrast(pixels),
    )
    return Federation(
        "sets",
        tuple(clients),
        made.classes,
        prepare.shape,
        *pixels.mean_and_std(),
        (),
        ServerData(held["labeled"], held["validation"]),
        found,
        manifest,
        record.digest(manifest),
        inputs=prepare.inputs,
    )


class _Priors:
    """Compute the priors of each client, and collect notes on the priors."""

    def __init__(self, made: UnlabeledData, data: Data, seed: int, labeled: Split | None) -> None:
        self._made, self._data, self._seed, self._labeled = made, data, seed, labeled
        self._rng = np.random.default_rng(derive(seed, "priors"))
        self._estimator: priors.PriorEstimator | None = None
        self._known: list[tuple[Matrix, Rows]] = []
        self._notes: list[str] = []
        self.corrected: list[str] = []

    def __call__(self, client: ClientSets, images: torch.Tensor) -> tuple[Matrix, Matrix | None]:
        """Return the priors ``[M, K]`` of a client, and the weights of its deal if the priors are exact."""
        data, names = self._data, client.set_names
        table = self._estimate(client, images) if data.priors == "estimated" else client.priors
        if table is None:
            raise UserError(
                f"{self._made.name}: no priors given; add priors.csv or priors.json, or set priors ="
                " 'estimated'"
            )
        priors.check_targets(client.name, client.sets, len(table))
        sizes = np.bincount(client.sets, minlength=len(table))
        table, corrected = priors.check_priors(client.name, table, sizes, len(self._made.classes), names)
        self.corrected += corrected
        # before noise and smoothing, which would hide a class without images
        self._known.append((table, sizes))
        self._notes += priors.notes(client.name, table, sizes, self._made.classes, names)
        table = priors.noisy(table, data.prior_noise, self._rng) if data.prior_noise else table
        # noise changes the weights too; smoothing keeps the order of a row
        exact = data.priors == "given" and not data.prior_noise
        return priors.smoothed(table, data.prior_smoothing), client.weights if exact else None

    def _estimate(self, client: ClientSets, images: torch.Tensor) -> Matrix:
        if self._labeled is None:
            raise UserError(f"{self._made.name}: estimated priors need labeled images of the server")
        of_set = [images.numpy()[client.sets == m] for m in range(client.count)]
        for m, batch in enumerate(of_set):
            if len(batch) == 0:
                raise InvalidPriors(
                    f"client {client.name!r}, set {m}: the set is empty; lower sets or raise train_per_client"
                )
        if self._estimator is None:
            self._estimator = priors.PriorEstimator(
                self._labeled, self._made.classes, derive(self._seed, "folds") % 2**32
            )
        return self._estimator(of_set)

    def check(self, *, together: bool) -> list[str]:
        """Return all notes on the priors, or raise an error for them if ``data.strict`` is set.

        If all clients are in this process (``together``), the checks over all clients come last.
        """
        coverages = [PriorCoverage.of(table, sizes) for table, sizes in self._known]
        of_all = notes_of_all(coverages, self._made.classes) if together else []
        return check_notes(self._notes + of_all, strict=self._data.strict)


class PriorCoverage(NamedTuple):
    """The part of one client's priors that concerns the whole federation."""

    has: list[bool]
    """for each class, whether a set has it"""
    full_rank: bool

    @classmethod
    def of(cls, table: Matrix, sizes: Rows) -> PriorCoverage:
        """Return the coverage of priors ``[M, K]`` and of the set sizes ``[M]``."""
        return cls((table.sum(0) > 0).tolist(), bool(priors.full_rank(table, sizes)))


def _manifest(
    made: UnlabeledData,
    partition: dict[str, Any],
    data: Data,
    seed: int,
    entries: dict[str, Any],
    content: record.ImageHashes,
) -> dict[str, Any]:
    """Return the manifest, with the entries of the clients."""
    server = {"labeled": made.labeled, "validation": made.validation}
    return {
        "schema": record.SCHEMA,
        "kind": "sets",
        "source": made.source,
        "partition": partition,
        "seed": seed,
        "image_size": data.image_size,
        "classes": list(made.classes),
        "silos": entries,
        "unseen": {},
        "server": {
            part: rows.entry(content, part, len(made.classes))
            for part, rows in server.items()
            if rows is not None
        },
    }


def _tests(made: UnlabeledData, seed: int) -> list[LabeledRows | None]:
    """Deal the test images to the clients at random, in equal parts."""
    count = len(made.clients)
    if made.test is None:
        return [None] * count
    if len(made.test.rows) < count:
        raise UserError(
            f"{made.name} has {len(made.test.rows)} test images for {count} clients; each needs one or more"
        )
    order = np.random.default_rng(derive(seed, "test")).permutation(len(made.test.rows))
    return [made.test.part(part) for part in np.array_split(order, count)]


def notes_of_all(coverages: Sequence[PriorCoverage], classes: tuple[str, ...]) -> list[str]:
    """Return notes on the priors of all clients together.

    Raises:
        InvalidPriors: a class is in no set of any client.
    """
    for name, has in zip(classes, zip(*(coverage.has for coverage in coverages), strict=True), strict=True):
        if not any(has):
            raise InvalidPriors(
                f"class {name!r} is in no set of any client; remove it, or add a set that has it"
            )
    if any(coverage.full_rank for coverage in coverages):
        return []
    return ["no client's priors have full rank: the sets may not determine a classifier of all classes"]


def check_notes(on_priors: list[str], *, strict: bool) -> list[str]:
    """Return the notes on priors, or raise an error for them.

    Raises:
        InvalidPriors: there is a note, and ``strict`` is set.
    """
    if on_priors and strict:
        raise InvalidPriors(f"{on_priors[0]} (strict = true; {len(on_priors)} such notes)")
    return on_priors


def _sources(made: UnlabeledData) -> list[Source]:
    """Return the places of all images, without duplicates."""
    every = [client.images for client in made.clients] + [
        part.images for part in (made.test, made.labeled, made.validation) if part
    ]
    return list({id(images): images for images in every}.values())


def _load(
    prepare: Preparation, client: ClientSets, table: Matrix, weights: Matrix | None, test: LabeledRows | None
) -> SetData:
    """Read the images of one client."""
    return SetData(
        prepare(client.images, client.rows),
        torch.from_numpy(client.sets),
        torch.from_numpy(table),
        None if client.labels is None else torch.from_numpy(client.labels),
        None if weights is None else torch.from_numpy(weights),
        None if test is None else test.load(prepare),
    )


def _entry(
    client: ClientSets, table: Matrix, test: LabeledRows | None, content: record.ImageHashes, classes: int
) -> record.ManifestEntry:
    """Return the record of one client."""
    train = content.entry(client.images, client.rows, client.labels, f"{client.name}/train", "train", classes)
    entry: record.ManifestEntry = {"train": train | {"sets": client.sets.tolist(), "priors": table.tolist()}}
    if test is not None:
        entry["test"] = content.entry(
            test.images, test.rows, test.labels, f"{client.name}/test", "test", classes
        )
    return entry
