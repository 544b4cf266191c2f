"""A federation of any number of clients with generated images.

Images are generated when they are read, so they need no memory and no disk.

An image is the pattern of its class, plus half a pattern of its client, plus noise. The patterns of the
classes are the same in every run; all else follows from the seed of the run and the name of the client. Use
this source to try a federation of many devices with little data. The accuracy has no meaning for real images.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...errors import UserError
from ...seeds import derive
from .. import manifest as record
from ..dataset import DataSet, numbers
from ..federation import ClientData, Federation, LabeledData, Sizes, Split
from ..partitions.base import client_names, wanted_clients
from ..prepare import PixelCounts
from .base import source

if TYPE_CHECKING:
    from ..settings import Data

NAME = "generated"
_SHAPE = (1, 8, 8)
_CLASSES = 10
_CLIENT, _NOISE = 0.5, 0.5  # of the patterns of a class
_COUNTED = 32  # number of clients that give the mean and the deviation of the pixels for all


@source(NAME)
def generated(root: Path | None) -> DataSet:
    """Generate 1x8x8 images of ten classes when a client is read: for runs with thousands of clients.

    The images need no data root and no partition.
    """
    raise UserError(
        f"key 'source': {NAME!r} makes the images of each client and has no list of images to be dealt; leave"
        " out the partition"
    )


def federate(data: Data, seed: int) -> Federation:
    """Create clients ``client-0 ...`` with labeled images ``1 x 8 x 8`` of ten classes.

    Raises:
        UserError: the number of clients is missing.
    """
    names = client_names("client", wanted_clients(data))
    held = 0 if data.legacy_holdout else max(1, round(data.holdout * data.train_per_client))
    sizes = Sizes(data.train_per_client - held, held or data.test_per_client, data.test_per_client)
    clients = tuple(ClientData(name, sizes, partial(_load, data, held, seed, name)) for name in names)
    pixels = PixelCounts(_SHAPE[0])
    for client in clients[:_COUNTED]:
        pixels.add(_load(data, held, seed, client.name).train.images)
    mean, std = pixels.mean_and_std()
    classes = numbers(_CLASSES)
    manifest = {
        "schema": record.SCHEMA,
        "kind": "labeled",
        "source": {"name": NAME, "path": "", "images": {}},
        "partition": {"scheme": NAME},
        "seed": seed,
        "clients": len(names),
        "images_per_client": [sizes.train, sizes.holdout, sizes.test],
        "legacy_holdout": data.legacy_holdout,
        "classes": list(classes),
        "silos": {},
        "unseen": {},
        "server": {},
    }
    return Federation(
        "labeled", clients, classes, _SHAPE, mean, std, manifest=manifest, digest=record.digest(manifest)
    )


def _load(data: Data, held: int, seed: int, name: str) -> LabeledData:
    generator = torch.Generator().manual_seed(derive(seed, NAME, name))
    classes = torch.rand(_CLASSES, *_SHAPE, generator=torch.Generator().manual_seed(0))
    client = torch.rand(_SHAPE, generator=generator)

    def split(count: int) -> Split:
        labels = torch.randint(_CLASSES, (count,), generator=generator)
        noise = torch.rand(count, *_SHAPE, generator=generator)
        images = (classes[labels] + _CLIENT * client + _NOISE * noise) / (1 + _CLIENT + _NOISE)
        return Split((255 * images).to(torch.uint8), labels)

    train, holdout, test = split(data.train_per_client - held), split(held), split(data.test_per_client)
    return LabeledData(train, holdout if held else test, test)
