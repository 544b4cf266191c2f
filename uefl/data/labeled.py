"""A federation of clients with labeled images."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..errors import UserError
from . import manifest as record
from . import notes
from .dataset import DataSet
from .federation import ClientData, Federation, LabeledData, Sizes, Split
from .images import DamagedImages, Rows
from .partitions.base import Deal, Share
from .prepare import Preparation

if TYPE_CHECKING:
    from .settings import Data


class _ClientSplit(NamedTuple):
    """One client, and which images are for training and which are its holdout."""

    share: Share
    test: Rows
    kept: Rows
    """positions in ``share.train``"""
    held: Rows | None
    """None: the test split takes the place of the holdout"""


def federate(
    table: DataSet, deal: Deal, data: Data, seed: int, *, partition: dict[str, Any], one_class: bool = False
) -> Federation:
    """Split off missing test images, then draw the holdout at random.

    The images of one client at a time are read here, for the mean and deviation and for the manifest.

    Args:
        seed: seed of the splits that are made here.
        partition: how the images were dealt, for the manifest.
        one_class: whether a client may have training images of a single class.

    Raises:
        UserError: a client has an empty split, or images of one class although it needs two; images differ in
            size.
    """
    notes.check_names("client", (share.name for share in (*deal.clients, *deal.unseen)))
    notes.check_names("class", table.classes)
    splits = _split(table, deal.clients, data, seed, one_class=one_class)
    prepare = Preparation.of([table.images], data.image_size, data.normalize == "standard")
    unseen = [_unseen(share) for share in deal.unseen]
    notes.check_names("column", prepare.inputs.names)
    measured = sum(len(split.test) for split in (*splits, *unseen))
    prepare.check_memory(sum(len(split.share.train) for split in splits) + measured)

    content, pixels, damaged = record.ImageHashes(), prepare.statistics(), DamagedImages()
    clients, entries = [], {}
    for split in splits:
        load = partial(_load, table, prepare, split)
        with damaged.gathered():
            found = load()
            pixels.add(*trained_on(found))
            clients.append(ClientData(split.share.name, Sizes.of(found), load))
            entries[split.share.name] = _entry(table, split, content)
    damaged.check()
    manifest = {
        "schema": record.SCHEMA,
        "kind": "labeled",
        "source": {"name": table.name, "path": table.images.place, "images": dict(table.parts)},
        "partition": partition,
        "seed": seed,
        "image_size": data.image_size,
        "legacy_holdout": data.legacy_holdout,
        "classes": list(table.classes),
        "silos": entries,
        "unseen": {split.share.name: _entry(table, split, content) for split in unseen},
        "server": {},
    }
    record.check_disjoint(manifest)
    mean, std = pixels.mean_and_std()
    return Federation(
        "labeled",
        tuple(clients),
        table.classes,
        prepare.shape,
        mean,
        std,
        tuple(
            ClientData(split.share.name, Sizes(0, 0, len(split.test)), partial(_load, table, prepare, split))
            for split in unseen
        ),
        None,
        (*_notes(table, prepare, splits, content, data.image_size), *notes.of_contrast(pixels)),
        manifest,
        record.digest(manifest),
        inputs=prepare.inputs,
    )


def _notes(
    table: DataSet, prepare: Preparation, splits: list[_ClientSplit], content: record.ImageHashes, size: int
) -> tuple[str, ...]:
    """Return what the user should know about the clients and their images."""
    train = np.array([_counts(table, split.share.train) for split in splits])
    test = np.array([_counts(table, split.test) for split in splits])
    return (
        *table.notes,
        *notes.of_clients(len(splits)),
        *notes.of_classes([split.share.name for split in splits], table.classes, train, test),
        *notes.of_kinds([table.images]),
        *notes.of_resizing([table.images], size),
        *notes.of_twins(content.twins(), prepare.inputs),
    )


def trained_on(data: LabeledData) -> list[torch.Tensor]:
    """Return the images for the mean and the deviation of a client: training images and holdout."""
    return [data.train.images] if data.holdout is data.test else [data.train.images, data.holdout.images]


def _unseen(share: Share) -> _ClientSplit:
    """Return the split of a client that is only measured."""
    assert share.test is not None
    return _ClientSplit(share, share.test, share.train, share.train[:0])


def _split(
    table: DataSet, shares: tuple[Share, ...], data: Data, seed: int, *, one_class: bool
) -> list[_ClientSplit]:
    """Take a test split where there is none, then the holdout, client by client from one generator."""
    generator = torch.Generator().manual_seed(seed)
    share = data.test_per_client / (data.train_per_client + data.test_per_client)
    whole = []
    for client in shares:
        train, test = client.train, client.test
        if test is None:
            kept, chosen = _stratified(table.labels[train], share, generator)
            train, test = train[kept], train[chosen]
        whole.append(Share(client.name, train, test, client.angle, client.legacy_center))
        if len(train) == 0 or len(test) == 0:
            raise UserError(
                f"client {client.name!r}: {len(train)} training and {len(test)} test images; a client needs"
                " both"
            )
        if not one_class and len(np.unique(table.labels[train])) < 2:
            only = table.classes[table.labels[train[0]]]
            raise UserError(
                f"client {client.name!r}: all {len(train)} training images are of class {only!r}; a client"
                " needs two classes or more"
            )
    splits = []
    for client in whole:
        assert client.test is not None
        if data.legacy_holdout:
            splits.append(_ClientSplit(client, client.test, np.arange(len(client.train)), None))
            continue
        labels = table.labels[client.train]
        kept, held = _stratified(labels, max(data.holdout, 1 / len(labels)), generator)
        if len(np.unique(labels[kept])) < (1 if one_class else 2):
            left = f"holdout = {data.holdout} leaves {'no image' if one_class else 'fewer than two classes'}"
            raise UserError(
                f"client {client.name!r}: {left} of {len(labels)} training images; add images or lower it"
            )
        splits.append(_ClientSplit(client, client.test, kept, held))
    return splits


def _stratified(labels: Rows, share: float, generator: torch.Generator) -> tuple[Rows, Rows]:
    """Return the positions of the rest and of round(share * n) random images, the share of each class."""
    order = torch.randperm(len(labels), generator=generator)
    order = order[torch.from_numpy(labels)[order].argsort(stable=True)]
    # sorted by class, evenly spaced positions visit every class in proportion
    chosen = (torch.arange(len(labels) + 1, dtype=torch.float64) * share + 0.5).floor().diff() > 0
    return order[~chosen].numpy(), order[chosen].numpy()


def _load(table: DataSet, prepare: Preparation, client: _ClientSplit) -> LabeledData:
    """Read the images of one client."""

    def split(rows: Rows) -> Split:
        images = prepare(table.images, rows, client.share.angle, legacy_center=client.share.legacy_center)
        return Split(images, torch.from_numpy(table.labels[rows]))

    whole, test = split(client.share.train), split(client.test)

    def part(positions: Rows) -> Split:
        chosen = torch.from_numpy(positions)
        return Split(whole.images[chosen], whole.labels[chosen])

    if client.held is None:
        return LabeledData(whole, test, test)
    return LabeledData(part(client.kept), part(client.held), test)


def _entry(table: DataSet, client: _ClientSplit, content: record.ImageHashes) -> record.ManifestEntry:
    """Return the record of one client."""
    train, name, classes = client.share.train, client.share.name, len(table.classes)

    def of(rows: Rows, use: record.ImageUse, part: str = "") -> record.ManifestEntry:
        return content.entry(table.images, rows, table.labels[rows], f"{name}/{part or use}", use, classes)

    entry: record.ManifestEntry = {"angle": client.share.angle} if client.share.angle else {}
    if len(train):
        entry["train"] = of(train[client.kept], "train")
        entry["holdout"] = (
            of(client.test, "test", "holdout") if client.held is None else of(train[client.held], "holdout")
        )
    return entry | {"test": of(client.test, "test")}


def _counts(table: DataSet, rows: Rows) -> Rows:
    return np.bincount(table.labels[rows], minlength=len(table.classes))
