"""The inputs of an algorithm's client half in one turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..data.federation import LabeledData, SetData, Split
from ..engines.base import Message

if TYPE_CHECKING:
    from ..config import Training
    from .workspace import Workspace


SHARES = ("accuracy", "ece", "holdout_accuracy", "global_accuracy", "personalized_accuracy")
ENTROPIES = (
    *("entropy", "personalized_entropy", "entropy_deterministic", "mutual_info"),
    *("holdout_entropy", "holdout_entropy_se"),
)
UNBOUNDED = ("nll", "holdout_nll", "steps")
OF_SERVER = (
    *("arm", "iteration", "round", "client", "unseen", "reason", "epsilon", "tested"),
    *("bytes_sent", "bytes_received"),
)
_OTHERS = ("brier", "train_loss", "confusion", "reliability", "confidence")
RESERVED = frozenset((*SHARES, *ENTROPIES, *UNBOUNDED, *OF_SERVER, *_OTHERS))
"""columns of metrics.jsonl that the framework fills"""


def recorded(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the columns that an algorithm adds to the records of a client.

    Args:
        place: the method that returned them, for the message.

    Raises:
        ValueError: the framework itself fills a column of that name.
        TypeError: a value that metrics.jsonl cannot hold.
    """
    taken = sorted(RESERVED & values.keys())
    if taken:
        raise ValueError(f"{place}: uefl itself records {taken[0]!r}; choose another name")
    for name, value in values.items():
        if not isinstance(value, (int, float, str, list, dict, type(None))):
            raise TypeError(
                f"{place}: {name!r} is of type {type(value).__name__}; expected a number, a text, a list or a"
                " dict"
            )
    return dict(values)


class Batch(NamedTuple):
    """Training images, normalized ``[b, C, H, W]`` float32, and their positions.

    Positions ``[b]`` count in the client's data.
    """

    images: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    """``[b]`` int64; of unlabeled sets the set that each image is in"""


@dataclass
class Work:
    """One client's turn: its data, the network and the message.

    Methods of an algorithm can store values in it for later methods.
    """

    client: str
    data: LabeledData | SetData
    """on the device"""
    workspace: Workspace
    message: Message
    seed: int
    """seed of the run, or of one member of an ensemble"""
    round: int
    """rounds of the run before this one"""
    generator: torch.Generator
    """on the CPU, for draws of the algorithm's own: they change neither the order of the batches nor the
    dropout. Its seed is known to the server and to all clients: a draw that protects data is one of
    :meth:`own_draws`"""
    uniform: Callable[..., Any]
    """:func:`uefl.privacy.uniform` with the secret of this client"""
    private: dict[str, torch.Tensor] = field(default_factory=dict)
    """tensors of ``client_state``, with the changes of earlier turns"""
    trained: dict[str, torch.Tensor] = field(default_factory=dict)
    """leaves that are trained with the network; put there in ``before_round``"""
    rates: dict[str, float] = field(default_factory=dict)
    """learning rates of tensors in ``trained`` as multiples of the network's; put there in
    ``before_round``"""
    memory: dict[str, Any] = field(default_factory=dict)
    """any values that one method keeps for another one of the same turn"""
    metrics: dict[str, float] = field(default_factory=dict)
    """measurements of the training, such as the mean of a loss term; part of the client's metrics of the
    round"""
    _noted: dict[str, torch.Tensor] = field(default_factory=dict)
    counted: Counter[str] = field(default_factory=Counter)
    """images in each sum of :meth:`note`"""
    _means: dict[str, float] = field(default_factory=dict)
    _read: Counter[str] = field(default_factory=Counter)
    """:attr:`counted` when the means were read"""
    epochs: int = 0
    """epochs planned in this round"""
    epoch: int = 0
    """passes done"""
    step: int = 0
    """steps done in this round"""
    epoch_step: int = 0
    """steps done in this epoch"""

    @classmethod
    def of_saved_model(cls, net: nn.Module, tensors: Mapping[str, torch.Tensor], passes: int) -> Work:
        """Return a turn that only predicts, outside of a run.

        It has a network, one client's tensors, and a number of passes.
        """

        def no_draws(*place: object) -> None:
            raise TypeError("a saved model cannot draw from a client's secret")

        run = SimpleNamespace(uncertainty="dropout", passes=passes)
        workspace: Any = SimpleNamespace(net=net, context=SimpleNamespace(run=run), amp=nullcontext)
        data: Any = None
        message = Message(dict(tensors))
        return cls("", data, workspace, message, 0, 0, torch.Generator(), no_draws, private=dict(tensors))

    @property
    def net(self) -> nn.Module:
        """Return the resident network, with the parameters of this client."""
        return self.workspace.net

    @property
    def values(self) -> torch.Tensor:
        """Return all parameters of the network as one flat tensor ``[P]``.

        It is detached, and every step changes it.
        """
        return self.workspace.flat.values.detach()

    @property
    def training(self) -> Training:
        """Return the section of the configuration."""
        return self.workspace.context.training

    @property
    def passes(self) -> int:
        """Return the number of forward passes with dropout in a prediction, or 0 if dropout is off."""
        run = self.workspace.context.run
        return 0 if run.uncertainty == "ensemble" else run.passes

    @property
    def amp(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that makes the autocast context of a forward pass."""
        return self.workspace.amp

    @property
    def examples(self) -> int:
        """Return the number of training images of the client."""
        return len(self.train.labels)

    @property
    def train(self) -> Split:
        """Return the training images.

        For unlabeled sets, the labels are the numbers of the sets.
        """
        return (
            self.data.train if isinstance(self.data, LabeledData) else Split(self.data.images, self.data.sets)
        )

    @property
    def sets(self) -> SetData:
        """Return the data of a client with unlabeled sets."""
        assert isinstance(self.data, SetData)
        return self.data

    @property
    def test(self) -> Split | None:
        """Return the images that are measured on."""
        return self.data.test

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Run a forward pass, normalized ``[b, C, H, W]`` -> ``[b, classes]`` float32."""
        with self.amp():
            logits: torch.Tensor = self.net(images)
        return logits.float()

    def cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the batch mean in nats, a float32 scalar, for logits ``[b, classes]`` and labels ``[b]``.

        Also note ``train_accuracy``.
        """
        self.note("train_accuracy", (logits.argmax(1) == labels).float().mean(), len(labels))
        return nn.functional.cross_entropy(logits.float(), labels)

    def note(self, name: str, mean: torch.Tensor, images: int) -> None:
        """Add the mean over a batch, a scalar, to a metric that is the mean over the images of the round.

        Nothing waits for the device.
        """
        if name not in self._noted:
            self._noted[name] = torch.zeros_like(mean)
        # in place: a step that is replayed adds to the same tensor
        self._noted[name].add_(mean.detach(), alpha=images)
        self.counted[name] += images

    def noted(self) -> dict[str, float]:
        """Return the means of :meth:`note`."""
        if self.counted != self._read:
            self.read()
        return dict(self._means)

    def read(self, *scalars: torch.Tensor) -> list[float]:
        """Return scalars as numbers.

        The sums of :meth:`note` are read with them, so that the host waits for the device once.
        """
        sums = [scalar.double() for scalar in (*scalars, *self._noted.values())]
        numbers = torch.stack(sums).tolist() if sums else []
        totals = zip(self._noted, numbers[len(scalars) :], strict=True)
        self._means = {name: total / self.counted[name] for name, total in totals}
        self._read = self.counted.copy()
        return numbers[: len(scalars)]

    def model(self) -> dict[str, torch.Tensor]:
        """Return ``values`` and ``buffers`` as they are now, without the private tensors of the network."""
        return self.workspace.shared()

    def own_draws(self, count: int, *place: str | int, of: torch.Tensor | None = None) -> torch.Tensor:
        """Draw uniform numbers that only the owner of the client's secret can make again.

        These numbers are for draws that protect the client's data.

        The numbers do not depend on the round. Of all that the server chooses, they depend only on the
        arguments. So a repeated request reveals nothing new.

        Args:
            count: how many numbers.
            place: names the purpose.
            of: uint8 data; different data give different draws.

        Returns:
            ``[count]`` float64 in (0, 1), on the CPU.
        """
        data = b"" if of is None else of.cpu().contiguous().numpy().tobytes()
        return torch.from_numpy(self.uniform(data, count, "own", self.client, *place))

    def batch(self, positions: torch.Tensor) -> Batch:
        """Return the training images at these positions ``[b]``, augmented and normalized."""
        split = self.train
        return Batch(self.workspace.prepared(split.images[positions]), positions, split.labels[positions])
