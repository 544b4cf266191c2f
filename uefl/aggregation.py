"""Averages of client updates.

A running sum uses memory for one model. A robust rule keeps all updates of a round: clients x parameters, in
float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from .engines.base import Message, Reply
from .errors import UserError

if TYPE_CHECKING:
    from .algorithms.base import Algorithm, State
    from .config import RunSection

_MOST_EXAMPLES = 2**53  # float64 represents every integer up to this one
# largest element of an update; sums stay within float32 for any number of examples
LARGEST = 1e15


class Mean(Protocol):
    """A running average of tensors of one shape, of any floating type."""

    def add(self, x: torch.Tensor, weight: Any) -> None:
        """Add one client's tensor, which may be overwritten afterwards."""

    def result(self) -> torch.Tensor:
        """Return the average in float32, or the tensor of the round before if nothing was added."""
        ...


class WeightedMean:
    """Compute sum of w_k x_k over sum of w_k, adding clients one by one, or ``old`` without clients.

    The mean of equal values is this value without rounding, so that frozen weights stay as they are.
    """

    def __init__(self, old: torch.Tensor) -> None:
        self.old = old
        self._mean = torch.zeros_like(old, dtype=torch.float32)
        self._weight = 0.0

    def add(self, x: torch.Tensor, weight: float) -> None:
        """Add one client's tensor, which may be overwritten afterwards.

        Raises:
            ValueError: a weight that is not a number of 0 or more, which would make the average meaningless.
        """
        if not isinstance(weight, Real) or not 0 <= weight < math.inf:
            raise ValueError(
                f"the weight of an update: expected a number of 0 or more, got {weight!r}; see"
                " Algorithm.weight"
            )
        if weight > 0:
            self._weight += weight
            self._mean.lerp_(x.to(self._mean.dtype), weight / self._weight)

    def result(self) -> torch.Tensor:
        """Return the mean in float32."""
        return self._mean if self._weight > 0 else self.old


class Updates:
    """Keep all updates of one tensor without weights, which a client may invent, and apply a robust rule.

    ``median`` and ``trimmed_mean`` treat each element separately: they take the median over the clients, or
    the mean without the ``attackers`` smallest and largest values. :func:`choose` selects for ``krum``.

    Source: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
        definitions 1 and 2.
    """

    def __init__(self, old: torch.Tensor, rule: str, attackers: int) -> None:
        self._old, self._rule, self._attackers = old, rule, attackers
        self.tensors: list[torch.Tensor] = []
        """updates, in the order of :meth:`add`"""
        self.chosen = 0
        """index of the update that ``krum`` selects"""

    def add(self, x: torch.Tensor, weight: float) -> None:
        """Add one client's tensor, which may be overwritten afterwards, and ignore its weight."""
        self.tensors.append(x.detach().clone())

    def result(self) -> torch.Tensor:
        """Apply the rule and return the result in float32."""
        if not self.tensors:
            return self._old
        if len(self.tensors) == 1 or self._rule == "krum":
            return self.tensors[self.chosen].float()
        all_of_them = torch.stack(self.tensors).cpu().numpy()
        if self._rule == "median":
            found = np.median(all_of_them, axis=0)
        else:
            # imported here: the import takes half as long as torch's, and most runs do not need it
            from scipy.stats import trim_mean

            # add half a client, so that rounding does not trim one client too few
            found = trim_mean(all_of_them, (self._attackers + 0.5) / len(all_of_them), axis=0)
        return torch.as_tensor(found, dtype=torch.float32).to(self._old.device)


class Rule:
    """Aggregate the updates of a round by a rule that bears ``attackers``, or else by the averages."""

    def __init__(self, rule: str, attackers: int) -> None:
        self._rule, self._attackers = rule, attackers

    def averages(self, algorithm: Algorithm, state: State) -> dict[str, Any]:
        """Return the averages of a round, by tensor name."""
        return robust(algorithm.averages(state), self._rule, self._attackers)

    def add(self, algorithm: Algorithm, state: State, averages: dict[str, Any], update: Reply) -> None:
        """Add the valid update of a client."""
        algorithm.add(state, averages, update)

    def finish(self, averages: dict[str, Any], *place: str | int) -> None:
        """Finish after the last update of a round, at this place in the run."""
        if self._rule == "krum":
            choose(averages, self._attackers)


def robust(averages: Mapping[str, Mean], rule: str, attackers: int) -> dict[str, Mean]:
    """Replace every weighted mean by a robust rule, except for the rule ``mean``.

    Raises:
        TypeError: an average that is not a plain weighted mean.
    """
    if rule == "mean":
        return dict(averages)
    found: dict[str, Mean] = {}
    for name, mean in averages.items():
        if not isinstance(mean, WeightedMean):
            raise TypeError(
                f"the average of {name} is not a weighted mean, so {rule} cannot replace it; the algorithm"
                " must set plain_means = False"
            )
        found[name] = Updates(mean.old, rule, attackers)
    return found


def check_rule(run: RunSection, arm: str, plain_means: bool, clients: int) -> None:
    """Refuse a robust rule for an arm without ``plain_means``, which it would not protect.

    Raises:
        UserError: the algorithm takes more than weighted means, or a round may have too few clients.
    """
    if run.aggregation == "mean":
        return
    if not plain_means:
        raise UserError(
            f"key 'run.aggregation': {run.aggregation} does not protect arm {arm!r}, because it averages by"
            " other rules than weighted means; set 'mean', or choose another algorithm"
        )
    needed = {"median": 3, "trimmed_mean": 2 * run.attackers + 1, "krum": 2 * run.attackers + 3}[
        run.aggregation
    ]
    fewest = math.ceil(run.quorum * math.ceil(run.participation * clients - 1e-9) - 1e-9)
    if fewest < needed:
        raise UserError(
            f"key 'run.aggregation': {run.aggregation} against {run.attackers or 1} attackers needs {needed}"
            f" updates in every round, but quorum and participation allow a round with {fewest} of {clients}"
            " clients; raise quorum or participation, or lower 'run.attackers'"
        )


def choose(averages: Mapping[str, Mean], attackers: int) -> None:
    """Take all tensors from the client whose update is closest to its n - attackers - 2 nearest others.

    Distances are over all tensors that every client of the round has sent; others stay as they are.

    Source: Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent".
    """
    stacks = [mean for mean in averages.values() if isinstance(mean, Updates)]
    count = max((len(stack.tensors) for stack in stacks), default=0)
    whole = [stack for stack in stacks if len(stack.tensors) == count]
    if count < 2:
        return
    squares = torch.zeros(count, count, dtype=torch.float64)
    for stack in whole:
        for i, one in enumerate(stack.tensors):
            for j in range(i):
                squares[i, j] += float((one.double() - stack.tensors[j].double()).square().sum())
    squares = squares + squares.T
    near = squares.sort(1).values[:, 1 : count - attackers - 1]  # the first is the distance to itself
    chosen = int(near.sum(1).argmin())
    for stack in whole:
        stack.chosen = chosen


def rejection(reply: Reply, message: Message, max_norm: float, largest: float = LARGEST) -> str | None:
    """Return the reason to reject an update, or None if it has the tensors that the message expects.

    Args:
        max_norm: bound on the L2 distance between sent and returned tensors of the same name; 0: none.
        largest: bound on the absolute value of an element.
    """
    if reply.error is not None:
        return reply.error
    if not 1 <= reply.examples <= _MOST_EXAMPLES:
        return f"it claims {reply.examples} examples"
    loss = reply.training.get("train_loss")
    if isinstance(loss, float) and not math.isfinite(loss):
        return f"its training loss is {loss}"
    unasked = sorted(set(reply.tensors) - set(message.expects))
    if unasked:
        return f"it sends {unasked[0]}, which was not asked for"
    moved = 0.0
    for name, expected in message.expects.items():
        new = reply.tensors.get(name)
        if new is None:
            return f"{name} is missing"
        if new.dtype != expected.dtype or tuple(new.shape) != expected.shape:
            return f"{name} is {new.dtype} {list(new.shape)}, expected {expected}"
    for name in message.expects:
        new, found = reply.tensors[name], reply.magnitudes[name]
        if not math.isfinite(found):
            return f"{name} is not finite"
        if new.is_floating_point() and found > largest:
            return f"{name} has an element of {found:.3g}, more than {largest:g}"
        old = message.tensors.get(name)
        if max_norm > 0 and old is not None:
            received = new[tuple(map(slice, old.shape))]  # new rows have no sent value to differ from
            moved += float((received - old[tuple(map(slice, received.shape))]).double().square().sum())
    if moved**0.5 > max_norm > 0:
        return f"the update is {moved**0.5:.3g} long, more than max_update_norm = {max_norm:g}"
    for name, mine in message.private.items():
        kept = reply.private.get(name)
        if kept is None or kept.dtype != mine.dtype or kept.shape != mine.shape:
            return f"its private {name} is missing, or has another shape or type than before"
    for name, kept in reply.private.items():
        if name == "__metadata__" or not name.isprintable():  # a file of safetensors cannot hold it
            return f"it keeps a tensor with the name {name!r}"
        if not bool(torch.isfinite(kept).all()):
            return f"its private {name} is not finite"
    return None
