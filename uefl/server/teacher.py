"""Train a model on the server's labeled images, and measure one on its validation images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.optim.swa_utils import update_bn

from uefl_kernels import metrics

from ..client import evaluation
from ..client.client import on_device
from ..client.training import fit, moments_of
from ..client.work import Batch, Work
from ..data.federation import LabeledData, ServerData, Split
from ..engines.base import Message
from ..privacy import uniform
from ..seeds import derive

if TYPE_CHECKING:
    from ..client.workspace import Workspace

SERVER = "server"
"""name that the server's seeds are derived from; no client may have it"""


class Teacher:
    """Hold the server's images on a device, and a resident network to use them with.

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
        """Return a teacher; None if the server has no images."""
        return (
            cls(server, workspace) if server is not None and (server.labeled or server.validation) else None
        )

    def train(
        self,
        tensors: dict[str, torch.Tensor],
        prefix: str = "",
        *,
        seed: int,
        round: int,
        epochs: int | None,
        loss: Callable[[Work, Batch], torch.Tensor],
        keep: bool = True,
    ) -> float:
        """Train a model of a state on the labeled images, in its place, and return the mean loss.

        Args:
            tensors: the state, with ``values`` and ``buffers`` of the model under names that begin with
                ``prefix``.
            prefix: also of ``moment.NAME``, where the state of its optimizer is kept from one call to the
                next.
            seed, round: make the order of the batches and the dropout.
            epochs: passes over the images; None: the budget of a client, of the configuration.
            loss: the mean loss of a batch.
            keep: False: every call makes a new optimizer.
        """
        workspace, of_optimizer = self._workspace, f"{prefix}moment."
        work = self._work({name: tensors[f"{prefix}{name}"] for name in ("values", "buffers")}, seed, round)
        moments = {
            name.removeprefix(of_optimizer): tensor
            for name, tensor in tensors.items()
            if name.startswith(of_optimizer)
        }
        workspace.load(work.message)
        device = workspace.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(derive(seed, "train", round, SERVER))
            algorithm = workspace.algorithm.bound(replace(workspace.context, seed=seed))
            outcome = fit(algorithm, work, loss=loss, epochs=epochs, moments=moments or None)
        tensors |= {f"{prefix}{name}": tensor.clone() for name, tensor in workspace.shared().items()}
        if keep:
            tensors |= {
                f"{of_optimizer}{name}": moment
                for name, moment in moments_of(outcome, workspace.flat).items()
            }
        return outcome.loss

    def recalibrated(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the ``buffers`` ``[Q]`` of a model with the running statistics of the labeled images, a mean
        over batches; the parameters stay.

        A last batch of a single image is left out.
        """
        workspace, work = self._workspace, self._work(tensors, 0, 0)
        workspace.load(work.message)
        batches = (
            workspace.normalize(images)
            for images in work.train.images.split(work.training.batch_size)
            if len(images) > 1
        )
        with work.amp():
            update_bn(batches, work.net)
        return workspace.shared()["buffers"].clone()

    def accuracy(self, tensors: dict[str, torch.Tensor]) -> float | None:
        """Return the accuracy of a model on the validation images; None: there are none."""
        test = self._data.test
        if len(test) == 0:
            return None
        work = self._work(tensors, 0, 0)
        self._workspace.load(work.message)
        return float(
            metrics.accuracy(
                evaluation.predict(self._workspace.algorithm, work, test.images).probs, test.labels
            )
        )

    def _work(self, tensors: dict[str, torch.Tensor], seed: int, round: int) -> Work:
        generator = torch.Generator().manual_seed(derive(seed, "own", round, SERVER))
        return Work(
            SERVER,
            self._data,
            self._workspace,
            Message(tensors),
            seed,
            round,
            generator,
            partial(uniform, b""),
        )
