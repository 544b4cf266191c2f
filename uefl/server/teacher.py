"""What the server does with images of its own: it trains a model on the labeled ones, and measures one on those for validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.optim.swa_utils import update_bn

from .. import metrics
from ..client import evaluation
from ..client.client import on_device
from ..client.training import fit, moments_of
from ..client.work import Batch, Work
from ..data.federation import LabeledData, ServerData, Split
from ..engines.base import Message
from ..seeds import derive

if TYPE_CHECKING:
    from ..client.workspace import Workspace

SERVER = "server"
"""the name from which its seeds are derived; no client may have it"""


class Taught(NamedTuple):
    """A model after the server's training; copies."""

    tensors: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    """the state of its optimizer, to go on with"""
    loss: float


class Teacher:
    """The server's images on a device, and the resident network to use them with.

    Args:
        server: the images.
        workspace: of the arm.
    """

    def __init__(self, server: ServerData, workspace: Workspace) -> None:
        pattern = server.labeled or server.validation
        assert pattern is not None
        nothing = Split(pattern.images[:0], pattern.labels[:0])
        validation = server.validation or nothing
        data = on_device(LabeledData(server.labeled or nothing, nothing, validation), workspace.device)
        assert isinstance(data, LabeledData)
        self._data, self._workspace = data, workspace

    @classmethod
    def of(cls, server: ServerData | None, workspace: Workspace) -> Teacher | None:
        """None where the server has no images."""
        return cls(server, workspace) if server is not None and (server.labeled or server.validation) else None

    def train(
        self,
        tensors: dict[str, torch.Tensor],
        *,
        seed: int,
        round: int,
        epochs: int | None,
        moments: dict[str, torch.Tensor] | None = None,
        loss: Callable[[Work, Batch], torch.Tensor],
    ) -> Taught:
        """Train a model on the labeled images.

        Args:
            tensors: ``values`` and ``buffers``.
            seed, round: make the order of the batches and the dropout.
            epochs: passes over the images; None: the budget of a client, of the configuration.
            moments: the state of its optimizer, to go on; None: a fresh one.
            loss: the mean loss of a batch.
        """
        workspace, work = self._workspace, self._work(tensors, seed, round)
        workspace.load(work.message)
        device = workspace.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(derive(seed, "train", round, SERVER))
            algorithm = workspace.algorithm.bound(replace(workspace.context, seed=seed))
            outcome = fit(algorithm, work, loss=loss, epochs=epochs, moments=moments)
        after = {name: tensor.clone() for name, tensor in workspace.shared().items()}
        return Taught(after, moments_of(outcome, workspace.flat.values), outcome.loss)

    def recalibrated(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """``buffers`` of a model with running statistics as the labeled images have them, in the mean over batches; the parameters stay.

        A last batch of a single image is left out.
        """
        workspace, work = self._workspace, self._work(tensors, 0, 0)
        workspace.load(work.message)
        batches = (workspace.normalize(images) for images in work.train.images.split(work.training.batch_size) if len(images) > 1)
        with work.amp():
            update_bn(batches, work.net)
        return workspace.shared()["buffers"].clone()

    def accuracy(self, tensors: dict[str, torch.Tensor]) -> float | None:
        """Accuracy of a model on the validation images; None: there are none."""
        test = self._data.test
        if len(test) == 0:
            return None
        work = self._work(tensors, 0, 0)
        self._workspace.load(work.message)
        return float(metrics.accuracy(evaluation.predict(self._workspace.algorithm, work, test.images).probs, test.labels))

    def _work(self, tensors: dict[str, torch.Tensor], seed: int, round: int) -> Work:
        generator = torch.Generator().manual_seed(derive(seed, "own", round, SERVER))
        return Work(SERVER, self._data, self._workspace, Message(tensors), seed, round, generator)
