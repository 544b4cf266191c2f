"""The rounds of an arm.

A run is a sequence of *turns*; a turn is one exchange with every client, in which the clients measure the
model they are sent, and the participants of the round then train it. An iteration of R rounds takes R + 1
turns, the last of which only measures::

    turn 0: train        turn 1: measure, train        ...        turn R: measure, then the algorithm's end of an iteration

An ensemble is an arm whose algorithm stands there several times, each with a seed and a state of its own.
Their messages to a client travel as one; the client measures them together. They decide by the same metrics,
and so alike.

The state between two turns is all there is to a checkpoint.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..aggregation import Rule, magnitude, refusal
from ..algorithms.base import Algorithm, Record, State
from ..client.state import fresh
from ..client.work import recorded
from ..client.workspace import Workspace
from ..engines.base import Engine, Message, Reply, join, member, split
from ..engines.bounds import excess
from ..errors import RunError
from ..lazy import Lazy
from ..privacy import Privacy
from ..seeds import seeded
from .checks import blame, check_course, check_quorum, not_finite, printable, unsound, written
from .participants import Participants
from .private import PrivateStates, StateFiles, Tensors
from .teacher import Teacher
from .turn import Turn, silent

_NAME = re.compile("([0-9a-f]{32})?")
_NO_NAME = "it does not name the private states that it keeps"
# times the largest element of the model that was sent: no training does that in a round and stays finite
_SUSPICIOUS = 1e3
_PLAIN = ("iteration", "trained", "round", "finished", "last", "first_loss", "have_trained")


class Arm:
    """The server's side of one arm.

    Args:
        name: under which its metrics are recorded.
        workspace: has the algorithm, and makes the weights that each member begins with.
        seeds: of the members of an ensemble; one for a run without.
        engine: where the clients are, also those that are measured only.
        folder: where the private states of the clients are kept; nothing else is in it.
        teacher: the server's images; None: there are none.
        notice: called with a line for the user when something worth knowing happens.
        privacy: what hides the clients; None: nothing does.
        home: whether clients keep their private states themselves; then the server knows their names alone.
    """

    def __init__(
        self,
        name: str,
        workspace: Workspace,
        seeds: list[int],
        engine: Engine,
        folder: Path,
        teacher: Teacher | None = None,
        notice: Callable[[str], None] = lambda line: None,
        privacy: Privacy | None = None,
        home: bool = False,
    ) -> None:
        self.name, self.engine, self.teacher, self.notice, self.privacy = (
            name,
            engine,
            teacher,
            notice,
            privacy,
        )
        self.context, self._device = workspace.context, workspace.device
        self._workspace, self._home = workspace, home
        self.run = workspace.context.run
        self.members: list[Algorithm] = []
        self.states: list[State] = []
        self.files = StateFiles(folder)
        self.private: list[PrivateStates] = []
        """of each member, the private state of each client"""
        self._known = frozenset(self.context.clients)
        self._have_trained: set[str] = set()
        self.iteration = 0
        self.trained = 0
        """rounds of this iteration that have been trained"""
        for seed in seeds:
            algorithm = workspace.algorithm.bound(replace(self.context, seed=seed))
            shared, rest = workspace.initial(seed)
            self.members.append(algorithm)
            with self._seeded(algorithm, "server_state"):
                state = algorithm.server_state(shared["values"], shared["buffers"], workspace.net)
            state.tensors = {name: tensor.to(self._device) for name, tensor in state.tensors.items()}
            self.states.append(written(state))
            self.private.append(
                PrivateStates(
                    self.files, self.context.clients, rest, partial(self._fresh, algorithm), self._device
                )
            )
        central = privacy if privacy is not None and privacy.central else None
        self._rule = central or Rule(self.run.aggregation, self.run.attackers)
        drawn = Participants(self.context.clients, self.run.participation, self.context.seed)
        self.participants = drawn if central is None else central.participants(self.context.clients, name)
        self._evaluators = Participants(
            self.context.clients, self.run.evaluation, self.context.seed, "evaluators"
        )
        self.round = 0
        """rounds of the run that have been trained"""
        self.finished = False
        self.left_out: list[Record] = []
        """lines of metrics.jsonl, one for each answer that does not count; who writes them down empties the list"""
        self.last: dict[str, dict[str, Any]] = {}
        """of the last round, by client: the metrics of its training, and bytes"""
        self.first_loss: float | None = None
        self._sent, self._received = Counter[str](), Counter[str]()
        """bytes of this turn's messages to each client, and of its replies"""
        self._asked = 0
        """exchanges of this turn that the algorithm began itself"""

    @property
    def have_trained(self) -> list[str]:
        """Clients of which an update was taken, sorted."""
        return sorted(self._have_trained)

    @have_trained.setter
    def have_trained(self, clients: Iterable[str]) -> None:
        """Set them, when a checkpoint is read."""
        self._have_trained = set(clients)

    # --- turns ---------------------------------------------------------------------------------------------

    def turn(self) -> list[Record]:
        """One exchange with every client; returns the metrics of the round before it (none at the start of an
        iteration).

        Raises:
            RunError: fewer answers or sound updates than the quorum, or a model that has diverged.
        """
        measure = self.trained > 0
        spent = self.privacy is not None and not self.privacy.affords(
            self.privacy.releases(self.participants, self.round + 1)
        )
        last = spent or self.trained == self.members[0].rounds(self.iteration)
        records = self.exchange(measure=measure, train=not last)
        measured = frozenset(self._evaluators.of(self.round))
        if last:
            ended = []
            for algorithm, state, turn in self._each(measure, False, ()):
                with self._seeded(algorithm, "end_iteration"):
                    ended.append(
                        algorithm.end_iteration(state, [r for r in records if r["client"] in measured], turn)
                    )
            self.iteration += 1
            self.trained = 0
            self.finished = ended[0] or self.members[0].rounds(self.iteration) is None
            if spent and not self.finished:
                self.finished = True
                self.notice(
                    f"{self.name} ends after round {self.round}: one more would spend more than max_epsilon"
                )
        else:
            self.trained += 1
            self.round += 1
        for state in self.states:
            written(state)
        return records

    def exchange(self, *, measure: bool, train: bool) -> list[Record]:
        """Ask those that measure and those that train, average what they trained, return what they measured.

        A client that trained in the round before and does not measure its model has a record too, without
        measurements.
        """
        trains = train and self.members[0].trains_clients
        participants = self.participants.of(self.round) if trains else ()
        evaluators = self._evaluators.of(self.round) if measure else ()
        each = list(self._each(measure, train, participants))
        self._sent, self._received, self._asked = Counter(), Counter(), 0
        for algorithm, state, turn in each:
            state.scratch.clear()
            with self._seeded(algorithm, "prepare"):
                algorithm.prepare(state, turn)
        training, measuring = frozenset(participants), frozenset(evaluators)
        if measure:
            measuring |= {name for name in self.engine.clients() if name not in self._known}
        messages = self._messages(each, measuring, training)
        averages = [self._rule.averages(algorithm, state) for algorithm, state, _ in each]
        records: list[Record] = []
        trained: dict[str, dict[str, Any]] = {}
        refused: list[str] = []
        magnitudes: dict[str, float] = {}
        for reply in self._replies(messages):
            name, message = reply.client, messages[reply.client]
            self._sent[name] += message.bytes
            self._received[name] += reply.bytes
            error = excess(reply, message) or unsound(
                reply, len(self.context.classes), self.members[0].columns
            )
            if name in measuring and error is None:
                records.append(self._record(reply, each))
            reason = self._refused(reply, message) if error is None and name in training else error
            if reason is not None:
                reason = self._leave_out(name, reason, self.round - (name not in training))
                refused.append(f"{name}: {reason}")
            elif name in training:
                self._add(reply, averages)
                trained[name] = dict(reply.training)
                magnitudes[name] = max(map(magnitude, reply.tensors.values()), default=0.0)
        if measure:
            known = self._known.intersection(record["client"] for record in records)
            check_quorum(
                self.run.quorum, self.round + 1, len(known), len(evaluators), "measured the model", refused
            )
            others = {*self.last, *(() if train else self._sent)} - measuring
            records = sorted(
                [*records, *(self._record(Reply(name), each) for name in others)],
                key=lambda record: record["client"],
            )
            self.first_loss = check_course(records, self.last.values(), self.first_loss, self.round)
        if trains:
            check_quorum(
                self.run.quorum,
                self.round + 1,
                len(trained),
                len(participants),
                "sent a sound update",
                refused,
            )
            for i, ((algorithm, state, _), sums) in enumerate(zip(each, averages, strict=True)):
                self._rule.finish(sums, self.name, self.round)
                with self._seeded(algorithm, "aggregate"):
                    algorithm.aggregate(state, sums)
                self._check_state(i, magnitudes)
        if train:
            recorded = {record["client"] for record in records} - {*participants}
            self.last = {
                name: self._moved(name) | trained.get(name, {}) for name in self._sent if name not in recorded
            }
            self._have_trained.update(trained)
            for algorithm, state, turn in each:
                with self._seeded(algorithm, "end_round"):
                    algorithm.end_round(state, turn, self.teacher)
        return records

    def _each(
        self, measure: bool, train: bool, participants: tuple[str, ...]
    ) -> Iterator[tuple[Algorithm, State, Turn]]:
        """Every member with its state and its turn; the first one reports for all."""
        for i, (algorithm, state) in enumerate(zip(self.members, self.states, strict=True)):
            notice = self.notice if i == 0 else silent

            def ask(
                messages: Mapping[str, Message], algorithm: Algorithm = algorithm, i: int = i
            ) -> Iterator[Reply]:
                return self._ask(messages, algorithm, i)

            def leave_out(client: str, reason: str) -> None:
                self._leave_out(client, reason, self.round, "the answer of ")

            yield (
                algorithm,
                state,
                Turn(
                    self.iteration,
                    self.trained,
                    self.round,
                    measure,
                    train,
                    participants,
                    notice,
                    ask,
                    leave_out,
                ),
            )

    def _messages(
        self, each: list[tuple[Algorithm, State, Turn]], measuring: frozenset[str], training: frozenset[str]
    ) -> Lazy[Message]:
        """A message for every client that is asked, made when the engine or a check looks at it: it has the
        client's private state."""
        references: list[Tensors] = [{} for _ in each]
        if measuring and self.run.private_mean:
            references = [
                states.reference(algorithm, self.have_trained)
                for (algorithm, *_), states in zip(each, self.private, strict=True)
            ]

        def make(client: str) -> Message:
            parts, train, measure = [], client in training, client in measuring
            for i, (algorithm, state, turn) in enumerate(each):
                reference = references[i] if measure else {}
                with self._seeded(algorithm, "broadcast", client):
                    message = algorithm.broadcast(state, client, replace(turn, train=train))
                message.options |= self._options(i, measure, train, turn) | self._state(i, client)
                message.private = self._private(i, client, reference)
                if reference and client in self._known:
                    message.reference = self._fresh(algorithm, client) | reference
                    if client not in self._have_trained:
                        message.options["newcomer"] = True
                parts.append(message)
            return join(parts)

        return Lazy(sorted(measuring | training), make)

    def _options(self, i: int, measure: bool, train: bool, turn: Turn) -> dict[str, Any]:
        options = {
            "seed": self.members[i].context.seed,
            "round": self.round,
            "evaluate": measure,
            "last": not turn.train,
            "train": train,
        }
        return options | ({"personalised": True} if train and self.run.personalised else {})

    def _private(self, i: int, client: str, reference: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A client's own state; for a client that is only measured, a new state with the reference in it. At
        home it is the client's."""
        states = self.private[i]
        if self._home:
            return {}
        return states[client] if client in self._known else states.fresh(client) | (reference or states.start)

    def _state(self, i: int, client: str) -> dict[str, Any]:
        """The name of the state that a client has at home; it is empty at first."""
        return {"state": self.private[i].named.get(client, "")} if self._home else {}

    def _fresh(self, algorithm: Algorithm, client: str) -> dict[str, torch.Tensor]:
        return fresh(algorithm, client, self._device)

    def _seeded(self, algorithm: Algorithm, *place: str) -> AbstractContextManager[None]:
        """Seed torch's generator for a method of the server's half, by its place in the run."""
        return seeded(self._device, algorithm.context.seed, "server", self.iteration, self.trained, *place)

    def _ask(self, messages: Mapping[str, Message], algorithm: Algorithm, i: int) -> Iterator[Reply]:
        """An exchange that an algorithm begins itself; its bytes count with those of the round."""
        self._asked += 1
        place = f"{self.iteration}/{self.trained}/{self._asked}"
        for client, message in messages.items():
            message.options |= {
                "seed": algorithm.context.seed,
                "round": self.round,
                "ask": place,
                **self._state(i, client),
            }
        self._sent.update({name: message.bytes for name, message in messages.items()})
        whole = Lazy(messages, lambda client: replace(messages[client], private=self._private(i, client, {})))
        for reply in self._replies(whole):
            message = whole[reply.client]
            self._received[reply.client] += reply.bytes
            reason = (
                excess(reply, message)
                or refusal(reply, message, 0.0, math.inf)
                or (None if self._named(reply, 1) else _NO_NAME)
            )
            if reason is not None:
                yield Reply(
                    reply.client, error=self._leave_out(reply.client, reason, self.round, "the answer of ")
                )
                continue
            if reply.client in self._known and self._home:
                if reply.states[0]:
                    self.private[i].named[reply.client] = reply.states[0]
            elif reply.client in self._known:
                before = self.private[i][reply.client]
                self.private[i].put(reply.client, reply.private)
                if any(
                    name not in before or not torch.equal(before[name], tensor)
                    for name, tensor in reply.private.items()
                ):
                    self._have_trained.add(reply.client)  # what it is measured with is its own now
            yield replace(reply, private={})

    # --- replies -------------------------------------------------------------------------------------------

    def _replies(self, messages: Mapping[str, Message]) -> Iterator[Reply]:
        for reply in self.engine.round(messages, self.run.deadline or None):
            yield reply.to(self._device)

    def _parts(self, reply: Reply) -> list[Reply]:
        """A reply, member by member."""
        if len(self.members) == 1:
            return [reply]
        count = range(len(self.members))
        return [
            replace(reply, tensors=member(reply.tensors, i), private=member(reply.private, i)) for i in count
        ]

    def _refused(self, reply: Reply, message: Message) -> str | None:
        """An update is sound when that of every member is: no client may be in one member's average and not
        in another's."""
        # it may be under the number of no member
        for name in sorted(reply.tensors.keys() - message.expects.keys()):
            return f"it sends {name}, which was not asked for"
        if not self._named(reply, len(self.members)):
            return _NO_NAME
        reported = self.context.examples.get(reply.client, reply.examples)
        if reply.examples > reported:
            return f"it claims {reply.examples} examples, and reported {reported}"
        for i, (algorithm, asked, answer) in enumerate(
            zip(self.members, split(message), self._parts(reply), strict=True)
        ):
            reason = refusal(answer, asked, self.run.max_update_norm) or self._no_model(i, asked, answer)
            reason = reason or algorithm.unsound(
                replace(asked, private={}, reference={}), replace(answer, private={})
            )
            if reason is not None:
                return reason if len(self.members) == 1 else f"member {i}: {reason}"
        return not_finite(reply.training)

    def _no_model(self, i: int, asked: Message, answer: Reply) -> str | None:
        """Why an update is none of a model that can be averaged; its predictions are made where its elements
        are suspiciously large."""
        sent = (
            asked.tensors if {"values", "buffers"} <= asked.tensors.keys() & answer.tensors.keys() else None
        )
        if sent is None or sent["values"].shape != answer.tensors["values"].shape:
            return None
        suspicious = magnitude(answer.tensors["values"]) > _SUSPICIOUS * max(1.0, magnitude(sent["values"]))
        return self._workspace.fault(answer.tensors, self.private[i].start, predict=suspicious)

    def _check_state(self, i: int, magnitudes: Mapping[str, float]) -> None:
        """Stop where what the updates of a round made is no state to go on with: the last checkpoint is of
        the round before.

        What it predicts is not looked at where privacy has added noise to it: so much noise is no fault of an
        update.

        Args:
            i: number of the member.
            magnitudes: the largest element of each update, by client.

        Raises:
            RunError: it names a client only where its update is far larger than the others.
        """
        tensors = self.states[i].tensors
        bad = next((name for name, tensor in tensors.items() if not math.isfinite(magnitude(tensor))), None)
        why = (
            f"{bad} is not finite"
            if bad
            else self._workspace.fault(tensors, self.private[i].start, predict=self.privacy is None)
        )
        if why is not None:
            raise RunError(f"round {self.round + 1}: the updates make no model ({why}); {blame(magnitudes)}")

    def _leave_out(self, client: str, reason: str, round: int, what: str = "") -> str:
        """Count an answer that does not count, and tell the user; the reason as it can be shown."""
        reason = printable(reason)
        self.left_out.append(
            {
                "arm": self.name,
                "iteration": self.iteration,
                "round": round,
                "client": client,
                "left_out": reason,
            }
        )
        self.notice(f"round {round + 1}: left out {what}{client}: {reason}")
        return reason

    def _add(self, reply: Reply, averages: list[dict[str, Any]]) -> None:
        for i, part in enumerate(self._parts(reply)):
            self._rule.add(self.members[i], self.states[i], averages[i], replace(part, private={}))
            if not self._home:
                self.private[i].put(reply.client, part.private)
            elif reply.states[i]:
                self.private[i].named[reply.client] = reply.states[i]

    def _named(self, reply: Reply, members: int) -> bool:
        """Whether the reply of a client that keeps its states names one for each member, or has none to
        name."""
        return not self._home or (
            len(reply.states) == members and all(_NAME.fullmatch(name) for name in reply.states)
        )

    def _moved(self, client: str) -> dict[str, int]:
        """Bytes of this turn's messages to a client, and of its replies."""
        return {"bytes_sent": self._sent[client], "bytes_received": self._received[client]}

    def _record(self, reply: Reply, each: list[tuple[Algorithm, State, Turn]]) -> Record:
        """The line of metrics.jsonl for one client.

        A message that trains counts for the round that it trains, one that only measures for the round that
        it measures.
        """
        algorithm, state, turn = each[0]
        left = {"train_loss": None, "bytes_sent": 0, "bytes_received": 0} | self.last.get(reply.client, {})
        if reply.client not in turn.participants:
            left |= {name: left[name] + moved for name, moved in self._moved(reply.client).items()}
        known = reply.client in self._known
        place = {
            "arm": self.name,
            "iteration": self.iteration,
            "round": self.round - 1,
            "client": reply.client,
        }
        return {
            **place,
            "accuracy": None,
            "nll": None,
            "ece": None,
            **reply.metrics,
            "entropy": reply.metrics.get("entropy"),
            **left,
            **({} if known else {"unseen": True}),
            **({} if self.privacy is None else self.privacy.record(self.participants, self.round)),
            **recorded(algorithm.record(state, reply.client, turn), f"{type(algorithm).__name__}.record"),
        }

    # --- the result ----------------------------------------------------------------------------------------

    def networks(self, workspace: Workspace) -> list[tuple[Tensors, Lazy[Tensors]]]:
        """The weights of each member by name, private ones as the mean of the clients', and what belongs to
        each client."""
        names, networks = workspace.private_names(), []
        for i, (algorithm, state, private) in enumerate(
            zip(self.members, self.states, self.private, strict=True)
        ):
            model = {name: state.tensors[name] for name in ("values", "buffers")}
            reference = dict(private.start) if self._home else private.reference(algorithm, self.have_trained)
            own = Lazy(self.context.clients, partial(self._own, i, workspace, names, model, reference))
            networks.append((workspace.named(model, reference), own))
        return networks

    def _own(
        self, i: int, workspace: Workspace, names: list[str], model: Tensors, reference: Tensors, client: str
    ) -> Tensors:
        """What belongs to one client in the saved model of a member."""
        algorithm = self.members[i]
        if self._home:
            return algorithm.client_tensors(self.states[i], client)
        parts = self.private[i][client]
        if client not in self._have_trained:
            parts = parts | reference
        weights = workspace.named(model, parts) if names else {}
        mine = {name: tensor for name, tensor in parts.items() if name in algorithm.private_predicts}
        return (
            mine | {name: weights[name] for name in names} | algorithm.client_tensors(self.states[i], client)
        )

    # --- the state between two turns -----------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors and plain values; with the configuration and the files of the private states, all that is
        needed to go on."""
        tensors: dict[str, torch.Tensor] = {}
        members = []
        for i, (state, private) in enumerate(zip(self.states, self.private, strict=True)):
            tensors |= {f"{i}.state.{name}": tensor for name, tensor in state.tensors.items()}
            members.append(
                {"tensors": sorted(state.tensors), "plain": state.plain, "private": dict(private.named)}
            )
        return tensors, {key: getattr(self, key) for key in _PLAIN} | {"members": members}

    def restore(self, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
        """The opposite of :meth:`state`."""
        device = next(iter(self.states[0].tensors.values())).device
        for key in _PLAIN:
            setattr(self, key, plain[key])
        for i, own in enumerate(plain["members"]):
            self.states[i].tensors = {
                name: tensors[f"{i}.state.{name}"].to(device) for name in own["tensors"]
            }
            self.states[i].plain = own["plain"]
            self.private[i].named = dict(own["private"])

    def named_files(self) -> set[str]:
        """The files of private states that :meth:`state` names; there are none where clients keep them."""
        return set() if self._home else {name for states in self.private for name in states.named.values()}
