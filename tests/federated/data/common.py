"""Make federations for the tests of the data, and compare the images of their clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from uefl.data import Data, Federation, Split, build


def labeled(source="digits", *, seed=0, data_root=None, **keys) -> Federation:
    """Return a data set dealt to two clients or to one client per angle, or the user's own clients."""
    turned = {key: keys.pop(key) for key in ("angles", "legacy_center") if key in keys}
    if turned:
        keys["partition"] = {"scheme": "rotations", **turned}
    small = {"train_per_client": 20, "test_per_client": 10}
    data = Data.model_validate({"source": str(source), **small, **keys})
    return build(data, kind="labeled", seed=seed, data_root=data_root)


def sets(source="digits", *, seed=0, data_root=None, **keys) -> Federation:
    """Return unlabeled sets from keys of the partition or of the section."""
    of_partition = {
        key: keys.pop(key) for key in ("split", "sets", "overlap", "legacy_column_norm") if key in keys
    }
    if of_partition:
        keys["partition"] = {"scheme": "unlabeled", **of_partition}
    data = Data.model_validate({"source": str(source), **keys})
    return build(data, kind="sets", seed=seed, data_root=data_root)


@dataclass(frozen=True)
class Loaded:
    """A client with its images read."""

    name: str
    data: Any

    def __getattr__(self, key):
        """Return facts about the data."""
        return getattr(self.data, key)


def load(federation: Federation) -> list[Loaded]:
    """Read all clients."""
    return [Loaded(client.name, client.load()) for client in federation.clients]


def pairs(*splits: Split):
    """Return the images of the splits with their labels, sorted, so that the order does not matter."""
    return sorted(
        (image.numpy().tobytes(), int(label))
        for split in splits
        for image, label in zip(split.images, split.labels, strict=True)
    )


def whole(client):
    """Return all images of a client."""
    return pairs(client.train, client.holdout, client.test)


def same(a: Split, b: Split) -> bool:
    """Return True if two splits have the same bits."""
    return torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)


def split_of(table, rows) -> Split:
    """Return rows of a source in the order of the source."""
    return Split(table.images.read(rows, 0), torch.from_numpy(table.labels[rows]))


def both(table):
    """Return the training and the test part, in the order of the deal."""
    return split_of(table, table.train), split_of(table, table.test)


def splits(table, group):
    """Return the training and the test split of a client."""
    train, test = table.of_group(group)
    return split_of(table, train), None if test is None else split_of(table, test)
