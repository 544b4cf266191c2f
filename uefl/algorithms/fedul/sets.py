"""Shared parts of the algorithms on unlabeled sets."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field

from ...aggregation import Mean
from ...client.work import Batch, Work
from ...data.federation import Federation
from ...engines.base import Reply
from ...errors import UnfitClient, UserError
from ...server.teacher import Teacher
from ...server.turn import Turn
from ...uncertainty import Prediction, without_spread
from .. import base
from ..base import Algorithm, Record, State


class SetParameters(base.Parameters):
    """Parameters of every algorithm on unlabeled sets."""

    client_weights: Literal["uniform", "examples"] = "uniform"
    """weights of the clients in the average"""
    global_step: float = Field(1.0, gt=0)
    """the server's step size: the model moves by this share of its distance to the clients' mean"""
    penalty: float = Field(0.0, ge=0)
    """weight of the sum of absolute parameters (in `fedpl`: weight decay of the optimizer), as published"""


class Labeled(SetParameters):
    """Parameters of algorithms with the proper or the published loss on labels."""

    loss: Literal["nll", "legacy_double_softmax"] = "nll"
    """`nll`: the proper loss; `legacy_double_softmax`: the published loss, which applies the softmax twice"""


class SetAlgorithm(Algorithm):
    """Average, penalize and validate models, and choose the model with the best validation."""

    Parameters: Any = SetParameters
    kind = "sets"
    static_step = True

    def check(self, federation: Federation, arm: str, net: torch.nn.Module) -> None:
        """Refuse a client with a single image, because a step needs two."""
        smallest = min(federation.clients, key=lambda client: client.sizes.train)
        if smallest.sizes.train < 2:
            why = f"has {smallest.sizes.train} image; batch norm needs two images or more in a step"
            raise UnfitClient(smallest.name, why)
        server = federation.server
        if self.context.run.select == "validation" and (server is None or server.validation is None):
            raise UserError(
                "run.select = 'validation' needs validation images of the server; add the folder validation"
                " (or set data.validation), or set select = 'last'"
            )

    @property
    def only_the_model(self) -> bool:
        """Return True, because :meth:`end_iteration` uses only the images of the server."""
        return self.plain_means

    def weight(self, update: Reply) -> float:
        """Weight clients equally, or by their numbers of images."""
        return update.examples if self.parameters.client_weights == "examples" else 1.0

    def regularize(self, work: Work, gradient: torch.Tensor) -> bool:
        """Add the gradient of the sum of absolute parameters."""
        if self.parameters.penalty == 0:
            return False
        torch.sign(work.values, out=gradient).mul_(self.parameters.penalty)
        return True

    def predict(self, work: Work, images: torch.Tensor) -> Prediction:
        """Predict in one pass with dropout off."""
        return without_spread(work.logits(images).softmax(1))

    # --- the server ----------------------------------------------------------------------------------------

    def aggregate(self, state: State, averages: dict[str, Mean]) -> None:
        """Set the model f to f + step (mean - f), and the running statistics to the mean."""
        sent = state.tensors["values"]
        super().aggregate(state, averages)
        state.tensors["values"] = torch.lerp(sent, state.tensors["values"], self.parameters.global_step)

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: torch.nn.Module) -> State:
        """Return the state of FedAvg and the server's last measurements."""
        state = super().server_state(values, buffers, net)
        outcome = {"aggregate_accuracy": None, "validation_accuracy": None, "server_loss": None}
        state.plain = {"outcome": outcome}
        return state

    def end_round(self, state: State, turn: Turn, server: Teacher | None) -> None:
        """Validate the average, take the server's step, validate the result, and keep the best."""
        outcome = state.plain["outcome"]
        outcome["aggregate_accuracy"] = outcome["validation_accuracy"] = _validated(state, server)
        if self.serve(state, turn, server):
            outcome["validation_accuracy"] = _validated(state, server)
        accuracy = outcome["validation_accuracy"]
        if self.context.run.select == "validation" and accuracy is not None:
            state.keep_best(accuracy)

    def serve(self, state: State, turn: Turn, server: Teacher | None) -> bool:
        """Train on the server's labeled images after the average, and return whether the model changed."""
        return False

    def record(self, state: State, client: str, turn: Turn) -> Record:
        """Return the server's measurements of the model."""
        return dict(state.plain["outcome"])

    def end_iteration(self, state: State, records: list[Record], turn: Turn) -> bool:
        """End the run after its only iteration."""
        return True


def labels_loss(work: Work, images: torch.Tensor, labels: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the cross-entropy of images ``[b, C, H, W]`` with their true labels ``[b]``, a scalar.

    With ``kind = "legacy_double_softmax"`` the softmax is taken twice, as in the published code.
    """
    logits = work.logits(images)
    return torch.nn.functional.cross_entropy(
        logits.softmax(1) if kind == "legacy_double_softmax" else logits, labels
    )


def needs_labeled(federation: Federation, arm: str) -> None:
    """Refuse a server without labeled images.

    Raises:
        UserError: the server has fewer than two labeled images.
    """
    labeled = federation.server.labeled if federation.server is not None else None
    if labeled is None or len(labeled) == 0:
        raise UserError(
            f"arm {arm!r} needs labeled images of the server; set data.labeled, or add the folder labeled, or"
            " omit the arm"
        )
    if len(labeled) < 2:
        raise UserError(
            f"arm {arm!r}: the server has 1 labeled image; batch norm needs two images or more in a step"
        )


def server_loss(kind: str) -> Any:
    """Return the loss of the server's batches."""

    def loss(work: Work, batch: Batch) -> torch.Tensor:
        return labels_loss(work, batch.images, batch.labels, kind)

    return loss


def _validated(state: State, server: Teacher | None) -> float | None:
    return None if server is None else server.accuracy(state.model)
