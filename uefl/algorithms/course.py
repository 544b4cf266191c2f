"""The course of a run, which all algorithms share.

A run is a sequence of *turns*; a turn is one exchange with every client, in which the clients measure the model they are
sent and then train it. An iteration of R rounds takes R + 1 turns, the last of which only measures::

    turn 0: train        turn 1: measure, train        ...        turn R: measure, then decide on extensions

The state between two turns is all there is to a checkpoint.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..aggregation import refusal
from ..config import Config
from ..engines.base import Engine, Reply, Request
from ..errors import RunError

Record = dict[str, Any]
"""The metrics of one client after one round: one line of metrics.jsonl."""

_DIVERGED = 1e3  # times the first round's training loss: far beyond the swings of a run that learns


class Network(NamedTuple):
    """A trained model: flat parameters ``[P]`` and running statistics ``[Q]``, and the codebook ``[V, d]`` of each client."""

    values: torch.Tensor
    statistics: torch.Tensor
    codebooks: dict[str, torch.Tensor]


class Course(ABC):
    """The server's side of a run, without what is sent and averaged.

    Args:
        arm: name under which its metrics are recorded.
        config: the run's configuration.
        engine: where the clients are.
        notice: called with a line for the user when something worth knowing happens.
    """

    def __init__(self, arm: str, config: Config, engine: Engine, notice: Callable[[str], None] = lambda line: None) -> None:
        self.arm = arm
        self.config = config
        self.engine = engine
        self.notice = notice
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
        self.prepare(train=train)
        requests = {name: self.request(name, measure=measure, train=train) for name in self.engine.clients()}
        records: list[Record] = []
        losses: dict[str, float] = {}
        self.begin_average()
        for reply in self.engine.round(requests, self.config.deadline or None):
            if measure and reply.error is None:
                records.append(self.record(reply))
            reason = self.refusal(reply, requests[reply.client]) if train else reply.error
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

    # --- what an algorithm says ------------------------------------------------------------------------------------

    def prepare(self, *, train: bool) -> None:  # noqa: B027, most have nothing to do
        """What has to happen before the requests of an exchange can be made."""

    @abstractmethod
    def request(self, client: str, *, measure: bool, train: bool) -> Request:
        """What one client is sent."""

    def refusal(self, reply: Reply, request: Request) -> str | None:
        """Why an update must not be averaged, None when it is sound."""
        return refusal(reply, request, self.config.max_update_norm)

    @abstractmethod
    def begin_average(self) -> None:
        """A round's updates are about to arrive."""

    @abstractmethod
    def add(self, reply: Reply) -> None:
        """Add one sound update to the average."""

    @abstractmethod
    def end_average(self) -> None:
        """All updates have been added."""

    def end_iteration(self, records: list[Record]) -> None:  # noqa: B027
        """The metrics after an iteration's last round are known."""

    @abstractmethod
    def networks(self) -> list[Network]:
        """The trained model; of an ensemble, its members."""

    # --- the state between two turns -------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors and plain values; with the configuration, all that is needed to go on."""
        return {}, {key: getattr(self, key) for key in self._plain}

    def restore(self, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
        """The opposite of :meth:`state`."""
        for key in self._plain:
            setattr(self, key, plain[key])
