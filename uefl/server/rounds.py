"""The server loop of an arm: turns, quorum, records.

A *turn* is one exchange with the clients. They measure the model of their message; then the participants
of the round train it. An iteration of R rounds takes R + 1 turns::

    turn 0: train        turn 1: measure, train        ...        turn R: measure, end of the iteration

The messages of the members of an ensemble travel as one. The client measures the members together, so they
all decide by the same metrics. A checkpoint holds the state between two turns.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..aggregation import Rule, rejection
from ..algorithms.base import Record
from ..client.workspace import Workspace
from ..engines.base import Engine, Message, Reply, join, member, split
from ..engines.bounds import size_rejection
from ..lazy import Lazy
from ..privacy import Privacy
from .checks import check_course, check_quorum, metrics_rejection, not_finite, printable, through_json
from .model import ServerModel, named_states, silent
from .participants import Participants
from .private import StateFiles, Tensors
from .teacher import Teacher
from .turn import Turn

_NO_NAME = "it does not name the private states that it keeps"
_PLAIN = ("iteration", "trained", "round", "finished", "last", "first_loss", "have_trained")


class ServerLoop:
    """The server's side of one arm.

    Args:
        workspace: has the algorithm and creates the initial weights.
        seeds: one for each member of an ensemble; a single one otherwise.
        engine: carries messages to all clients, also to clients that are only measured.
        folder: folder of the private states of the clients; it contains nothing else.
        teacher: has the server's images; None: there are none.
        clients_keep_states: whether clients store their own private states. The server then knows only the
            names of the states.
    """

    def __init__(
        self,
        name: str,
        workspace: Workspace,
        seeds: list[int],
        engine: Engine,
        folder: Path,
        teacher: Teacher | None = None,
        notice: Callable[[str], None] = silent,
        privacy: Privacy | None = None,
        clients_keep_states: bool = False,
    ) -> None:
        self.name, self.engine, self.teacher, self.notice = name, engine, teacher, notice
        self.context, self.privacy = workspace.context, privacy
        self._clients_keep_states = clients_keep_states
        self.run, self._device = workspace.context.run, workspace.device
        self.files = StateFiles(folder)
        self._known = frozenset(self.context.clients)
        self._have_trained: set[str] = set()
        self.members = [
            ServerModel(workspace, seed, self.files, self._have_trained, clients_keep_states)
            for seed in seeds
        ]
        self.algorithm = self.members[0].algorithm
        clients, seed = self.context.clients, self.context.seed
        central = privacy if privacy is not None and privacy.central else None
        self._rule = central or Rule(self.run.aggregation, self.run.attackers)
        self.participants = (
            Participants(clients, self.run.participation, seed, joins=self.run.joins)
            if central is None
            else central.participants(clients, name)
        )
        self._evaluators = Participants(clients, self.run.evaluation, seed, "evaluators", self.run.joins)
        self.iteration = 0
        self.trained = 0
        """rounds of this iteration that have been trained"""
        self.round = 0
        """rounds of the run that have been trained"""
        self.finished = False
        self.rejected: list[Record] = []
        """lines of metrics.jsonl, one for each rejected reply; whoever writes them clears the list"""
        self.last: dict[str, dict[str, Any]] = {}
        """by client: training metrics and bytes of the last round"""
        self.first_loss: float | None = None
        self._sent, self._received = Counter[str](), Counter[str]()
        """bytes of this turn to and from each client"""
        self._asked = 0
        """exchanges of this turn that the algorithm started"""

    @property
    def have_trained(self) -> list[str]:
        """Return the clients with an accepted update, sorted."""
        return sorted(self._have_trained)

    @have_trained.setter
    def have_trained(self, clients: Iterable[str]) -> None:
        """Set the clients when a checkpoint is read."""
        self._have_trained.clear()
        self._have_trained.update(clients)

    # --- turns ---------------------------------------------------------------------------------------------

    def turn(self) -> list[Record]:
        """Run one turn, and return the metrics of the round before it.

        At the start of an iteration there are no metrics.

        Raises:
            RunError: fewer valid replies than the quorum, or a model that has diverged.
        """
        measure = self.trained > 0
        spent = self.privacy is not None and not self.privacy.affords(
            self.privacy.releases(self.participants, self.round + 1)
        )
        last = spent or self.trained == self.algorithm.rounds(self.iteration)
        records = self.exchange(measure=measure, train=not last)
        if last:
            measured = frozenset(self._evaluators.of(self.round))
            deciding = [record for record in records if record["client"] in measured]
            ended = [member.end_iteration(deciding) for member in self.members]
            self.iteration += 1
            self.trained = 0
            self.finished = ended[0] or self.algorithm.rounds(self.iteration) is None
            if spent and not self.finished:
                self.finished = True
                self.notice(
                    f"{self.name} ends after round {self.round}: one more would spend more than max_epsilon"
                )
        else:
            self.trained += 1
            self.round += 1
        for each in self.members:
            if self.finished:
                each.state.take_best()
            through_json(each.state)
        return records

    def exchange(self, *, measure: bool, train: bool) -> list[Record]:
        """Send the messages of a turn, average the updates, return the measurements.

        A client that trained in the round before and does not measure it gets a record without measurements.
        """
        trains = train and self.algorithm.trains_clients
        participants = self.participants.of(self.round) if trains else ()
        evaluators = self._evaluators.of(self.round) if measure else ()
        self._sent, self._received, self._asked = Counter(), Counter(), 0
        for each in self.members:
            each.prepare(self._turn(each, measure, train, participants))
        training, measuring = frozenset(participants), frozenset(evaluators)
        if measure:
            measuring |= {name for name in self.engine.clients() if name not in self._known}
        of_members = [each.messages(measuring, training) for each in self.members]
        messages = Lazy(of_members[0], lambda client: join([own[client] for own in of_members]))
        for each in self.members:
            each.begin_averages(self._rule)
        records: list[Record] = []
        trained: dict[str, dict[str, Any]] = {}
        reasons: list[str] = []
        magnitudes: dict[str, float] = {}
        for reply in self._replies(messages):
            name, message = reply.client, messages[reply.client]
            self._sent[name] += message.bytes
            self._received[name] += reply.bytes
            reason = size_rejection(reply, message) or self._metrics_rejection(reply)
            if reason is None and name in measuring:
                records.append(self._record(reply))
            if reason is None and name in training:
                reason = self._rejection(reply, message)
            if reason is not None:
                reason = self._reject(name, reason, measured=name not in training)
                reasons.append(f"{name}: {reason}")
            elif name in training:
                for each, replied in zip(self.members, self._member_replies(reply), strict=True):
                    each.add(self._rule, replied)
                trained[name] = dict(reply.training)
                magnitudes[name] = max(reply.magnitudes.values(), default=0.0)
        check = partial(check_quorum, self.run.quorum, self.round + 1, rejected=reasons)
        if measure:
            measured = self._known.intersection(record["client"] for record in records)
            check(len(measured), len(evaluators), "measured the model")
            self._keep_best(records)
            others = {*self.last, *(() if train else self._sent)} - measuring
            records += [self._record(Reply(name)) for name in others]
            records.sort(key=lambda record: record["client"])
            self.first_loss = check_course(records, self.last.values(), self.first_loss, self.round)
        if trains:
            check(len(trained), len(participants), "sent a valid update")
            for each in self.members:
                each.aggregate(self._rule, self.name, magnitudes, predict=self.privacy is None)
        if train:
            recorded = {record["client"] for record in records} - training
            self.last = {
                name: self._bytes(name) | trained.get(name, {}) for name in self._sent if name not in recorded
            }
            self._have_trained.update(trained)
            for each in self.members:
                each.end_round(self.teacher)
        return records

    def _keep_best(self, records: list[Record]) -> None:
        """Keep the measured model if its mean accuracy on the holdout images is the best one so far."""
        if self.run.select != "holdout":
            return
        trained = [record for record in records if not record.get("unseen")]
        scores = [score for record in trained if (score := record.get("holdout_accuracy")) is not None]
        if scores:
            for each in self.members:
                each.state.keep_best(statistics.fmean(scores))

    def _metrics_rejection(self, reply: Reply) -> str | None:
        """Return why the metrics of a reply are invalid, or None."""
        allowed = {*self.algorithm.columns, *self.run.metrics}
        return metrics_rejection(reply, len(self.context.classes), allowed, self.algorithm.server_columns)

    def _turn(self, each: ServerModel, measure: bool, train: bool, participants: tuple[str, ...]) -> Turn:
        """Return the turn of one member.

        Only the first member shows notices.
        """
        notice = self.notice if each is self.members[0] else silent
        place = (self.iteration, self.trained, self.round, measure, train, participants)
        return Turn(*place, notice, partial(self._ask, each))

    def _ask(self, each: ServerModel, messages: Mapping[str, Message]) -> Iterator[Reply]:
        """Run an exchange that the algorithm started, and count its bytes for the round."""
        self._asked += 1
        place = f"{self.iteration}/{self.trained}/{self._asked}"
        for client, message in messages.items():
            message.options |= each.address(client) | {"ask": place}
        self._sent.update({name: message.bytes for name, message in messages.items()})
        whole = Lazy(
            messages, lambda client: replace(messages[client], private=each.private_state(client, {}))
        )
        for reply in self._replies(whole):
            client, message = reply.client, whole[reply.client]
            self._received[client] += reply.bytes
            reason = (
                size_rejection(reply, message)
                or rejection(reply, message, 0.0, math.inf)
                or (None if self._names_states(reply, 1) else _NO_NAME)
                or each.fault_of_algorithm(message, reply)
            )
            if reason is not None:
                yield Reply(client, error=self._reject(client, reason))
                continue
            if client in self._known:
                before = {} if self._clients_keep_states else each.private[client]
                each.keep(reply)
                if any(
                    name not in before or not torch.equal(before[name], tensor)
                    for name, tensor in reply.private.items()
                ):
                    self._have_trained.add(client)  # from now on the client is measured with its own state
            yield replace(reply, private={})

    # --- replies -------------------------------------------------------------------------------------------

    def _replies(self, messages: Mapping[str, Message]) -> Iterator[Reply]:
        for reply in self.engine.round(messages, self.run.deadline or None):
            yield reply.to(self._device)

    def _member_replies(self, reply: Reply) -> list[Reply]:
        """Return the reply of each member."""
        if len(self.members) == 1:
            return [reply]
        return [
            replace(
                reply,
                tensors=member(reply.tensors, i),
                private=member(reply.private, i),
                states=reply.states[i : i + 1],
            )
            for i in range(len(self.members))
        ]

    def _rejection(self, reply: Reply, message: Message) -> str | None:
        """Return why an update is rejected, or None if the update of every member is valid.

        The models of all members are averages over the same clients.
        """
        # a tensor may name a member that does not exist
        for name in sorted(reply.tensors.keys() - message.expects.keys()):
            return f"it sends {name}, which was not asked for"
        if not self._names_states(reply, len(self.members)):
            return _NO_NAME
        reported = self.context.reported(reply)
        if reply.examples > reported:
            return f"it claims {reply.examples} examples, and reported {reported}"
        members = zip(self.members, split(message), self._member_replies(reply), strict=True)
        for i, (each, asked, replied) in enumerate(members):
            reason = each.rejection(asked, replied)
            if reason is not None:
                return reason if len(self.members) == 1 else f"member {i}: {reason}"
        return not_finite(reply.training)

    def _names_states(self, reply: Reply, members: int) -> bool:
        return not self._clients_keep_states or named_states(reply, members)

    def _reject(self, client: str, reason: str, measured: bool = False) -> str:
        """Count a rejected reply, tell the user, and return the reason in printable characters.

        A client that only ``measured`` measured the round before, so its rejection counts for that round.
        """
        reason, round = printable(reason), self.round - measured
        place = {"arm": self.name, "iteration": self.iteration, "round": round, "client": client}
        self.rejected.append(place | {"reason": reason})
        self.notice(f"round {round + 1}: rejected {client}: {reason}")
        return reason

    def _bytes(self, client: str) -> dict[str, int]:
        return {"bytes_sent": self._sent[client], "bytes_received": self._received[client]}

    def _record(self, reply: Reply) -> Record:
        """Return the line of metrics.jsonl for one client.

        The bytes of a training message count for the round that it trains. The bytes of a measuring message
        count for the round that it measures.
        """
        name, first = reply.client, self.members[0]
        left = {"train_loss": None, "bytes_sent": 0, "bytes_received": 0} | self.last.get(name, {})
        if name not in first.turn.participants:
            left |= {key: left[key] + moved for key, moved in self._bytes(name).items()}
        return {
            "arm": self.name,
            "iteration": self.iteration,
            "round": self.round - 1,
            "client": name,
            "accuracy": None,
            "nll": None,
            "ece": None,
            **reply.metrics,
            "entropy": reply.metrics.get("entropy"),
            **left,
            **({} if name in self._known else {"unseen": True}),
            **({"tested": self.context.tested.get(name, 0)} if self.run.metrics else {}),
            **({} if self.privacy is None else self.privacy.record(self.participants, self.round)),
            **first.record(name),
        }

    # --- results and checkpoints ---------------------------------------------------------------------------

    def networks(self, workspace: Workspace) -> list[tuple[Tensors, Lazy[Tensors]]]:
        """Return, for each member, the weights by name and the tensors of each client."""
        return [each.network(workspace) for each in self.members]

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Return tensors and plain values.

        The run can continue from these values, the configuration and the private files.
        """
        tensors = {
            f"{i}.state.{name}": tensor
            for i, each in enumerate(self.members)
            for name, tensor in each.state.tensors.items()
        }
        plain = {key: getattr(self, key) for key in _PLAIN}
        return tensors, plain | {"members": [each.plain() for each in self.members]}

    def restore(self, tensors: Tensors, plain: dict[str, Any]) -> None:
        """Take what :meth:`state` returned."""
        for key in _PLAIN:
            setattr(self, key, plain[key])
        for i, each in enumerate(self.members):
            each.restore(member(tensors, i), plain["members"][i])

    def named_files(self) -> set[str]:
        """Return the files of private states that :meth:`state` names."""
        return (
            set()
            if self._clients_keep_states
            else {name for each in self.members for name in each.private.named.values()}
        )
