"""FedUL, its bi-objective extensions M1 and M2, and their baselines: one course of a run, arms as options.

Sources: Lu et al. 2022, "Federated Learning from Only Unlabeled Data with Class-Conditional-Sharing Clients" (FedUL);
Alzahrani 2024, "A Bi-Objective Optimization Approach for Enhancing FedUL" (M1, M2). docs/fedul.md says what they leave open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..engines.base import Option, Reply, Request
from .fedavg import FedAvg, Record


@dataclass(frozen=True)
class Arm:
    """What the clients minimise, and what the server then does with its labeled images."""

    objective: str | None
    """None: the clients do not train"""
    server: str = "none"
    """``none``; ``finetune`` the average; ``blend`` it with a model f' of its own; ``replace`` it by f'"""


ARMS = {
    "fedul": Arm("transition"),
    "fedul-m1": Arm("transition", "finetune"),
    "fedul-m2": Arm("transition", "blend"),
    "fedpl": Arm("pseudo"),
    "fedllp": Arm("proportions"),
    "fedllp-vat": Arm("smooth-proportions"),
    "fedavg-labeled": Arm("labels"),
    "fedavg-labeled-10": Arm("tenth"),
    "supervised": Arm(None, "replace"),
}
_EXPERT = ("values", "statistics", "exp_avg", "exp_avg_sq")


class FedUL(FedAvg):
    """The server's side of an arm on unlabeled sets.

    Args:
        server: what holds the server's labeled and validation images; takes requests like a client. None: it has neither.
        validation: whether it has validation images.
    """

    def __init__(self, *args: Any, server: Callable[[Request], Reply] | None, validation: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.role = ARMS[self.arm]
        self.server = server
        self.has_validation = validation
        self.expert = {"values": self.values.clone(), "statistics": self.statistics.clone()}
        """f', trained on the server's labeled images alone, and the state of its optimizer; from the same start as f"""
        self.expert_steps = 0
        self.outcome: dict[str, float | None] = {"aggregate_accuracy": None, "validation_accuracy": None, "server_loss": None}
        """of the last round: validation accuracy before and after the server's step, and the loss of that step"""
        self.best: dict[str, torch.Tensor] = {}
        """the model with the best validation accuracy so far, with ``select = "validation"``"""
        self.best_accuracy = -1.0

    _plain = (*FedAvg._plain, "expert_steps", "outcome", "best_accuracy")

    # --- a turn ----------------------------------------------------------------------------------------------------

    def exchange(self, *, measure: bool, train: bool) -> list[Record]:
        """As FedAvg; the clients of ``supervised`` only measure."""
        if self.role.objective is not None:
            return super().exchange(measure=measure, train=train)
        records = super().exchange(measure=measure, train=False)
        if train:
            self.serve()
            self.train_loss = {"server": self.outcome["server_loss"] or 0.0}
        return records

    def request(self, client: str, *, measure: bool, train: bool) -> Request:
        """The model, and the name of the objective."""
        options: dict[str, Option] = {"seed": self.config.seed, "round": self.round, "evaluate": measure}
        if train and self.role.objective is not None:
            options |= {"train": self.role.objective, "epochs": self.config.local_epochs}
        return Request({"values": self.values, "statistics": self.statistics}, options)

    def add(self, reply: Reply) -> None:
        """Clients count alike, or by their images."""
        weight = reply.examples if self.config.client_weights == "examples" else 1.0
        self._mean_values.add(reply.tensors["values"], weight)
        self._mean_statistics.add(reply.tensors["statistics"], weight)

    def end_average(self) -> None:
        """The server's step follows the average."""
        super().end_average()
        self.serve()

    def record(self, reply: Reply) -> Record:
        """With what the server measured of the same model; null what takes test images, where a client has none."""
        return {"accuracy": None, "nll": None, "ece": None} | super().record(reply) | self.outcome

    def end_iteration(self, records: list[Record]) -> None:
        """The run is over: its model is the last one, or the best on validation."""
        if self.best:
            self.values, self.statistics = self.best["values"], self.best["statistics"]

    # --- the server's step -----------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Validate the average; fine-tune, blend or replace it; validate the result."""
        self.outcome["aggregate_accuracy"] = self.outcome["validation_accuracy"] = self.validate()
        if self.role.server != "none":
            if self.role.server == "finetune":
                reply = self.teach({"values": self.values, "statistics": self.statistics}, keep=False)
                self.values, self.statistics = reply.tensors["values"].clone(), reply.tensors["statistics"].clone()
            else:
                self.train_expert()
                h = 1.0 if self.role.server == "replace" else self.config.h
                self.values = torch.lerp(self.values, self.expert["values"], h)  # exact at 0 and at 1
                self.statistics = torch.lerp(self.statistics, self.expert["statistics"], h)
                if self.config.resync and self.role.server == "blend":
                    self.expert, self.expert_steps = {"values": self.values.clone(), "statistics": self.statistics.clone()}, 0
            self.outcome["validation_accuracy"] = self.validate()
        accuracy = self.outcome["validation_accuracy"]
        if self.config.select == "validation" and accuracy is not None and accuracy > self.best_accuracy:
            self.best_accuracy, self.best = accuracy, {"values": self.values, "statistics": self.statistics}

    def train_expert(self) -> None:
        """f' goes on from where it is, with its own optimizer."""
        reply = self.teach(self.expert, keep=True)
        self.expert = {name: reply.tensors[name].clone() for name in _EXPERT}

    def teach(self, tensors: dict[str, torch.Tensor], *, keep: bool) -> Reply:
        """Train a model on the server's labeled images."""
        assert self.server is not None
        options: dict[str, Option] = {"seed": self.config.seed, "round": self.round, "train": "labels", "epochs": self.config.server_epochs}
        reply = self.server(Request(tensors, options | {"keep": keep, "step": self.expert_steps}))
        if keep:
            self.expert_steps += int(reply.metrics["steps"])  # type: ignore[arg-type]
        self.outcome["server_loss"] = float(reply.metrics["train_loss"])  # type: ignore[arg-type]
        return reply

    def validate(self) -> float | None:
        """Accuracy of the present model on the server's validation images."""
        if self.server is None or not self.has_validation:
            return None
        reply = self.server(Request({"values": self.values, "statistics": self.statistics}, {"evaluate": True}))
        return float(reply.metrics["accuracy"])  # type: ignore[arg-type]

    # --- the state between two turns -------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Also f' with its optimizer, and the best model so far."""
        tensors, plain = super().state()
        if self.role.server in ("blend", "replace"):
            tensors |= {f"expert.{name}": tensor for name, tensor in self.expert.items()}
        return tensors | {f"best.{name}": tensor for name, tensor in self.best.items()}, plain

    def restore(self, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
        """The opposite of :meth:`state`."""
        super().restore(tensors, plain)
        device = self.values.device
        for prefix, where in (("expert.", self.expert), ("best.", self.best)):
            where |= {name.removeprefix(prefix): tensor.to(device) for name, tensor in tensors.items() if name.startswith(prefix)}
