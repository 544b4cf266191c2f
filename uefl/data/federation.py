"""A federation: the clients of a run, the images of the server, and facts about all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from ..errors import listed, one_line
from .inputs import IMAGES, Inputs

DataKind = Literal["labeled", "sets"]
"""``labeled``: every client has labeled images. ``sets``: every client has sets of unlabeled images, with the
class shares of each set."""


@dataclass(frozen=True)
class Split:
    """Images ``[N, C, H, W]`` uint8, or other :class:`uefl.data.inputs.Inputs`, and labels ``[N]`` int64."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def to(self, device: torch.device) -> Split:
        """Return the same split on another device."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class LabeledData:
    """The images of one client.

    The client trains on ``train``. Decisions use ``holdout``. ``test`` is only reported.

    A client of :attr:`Federation.unseen` is only measured, and has images only in ``test``.
    """

    train: Split
    """trained on"""
    holdout: Split
    """measured for the decisions of the server"""
    test: Split
    """measured only for the report"""


@dataclass(frozen=True)
class SetData:
    """The unlabeled sets of one client, with ``labels`` in experiments only, for labeled baselines."""

    images: torch.Tensor
    """``[n, C, H, W]`` uint8"""
    sets: torch.Tensor
    """``[n]`` int64, the set that each image is in"""
    priors: torch.Tensor
    """``[M, K]`` float64, class shares of each set"""
    labels: torch.Tensor | None = None
    """``[n]`` int64"""
    drawn: torch.Tensor | None = None
    """``[M, K]`` float64, the class weights that were drawn for each set; the shares of the set differ from
    these weights if a class had too few images"""
    test: Split | None = None
    """None: no accuracy is measured"""

    @property
    def sizes(self) -> torch.Tensor:
        """Return the number of images of each set, ``[M]`` int64."""
        return self.sets.bincount(minlength=len(self.priors))


@dataclass(frozen=True)
class Sizes:
    """Numbers of images of a client, where the images of sets count as ``train``."""

    train: int
    holdout: int
    test: int
    sets: tuple[int, ...] = ()
    """images of each set; empty for a client with labeled images"""

    @classmethod
    def of(cls, data: LabeledData | SetData) -> Sizes:
        """Return the sizes of data in memory."""
        if isinstance(data, LabeledData):
            return cls(len(data.train), len(data.holdout), len(data.test))
        return cls(len(data.images), 0, len(data.test or ()), tuple(data.sizes.tolist()))


@dataclass(frozen=True)
class ClientData:
    """One client: its name and sizes, and a function that reads its images."""

    name: str
    """name, unique in a federation"""
    sizes: Sizes
    """numbers of images, known without reading them"""
    load: Callable[[], LabeledData | SetData]
    """reads the data of this client from its source; the result is not kept"""

    @classmethod
    def of(cls, name: str, data: LabeledData | SetData) -> ClientData:
        """Return a client with data in memory."""
        return cls(name, Sizes.of(data), lambda: data)


@dataclass(frozen=True)
class ServerData:
    """Images of the server, or None for a kind without images."""

    labeled: Split | None
    """training images of the server"""
    validation: Split | None
    """images that measure the model of every round"""


@dataclass(frozen=True)
class Federation:
    """All clients of a run, of one kind, one image shape and one list of classes."""

    kind: DataKind
    """whether the clients have labeled images or sets of unlabeled ones"""
    clients: tuple[ClientData, ...]
    """clients that train"""
    classes: tuple[str, ...]
    """names of the classes; label k is ``classes[k]``"""
    shape: tuple[int, ...]
    """shape of one input, such as (C, H, W)"""
    mean: tuple[float, ...]
    """mean of each channel, on the scale 0-1, or of each column, over the inputs for training"""
    std: tuple[float, ...]
    unseen: tuple[ClientData, ...] = ()
    """clients that are measured and never train"""
    server: ServerData | None = None
    notes: tuple[str, ...] = ()
    """notes on the data for the user, each of one line"""
    manifest: dict[str, Any] = field(default_factory=dict)
    """plain values for JSON: the source, the partition, and the images of every client and split, with their
    SHA-256"""
    digest: str = ""
    """SHA-256 over all data for training and measuring"""
    here: bool = True
    """whether the images of the clients can be read in this process"""
    inputs: Inputs = IMAGES
    """the kind of the inputs in ``images`` of a split"""

    def __post_init__(self) -> None:
        """Keep notes printable, as names of files may have line ends and control characters."""
        object.__setattr__(self, "notes", tuple(map(one_line, self.notes)))

    @cached_property
    def by_name(self) -> dict[str, ClientData]:
        """Return every client, also the ones that are only measured, by name."""
        return {client.name: client for client in (*self.clients, *self.unseen)}

    def describe(self) -> str:
        """Return one line: clients, images, shape of an image, images of the server, classes."""
        shape = " x ".join(map(str, self.shape))
        train, holdout, test = (
            sum(getattr(client.sizes, part) for client in self.clients)
            for part in ("train", "holdout", "test")
        )
        texts = [f"{len(self.clients)} clients: "]
        if self.kind == "labeled":
            texts.append(f"{train} training, {holdout} holdout, {test} test {self.inputs.noun} of {shape}")
        else:
            sizes = [size for client in self.clients for size in client.sizes.sets]
            texts.append(
                f"{train} unlabeled {self.inputs.noun} of {shape} in {len(sizes)} sets of {min(sizes)} to"
                f" {max(sizes)}, {test or 'no'} test {self.inputs.noun}"
            )
        if self.unseen:
            texts.append(f"; not trained on: {listed(client.name for client in self.unseen)}")
        if self.kind == "sets" or self.server is not None:
            held = self.server or ServerData(None, None)
            counts = ", ".join(
                f"{len(part)} {what}"
                for part, what in ((held.labeled, "labeled"), (held.validation, "validation"))
                if part
            )
            texts.append(f"; the server: {counts or 'no'} {self.inputs.noun}")
        names = ", ".join(self.classes[:12]) + (", ..." if len(self.classes) > 12 else "")
        texts.append(f"; {len(self.classes)} classes: {names}")
        return "".join(texts)
