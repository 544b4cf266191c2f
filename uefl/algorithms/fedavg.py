"""Federated averaging.

Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..aggregation import WeightedMean
from ..config import Config
from ..engines.base import Engine, Option, Reply, Request
from .course import Course, Network, Record

__all__ = ["FedAvg", "Record"]


class FedAvg(Course):
    """The server's side of federated averaging.

    Args:
        arm, config, engine, notice: see :class:`Course`.
        values: ``[P]``, the initial parameters, flat.
        statistics: ``[Q]``, the initial running statistics, flat.
    """

    def __init__(
        self,
        arm: str,
        config: Config,
        engine: Engine,
        values: torch.Tensor,
        statistics: torch.Tensor,
        notice: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(arm, config, engine, notice)
        self.values = values.detach().clone()
        self.statistics = statistics.detach().clone()

    def request(self, client: str, *, measure: bool, train: bool) -> Request:
        """The model, and what to do with it."""
        options: dict[str, Option] = {
            "seed": self.config.seed,
            "round": self.round,
            "evaluate": measure,
            "usage": not train,
            "train": train,
        }
        return Request({"values": self.values, "statistics": self.statistics}, options)

    def begin_average(self) -> None:
        """One average for the parameters, one for the running statistics."""
        self._mean_values, self._mean_statistics = WeightedMean(self.values), WeightedMean(self.statistics)

    def add(self, reply: Reply) -> None:
        """By the number of examples that the update was trained on."""
        self._mean_values.add(reply.tensors["values"], reply.examples)
        self._mean_statistics.add(reply.tensors["statistics"], reply.examples)

    def end_average(self) -> None:
        """The averages are the new model."""
        self.values, self.statistics = self._mean_values.result(), self._mean_statistics.result()

    def codebooks(self) -> dict[str, torch.Tensor]:
        """The codebook that each client sees, ``[V, d]``; empty for an arm without quantiser."""
        return {}

    def networks(self) -> list[Network]:
        """The one global model."""
        return [Network(self.values, self.statistics, self.codebooks())]

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Also the model."""
        tensors, plain = super().state()
        return tensors | {"values": self.values, "statistics": self.statistics}, plain

    def restore(self, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
        """The opposite of :meth:`state`."""
        super().restore(tensors, plain)
        self.values, self.statistics = tensors["values"].to(self.values.device), tensors["statistics"].to(self.values.device)
