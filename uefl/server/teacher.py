"""Train models on the labeled images of the server, and measure them on its validation images."""

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
from ..devices import gpus_of
from ..engines.base import Message
from ..privacy import uniform
from ..seeds import derive

if TYPE_CHECKING:
    from ..client.workspace import Workspace

SERVER = "server"
"""name of the server, for its seeds; no client may have this name"""


class Teacher:
    """Train and measure models with the images of the server and the resident network of an arm.

    Args:
        server: the images; at least one of ``labeled`` and ``validation`` exists.
        workspace: the resident network of the arm, and the device for the images.
    """

    def __init__(self, server: ServerData, workspace: Workspace) -> None:
        existing = server.labeled or server.validation
        assert existing is not None
        empty = Split(existing.images[:0], existing.labels[:0])
        validation = server.validation or empty
        data = on_device(LabeledData(server.labeled or empty, empty, validation), workspace.device)
        assert isinstance(data, LabeledData)
        self._data, self._workspace = data, workspace

    @classmethod
    def of(cls, server: ServerData | None, workspace: Workspace) -> Teacher | None:
        """Return a teacher, or None if the server has no images."""
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
        """Train a model on the labeled images, and return the mean loss.

        The trained tensors replace the tensors of the model in ``tensors``.

        Args:
            tensors: a state. The model has the names ``values`` and ``buffers`` after ``prefix``. The state
                of its optimizer, if any, has the names ``moment.NAME`` after ``prefix``.
            seed, round: determine the order of the batches and the dropout masks.
            epochs: number of epochs; None: the configured epochs or steps of a client.
            keep: store the state of the optimizer in ``tensors`` for the next call.
        """
        workspace, moment_prefix = self._workspace, f"{prefix}moment."
        work = self._work({name: tensors[f"{prefix}{name}"] for name in ("values", "buffers")}, seed, round)
        moments = {
            name.removeprefix(moment_prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(moment_prefix)
        }
        workspace.load(work.message)
        with torch.random.fork_rng(devices=gpus_of(workspace.device)):
            torch.manual_seed(derive(seed, "train", round, SERVER))
            algorithm = workspace.algorithm.bound(replace(workspace.context, seed=seed))
            outcome = fit(algorithm, work, loss=loss, epochs=epochs, moments=moments or None)
        tensors |= {f"{prefix}{name}": tensor.clone() for name, tensor in workspace.shared().items()}
        if keep:
            tensors |= {
                f"{moment_prefix}{name}": moment
                for name, moment in moments_of(outcome, workspace.flat).items()
            }
        return outcome.loss

    def recalibrated(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the ``buffers`` ``[Q]`` of a model with running statistics of the labeled images.

        The statistics are means over the batches. A batch with a single image is skipped. The parameters do
        not change.
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
        """Return the accuracy of a model on the validation images, or None if there are none."""
        validation = self._data.test  # the constructor puts them there
        if len(validation) == 0:
            return None
        work = self._work(tensors, 0, 0)
        self._workspace.load(work.message)
        return float(
            metrics.accuracy(
                evaluation.predict(self._workspace.algorithm, work, validation.images).probs,
                validation.labels,
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
