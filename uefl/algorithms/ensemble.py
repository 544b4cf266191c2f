"""A deep ensemble: several federations side by side, each with a start and draws of its own, that extend the same clients.

A client gets all members in one request. It measures them together, as one model whose prediction is the mean of theirs, and
then trains each by itself. What the members share is the decision about extensions, which rests on the entropy of that mean.

Source: Lakshminarayanan et al. 2017, "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles"; Liu et al.,
arXiv 2402.18888, table 9: five members in the place of the dropout passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..engines.base import Reply, Request, join, member, number, split
from .course import Course, Network, Record
from .fedavg import FedAvg


class Ensemble(Course):
    """The server's side of all members.

    Args:
        members: at least one, of the same arm and on the same engine, with seeds of their own. The first one reports for all.
    """

    def __init__(self, members: Sequence[FedAvg]) -> None:
        self.members = list(members)
        first = self.members[0]
        super().__init__(first.arm, first.config, first.engine, first.notice)

    def prepare(self, *, train: bool) -> None:
        """Each member is where the ensemble is; its own new codewords come from its own features."""
        for algorithm in self.members:
            for key in ("iteration", "trained", "round", "train_loss"):
                setattr(algorithm, key, getattr(self, key))
            algorithm.prepare(train=train)

    def request(self, client: str, *, measure: bool, train: bool) -> Request:
        """The requests of all members as one."""
        return join([algorithm.request(client, measure=measure, train=train) for algorithm in self.members])

    def refusal(self, reply: Reply, request: Request) -> str | None:
        """An update is sound when that of every member is: no client may be in one member's average and not in another's."""
        if reply.error is not None:
            return reply.error
        for i, (algorithm, asked, answer) in enumerate(zip(self.members, split(request), self._parts(reply), strict=True)):
            reason = algorithm.refusal(answer, asked)
            if reason is not None:
                return f"member {i}: {reason}"
        return None

    def begin_average(self) -> None:
        """One average per member."""
        for algorithm in self.members:
            algorithm.begin_average()

    def add(self, reply: Reply) -> None:
        """Each member's part to its average."""
        for algorithm, part in zip(self.members, self._parts(reply), strict=True):
            algorithm.add(part)

    def end_average(self) -> None:
        """As each member does."""
        for algorithm in self.members:
            algorithm.end_average()

    def record(self, reply: Reply) -> Record:
        """Metrics of the ensemble; codewords are as many in every member."""
        return self.members[0].record(reply)

    def end_iteration(self, records: list[Record]) -> None:
        """All members decide by the same entropies, and so alike."""
        for algorithm in self.members:
            algorithm.end_iteration(records)
        self.finished = self.members[0].finished

    def networks(self) -> list[Network]:
        """Of every member."""
        return [network for algorithm in self.members for network in algorithm.networks()]

    def _parts(self, reply: Reply) -> list[Reply]:
        return [Reply(reply.client, reply.examples, member(reply.tensors, i)) for i in range(len(self.members))]

    # --- the state between two turns -------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Also that of every member."""
        tensors, plain = super().state()
        states = [algorithm.state() for algorithm in self.members]
        return tensors | number([own for own, _ in states]), plain | {"members": [own for _, own in states]}

    def restore(self, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
        """The opposite of :meth:`state`."""
        super().restore(tensors, plain)
        for i, (algorithm, own) in enumerate(zip(self.members, plain["members"], strict=True)):
            algorithm.restore(member(tensors, i), own)
