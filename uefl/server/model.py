"""One model of an arm on the server.

An ensemble has several such models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..aggregation import Rule, rejection
from ..algorithms.base import Record
from ..client.work import recorded
from ..client.workspace import Workspace, fresh
from ..engines.base import Message, Reply, magnitudes
from ..errors import RunError
from ..lazy import Lazy
from ..privacy import Privacy
from ..seeds import seeded
from .checks import blame, through_json
from .private import PrivateStates, StateFiles, Tensors
from .teacher import Teacher
from .turn import Turn

_NAME = re.compile("([0-9a-f]{32})?")
# In a round of training that does not diverge, the largest element grows by less than this factor.
_GROWTH = 1e3
# The same factors for outputs. Large logits make the loss of other clients large, and squares of large
# outputs of a layer overflow.
_OUTPUTS = {"logit": 1e4, "layer": 1e6}
# The outputs are computed for every update of a silo. Updates of simulated clients have only larger elements
# than these if they have diverged, or are false.
_ORDINARY = {"values": 2.0, "buffers": 1e6}


class ServerModel:
    """Call the algorithm for one model, and keep its state and the private states of its clients.

    Args:
        workspace: has the algorithm and creates the initial weights.
        seed: seed of the initial weights and of all random numbers.
        have_trained: clients with an accepted update; the server loop adds clients.
        clients_keep_states: whether each client stores its own private state. The server then knows only the
            name of the state.
    """

    def __init__(
        self,
        workspace: Workspace,
        seed: int,
        files: StateFiles,
        have_trained: set[str],
        clients_keep_states: bool,
    ) -> None:
        self._workspace, self._device = workspace, workspace.device
        self._clients_keep_states, self._have_trained = clients_keep_states, have_trained
        self.algorithm = workspace.algorithm.bound(replace(workspace.context, seed=seed))
        self._known = frozenset(workspace.context.clients)
        self._averages: dict[str, Any] = {}
        shared, start = workspace.initial(seed)
        with seeded(self._device, seed, "server", 0, 0, "server_state"):
            self.state = self.algorithm.server_state(shared["values"], shared["buffers"], workspace.net)
        self.state.tensors = {name: tensor.to(self._device) for name, tensor in self.state.tensors.items()}
        self._first_buffers = shared["buffers"]
        through_json(self.state)
        self.private = PrivateStates(files, workspace.context.clients, start, self._fresh, self._device)
        self.turn: Turn
        self._outputs: tuple[torch.Tensor, dict[str, float]] | None = None
        """the values of a model, and its extremes"""

    # --- a round, in order ---------------------------------------------------------------------------------

    def prepare(self, turn: Turn) -> None:
        """Begin a turn.

        The algorithm may exchange messages with the clients first.
        """
        self.turn = turn
        self.state.scratch.clear()
        with self._seeded("prepare"):
            self.algorithm.prepare(self.state, turn)

    def messages(self, measuring: frozenset[str], training: frozenset[str]) -> Lazy[Message]:
        """Return the message to each client, created on access."""
        turn, mean = self.turn, dict[str, torch.Tensor]()
        if measuring and self.algorithm.context.run.private_mean:
            mean = self.private.mean(self.algorithm, sorted(self._have_trained))

        def make(client: str) -> Message:
            measure = client in measuring
            return self._message(client, turn, client in training, measure, mean if measure else {})

        return Lazy(sorted(measuring | training), make)

    def _message(self, client: str, turn: Turn, train: bool, measure: bool, mean: Tensors) -> Message:
        with self._seeded("broadcast", client):
            message = self.algorithm.broadcast(self.state, client, replace(turn, train=train))
        message.options |= self.address(client) | {"evaluate": measure, "train": train}
        message.options["last"] = not turn.train
        if train and self.algorithm.context.run.personalized:
            message.options["personalized"] = True
        message.private = self.private_state(client, mean)
        if mean and client in self._known:
            message.private_mean = self._fresh(client) | mean
            if client not in self._have_trained:
                message.options["newcomer"] = True
        return message

    def address(self, client: str) -> dict[str, Any]:
        """Return the options that every message has."""
        options = {"seed": self.algorithm.context.seed, "round": self.turn.round}
        return options | ({"state": self.private.named.get(client, "")} if self._clients_keep_states else {})

    def private_state(self, client: str, mean: Tensors) -> Tensors:
        """Return the state to send: the client's own, or a new one for a client that is only measured."""
        if self._clients_keep_states:
            return {}
        if client in self._known:
            return self.private[client]
        return self.private.fresh(client) | (mean or self.private.start)

    def rejection(self, message: Message, reply: Reply) -> str | None:
        """Return why an update must not be averaged, or None if it is valid."""
        return (
            rejection(reply, message, self.algorithm.context.run.max_update_norm)
            or self._fault(message, reply)
            or self.fault_of_algorithm(message, reply)
        )

    def fault_of_algorithm(self, message: Message, reply: Reply) -> str | None:
        """Return why the algorithm rejects a reply that has all expected tensors, or None if it is valid."""
        return self.algorithm.rejection(
            replace(message, private={}, private_mean={}), replace(reply, private={})
        )

    def _fault(self, message: Message, reply: Reply) -> str | None:
        """Return why an updated model would overflow at other clients, or None if it is valid."""
        if not {"values", "buffers"} <= message.tensors.keys() & reply.tensors.keys():
            return None
        if message.tensors["values"].shape != reply.tensors["values"].shape:
            return None
        run = self.algorithm.context.run
        noisy = run.privacy == "local"  # noise may have any size
        tolerant = noisy or run.aggregation != "mean"  # a robust rule bounds the effect of one update
        large = self._clients_keep_states or any(
            reply.magnitudes[name] > _ORDINARY[name] for name in _ORDINARY
        )
        return (None if noisy else self._growth_of_elements(message, reply)) or self._growth_of_outputs(
            message, reply, predict=large and not tolerant
        )

    def _growth_of_elements(self, message: Message, reply: Reply) -> str | None:
        """Return which averaged tensor has an element that is too large, or None."""
        averaged = message.tensors.keys() & reply.tensors.keys() & self._averages.keys()
        for name in sorted(averaged - {"buffers"}):
            largest = reply.magnitudes[name]
            if largest <= _GROWTH:  # whatever the sent tensor has
                continue
            most = _GROWTH * max(magnitudes({"": message.tensors[name]})[""], 1.0)
            if largest > most:
                return (
                    f"{name} has an element of {largest:.3g}, more than {most:.3g}; if the model has"
                    " diverged, lower lr"
                )
        return None

    def _growth_of_outputs(self, message: Message, reply: Reply, predict: bool) -> str | None:
        """Return why the updated model is unusable, or which output for an input of noise is too large."""
        values, start = message.tensors["values"], self.private.start
        after = self._workspace.extremes(reply.tensors, start, predict)
        if (why := unusable(after)) is not None or not predict:
            return why
        if self._outputs is None or self._outputs[0] is not values:
            self._outputs = values, self._workspace.extremes(message.tensors, start)
        before = self._outputs[1]
        for what, growth in _OUTPUTS.items():
            if not after[what] <= growth * max(before[what], 1.0):  # NaN, too
                pair = f"{after[what]:.3g}, before the round {before[what]:.3g}"
                return (
                    f"with the updated values the largest output ({what}) is {pair}; if the model has"
                    " diverged, lower lr"
                )
        return None

    def begin_averages(self, rule: Rule | Privacy) -> None:
        """Create the averages of a round."""
        self._averages = rule.averages(self.algorithm, self.state)

    def add(self, rule: Rule | Privacy, reply: Reply) -> None:
        """Add a valid update, and keep the client's private state."""
        rule.add(self.algorithm, self.state, self._averages, replace(reply, private={}))
        self.keep(reply)

    def keep(self, reply: Reply) -> None:
        """Keep the private state of a client, or its name."""
        if not self._clients_keep_states:
            self.private.put(reply.client, reply.private)
        elif reply.states[0]:
            self.private.named[reply.client] = reply.states[0]

    def aggregate(self, rule: Rule | Privacy, arm: str, largest: Mapping[str, float], predict: bool) -> None:
        """Turn the averages into the new state.

        Args:
            largest: the largest element of each update, by client.
            predict: whether to test the new model on an image; the noise of differential privacy may spoil
                the prediction.

        Raises:
            RunError: the new state is not a model. The message names a client if its update is far larger
                than the others. The last checkpoint has the state of the round before.
        """
        rule.finish(self._averages, arm, self.turn.round)
        with self._seeded("aggregate"):
            self.algorithm.aggregate(self.state, self._averages)
        tensors = self.state.tensors
        bad = next((name for name, most in magnitudes(tensors).items() if not math.isfinite(most)), None)
        found = self._workspace.extremes(tensors, self.private.start, predict=predict)
        self._outputs = (tensors["values"], found) if predict else None
        why = f"{bad} is not finite" if bad else unusable(found)
        if why is not None:
            raise RunError(
                f"round {self.turn.round + 1}: the updates give no valid model ({why}); {blame(largest)}"
            )

    def end_round(self, teacher: Teacher | None) -> None:
        """Let the server train or measure with its own images."""
        with self._seeded("end_round"):
            self.algorithm.end_round(self.state, self.turn, teacher)
        if self.algorithm.context.model.frozen_batch_norm:  # the mean of equal statistics may be rounded
            self.state.tensors["buffers"] = self._first_buffers.clone()

    def end_iteration(self, records: list[Record]) -> bool:
        """Pass the metrics of an iteration to the algorithm, and return True to end the run."""
        with self._seeded("end_iteration"):
            return self.algorithm.end_iteration(self.state, records, self.turn)

    def record(self, client: str) -> Record:
        """Return the columns that the algorithm adds to a client's metrics."""
        columns = self.algorithm.record(self.state, client, self.turn)
        return recorded(columns, f"{type(self.algorithm).__name__}.record")

    # --- results -------------------------------------------------------------------------------------------

    def network(self, workspace: Workspace) -> tuple[Tensors, Lazy[Tensors]]:
        """Return the weights by name, with means of the private weights, and the tensors of each client."""
        model = self.state.model
        trained = sorted(self._have_trained)
        mean = (
            dict(self.private.start)
            if self._clients_keep_states
            else self.private.mean(self.algorithm, trained)
        )
        own = partial(self._own, workspace, workspace.private_names(), model, mean)
        return workspace.named(model, mean), Lazy(self.private, own)

    def _own(
        self, workspace: Workspace, names: Sequence[str], model: Tensors, mean: Tensors, client: str
    ) -> Tensors:
        """Return the tensors of one client in the saved model."""
        tensors = self.algorithm.client_tensors(self.state, client)
        if self._clients_keep_states:
            return tensors
        private = self.private[client]
        if client not in self._have_trained:
            private = private | mean
        weights = workspace.named(model, private) if names else {}
        mine = {name: tensor for name, tensor in private.items() if name in self.algorithm.private_predicts}
        return mine | {name: weights[name] for name in names} | tensors

    def plain(self) -> dict[str, Any]:
        """Return the values of the checkpoint other than tensors."""
        private = dict(self.private.named)
        return {"tensors": sorted(self.state.tensors), "plain": self.state.plain, "private": private}

    def restore(self, tensors: Mapping[str, torch.Tensor], plain: dict[str, Any]) -> None:
        """Restore the state from all tensors of a checkpoint and the result of :meth:`plain`."""
        self.state.tensors = {name: tensors[f"state.{name}"].to(self._device) for name in plain["tensors"]}
        self.state.plain = plain["plain"]
        self.private.named = dict(plain["private"])

    def _fresh(self, client: str) -> Tensors:
        return fresh(self.algorithm, client, self._device)

    def _seeded(self, *place: str) -> AbstractContextManager[None]:
        """Seed torch's generator for a method of the algorithm, by its place in the run."""
        turn = self.turn
        return seeded(
            self._device, self.algorithm.context.seed, "server", turn.iteration, turn.trained, *place
        )


def unusable(extremes: Mapping[str, float]) -> str | None:
    """Return why a model with these extremes is not valid, or None."""
    if extremes["variance"] < 0:
        return "a running variance is below 0"
    return None if math.isfinite(extremes.get("logit", 0.0)) else "its predictions are not finite"


def named_states(reply: Reply, members: int) -> bool:
    """Return True if a client that stores its own states names the state of every member."""
    return len(reply.states) == members and all(_NAME.fullmatch(name) for name in reply.states)


def silent(line: str) -> None:
    """Drop a line: the lines of all members except the first would repeat."""
