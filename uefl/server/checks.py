"""Checks of replies, of the quorum, of the course of training, and of the server's state."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..algorithms.base import Record, State
from ..client.evaluation import list_lengths
from ..client.work import ENTROPIES, OF_SERVER, RESERVED, SHARES, UNBOUNDED
from ..engines.base import Reply
from ..errors import RunError, one_line

_DIVERGED = 1e3  # factor of the first training loss: more than the variation in a run that learns
_OUTLIER = 100  # factor of the largest elements of the other updates
_LARGEST = 3.4028234663852886e38  # largest number in float32, so that sums stay finite
_ROUNDING = 1e-3
MOST = {
    **dict.fromkeys((*SHARES, "train_accuracy"), 1.0),
    "brier": 2.0,
    **dict.fromkeys((*UNBOUNDED, *ENTROPIES), math.inf),
}
"""upper bounds of the metrics of the framework, for any number of classes; all are at least 0"""
_LONGEST = 200  # most characters of a reason
_OWN = frozenset((*OF_SERVER, "server_loss"))
"""columns of metrics.jsonl that only the server fills"""
_OF_TRAINING = frozenset(("train_loss", "steps", "personalized_accuracy", "personalized_entropy"))
"""columns of the framework that the training of a client fills"""


def metrics_rejection(
    reply: Reply, classes: int, columns: Collection[str] = (), of_server: Collection[str] = ()
) -> str | None:
    """Return the reason to reject a reply as a whole.

    If the reply has no error and its metrics are possible values, return None.

    Args:
        columns: metrics of the algorithm that a report takes the mean of.
        of_server: metrics that only the server half of the algorithm computes.
    """
    if reply.error is not None:
        return reply.error
    own = _OWN.union(of_server)
    measured = (own | RESERVED) - _OF_TRAINING
    taken = sorted((own & reply.metrics.keys()) | (measured & reply.training.keys()))
    if taken:
        return f"it sends a metric called {taken[0]}"
    odd = next((name for name in (*reply.metrics, *reply.training) if not name.isprintable()), None)
    if odd is not None:
        return f"it sends a metric called {odd}"
    error = not_finite(reply.metrics) or out_of_range(reply.metrics | reply.training, classes)
    if error is not None:
        return error
    lengths = list_lengths(classes)
    for key in sorted(reply.metrics.keys() & RESERVED.union(columns)):
        value, length = reply.metrics[key], lengths.get(key)
        if length is not None and not (isinstance(value, list) and len(value) == length):
            return f"its {key} is not a list of {length} numbers"
        if isinstance(value, list) and length is not None and min(value, default=0) < 0:
            return f"its {key} has a number below 0"
        if length is None and isinstance(value, list):
            return f"its {key} is a list, expected one number"
    return None


def out_of_range(values: Mapping[str, Any], classes: float = math.inf) -> str | None:
    """Return the first metric with an impossible value, in words, or None if all are possible.

    Args:
        values: a number, a list of numbers, or None for each metric that :data:`MOST` bounds.
    """
    limits = MOST | dict.fromkeys(ENTROPIES, math.log(classes))
    for key, value in values.items():
        most = limits.get(key)
        if most is None or isinstance(value, (list, type(None))):
            continue
        if not -_ROUNDING <= value <= most + _ROUNDING:
            return f"its {key} is {value}, expected a number from 0 to {most:g}"  # any integer
    return None


def not_finite(values: Mapping[str, Any]) -> str | None:
    """Return the first number that is NaN, infinite or beyond float32, in words, or None without one."""
    for key, value in values.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, (int, float)) and not abs(number) <= _LARGEST:
                return f"its {key} is {number}; if the model has diverged, lower lr"
    return None


def printable(reason: str, most: int = _LONGEST) -> str:
    """Return a reason as one printable line of at most ``most`` characters.

    Clients choose some of the names in it.
    """
    line = one_line(reason[: most + 1])
    return line if len(line) <= most else f"{line[:most]}..."


def check_quorum(
    share: float, round: int, replies: int, clients: int, what: str, rejected: Sequence[str]
) -> None:
    """Stop the run if too few clients have replied.

    Args:
        share: the required share of the clients.
        round: counts from 1, for the message.
        what: the task of the clients, in the past tense.
        rejected: clients with a rejected reply, each with the reason.

    Raises:
        RunError: there are fewer replies than the quorum.
    """
    needed = math.ceil(share * clients - 1e-9)  # 0.07 * 100 is a little more than 7
    if replies < needed:
        why = f"{replies} of {clients} clients {what}, the quorum is {needed}; the run stops here"
        raise RunError(f"round {round}: {why}" + (f" ({rejected[0]})" if rejected else ""))


def blame(magnitudes: Mapping[str, float]) -> str:
    """Name the client with an update far larger than the others, in words.

    Without such an update, the model has diverged.

    Args:
        magnitudes: the largest element of each update, by client.
    """
    name = max(magnitudes, key=lambda client: magnitudes[client], default="")
    others = [largest for client, largest in magnitudes.items() if client != name]
    if others and magnitudes[name] > _OUTLIER * max(statistics.median(others), 1.0):
        return (
            f"{printable(name)} sent elements up to {magnitudes[name]:.3g}, the others' median is"
            f" {statistics.median(others):.3g}"
        )
    return "if the model has diverged, lower lr"


def check_course(
    records: Sequence[Record], last: Iterable[Record], first: float | None, round: int
) -> float | None:
    """Stop a run that has diverged, even while its numbers are finite.

    Args:
        last: training metrics of each client.
        first: what this function returned for the round before.

    Returns:
        The median training loss of the clients in the first round that has one.

    Raises:
        RunError: a number is not finite, or the median loss is far above the first median loss.
    """
    # the metrics of clients are finite, but columns of the server half of an algorithm may not be
    for record in records:
        error = not_finite(record)
        if error is not None:
            raise RunError(f"diverged after round {round}: {record['client']}: {error}")
    losses = [float(left["train_loss"]) for left in last if "train_loss" in left]
    losses = losses or [record["server_loss"] for record in records if record.get("server_loss") is not None]
    if not losses:
        return first
    loss = statistics.median_low(losses)  # up to half of the clients cannot end the run by a false loss
    first = first or loss
    if loss > _DIVERGED * max(first, 1.0):
        raise RunError(
            f"diverged: the training loss is {loss:.3g} in round {round}, it began at {first:.3g}; lower lr"
        )
    return first


def through_json(state: State) -> State:
    """Convert the plain values to JSON and back, so that their types do not depend on a checkpoint.

    Raises:
        TypeError: JSON does not support a value.
    """
    try:
        state.plain = json.loads(json.dumps(state.plain))
    except TypeError as error:
        raise TypeError(
            f"state.plain: {error}; it may have only values of JSON; tensors belong to state.tensors"
        ) from None
    return state
