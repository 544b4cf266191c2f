"""Federated averaging, and the course of a run that the other algorithms share.

A run is a sequence of *turns*; a turn is one exchange with every client, in which the clients measure the model they are
sent and then train it. An iteration of R rounds takes R + 1 turns, the last of which only measures::

    turn 0: train        turn 1: measure, train        ...        turn R: measure, then decide on extensions

The state between two turns is all there is to a checkpoint.

Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..aggregation import WeightedMean, refusal
from ..config import Config
from ..engines.base import Engine, Option, Reply, Request
from ..errors import RunError

Record = dict[str, Any]
"""The metrics of one client after one round: one line of metrics.jsonl."""

_DIVERGED = 1e3  # times the first round's training loss: far beyond the swings of a run that learns


class FedAvg:
    """The server's side of federated averaging.

    Args:
        arm: name under which its metrics are recorded.
        config: the run's configuration.
        engine: where the clients are.
        values: ``[P]``, the initial parameters, flat.
        statistics: ``[Q]``, the initial running statistics, flat.
        notice: called with a line for the user when something worth knowing happens.
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
        self.arm = arm
        self.config = config
        self.engine = engine
        self.notice = notice
        self.values = values.detach().clone()
        self.statistics = statistics.detach().clone()
        self.iteration = 0
        self.trained = 0
        """rounds of this iteration that have been trained"""
        self.round = 0
        """rounds of the run that have been trained"""
        self.rejected = 0
        self.finished = False
        self.train_loss: dict[str, float] = {}
        """of the last round, by client"""
        self.first_loss: float | None = None

    _plain: tuple[str, ...] = ("iteration", "trained", "round", "rejected", "finished", "train_loss", "first_loss")

    # --- the course of a run ---------------------------------------------------------------------------------------

    def rounds_of(self, iteration: int) -> int | None:
        """Rounds of an iteration, None behind the last one."""
        plan = self.config.iterations()
        return plan[iteration] if iteration < len(plan) else None

    def turn(self) -> list[Record]:
        """One exchange with every client; returns the metrics of the round before it (none at the start of an iteration).

        Raises:
            RunError: fewer answers or sound updates than the quorum, or a model that has diverged.
        """
        measure = self.trained > 0
        last = self.trained == self.rounds_of(self.iteration)
        records = self.exchange(measure=measure, train=not last)
        if last:
            self.end_iteration(records)
            self.iteration += 1
            self.trained = 0
            self.finished = self.finished or self.rounds_of(self.iteration) is None
        else:
            self.trained += 1
            self.round += 1
        return records

    def exchange(self, *, measure: bool, train: bool) -> list[Record]:
        """Ask every client, average what they trained, return what they measured."""
        requests = {name: self.request(name, measure=measure, train=train) for name in self.engine.clients()}
        records: list[Record] = []
        losses: dict[str, float] = {}
        self.begin_average()
        for reply in self.engine.round(requests, self.config.deadline or None):
            if measure and reply.error is None:
                records.append(self.record(reply))
            reason = refusal(reply, requests[reply.client], self.config.max_update_norm) if train else reply.error
            if reason is not None:
                self.rejected += 1
                self.notice(f"round {self.round + train}: left out {reply.client}: {reason}")
            elif train:
                self.add(reply)
                losses[reply.client] = float(reply.metrics["train_loss"])  # type: ignore[arg-type]
        if measure:
            self._check_quorum(len(records), len(requests), "measured the model")
            self._check_course(records)
        if train:
            self._check_quorum(len(losses), len(requests), "sent a sound update")
            self.train_loss = losses
            self.end_average()
        return records

    def _check_quorum(self, answers: int, clients: int, what: str) -> None:
        needed = math.ceil(self.config.quorum * clients - 1e-9)  # 0.07 * 100 is a little more than 7
        if answers < needed:
            raise RunError(f"round {self.round + 1}: {answers} of {clients} clients {what}, the quorum is {needed}; the run stops here")

    def _check_course(self, records: list[Record]) -> None:
        """A model that has left all bounds is no result, even where its numbers are finite."""
        for record in records:
            for key, value in record.items():
                if isinstance(value, float) and not math.isfinite(value):
                    raise RunError(f"diverged: {key} of {record['client']} is {value} after round {self.round}; lower lr")
        loss = sum(self.train_loss.values()) / len(self.train_loss)
        self.first_loss = self.first_loss or loss
        if loss > _DIVERGED * max(self.first_loss, 1.0):
            raise RunError(f"diverged: the training loss is {loss:.3g} in round {self.round}, it began at {self.first_loss:.3g}; lower lr")

    def record(self, reply: Reply) -> Record:
        """The line of metrics.jsonl for one client."""
        place = {"arm": self.arm, "iteration": self.iteration, "round": self.round - 1, "client": reply.client}
        measured = {k: v for k, v in reply.metrics.items() if k != "train_loss"}
        return {
            **place,
            "perplexity": None,
            "perplexity_full": None,
            **measured,
            "train_loss": self.train_loss.get(reply.client),
            "codewords": 0,
            "extended": False,
        }

    # --- what an algorithm may change ------------------------------------------------------------------------------

    def request(self, client: str, *, measure: bool, train: bool) -> Request:
        """What one client is sent."""
        options: dict[str, Option] = {
            "seed": self.config.seed,
            "round": self.round,
            "evaluate": measure,
            "usage": not train,
            "train": train,
        }
        return Request({"values": self.values, "statistics": self.statistics}, options)

    def begin_average(self) -> None:
        """A round's updates are about to arrive."""
        self._mean_values, self._mean_statistics = WeightedMean(self.values), WeightedMean(self.statistics)

    def add(self, reply: Reply) -> None:
        """Add one sound update, by the number of examples it was trained on."""
        self._mean_values.add(reply.tensors["values"], reply.examples)
        self._mean_statistics.add(reply.tensors["statistics"], reply.examples)

    def end_average(self) -> None:
        """All updates have been added."""
        self.values, self.statistics = self._mean_values.result(), self._mean_statistics.result()

    def end_iteration(self, records: list[Record]) -> None:
        """The metrics after an iteration's last round are known."""

    def codebooks(self) -> dict[str, torch.Tensor]:
        """The codebook that each client sees, ``[V, d]``; empty for an arm without quantiser."""
        return {}

    # --- the state between two turns -------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors and plain values; with the configuration, all that is needed to go on."""
        plain = {key: getattr(self, key) for key in self._plain}
        return {"values": self.values, "statistics": self.statistics}, plain

    def restore(self, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
        """The opposite of :meth:`state`."""
        self.values, self.statistics = tensors["values"].to(self.values.device), tensors["statistics"].to(self.values.device)
        for key in self._plain:
            setattr(self, key, plain[key])
