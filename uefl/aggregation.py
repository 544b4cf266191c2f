"""Averages of what clients send back, as running sums: memory does not grow with the number of clients."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from .engines.base import Message, Reply


class Mean(Protocol):
    """A running average."""

    def add(self, x: torch.Tensor, weight: Any) -> None:
        """Add one client's tensor; it may be overwritten afterwards."""

    def result(self) -> torch.Tensor:
        """The average; where nothing was added, what was there before the round."""
        ...


class WeightedMean:
    """sum of w_k x_k over sum of w_k, one client at a time, in the order in which they are added.

    Args:
        old: the tensor before the round, which stays where nothing is added.
    """

    def __init__(self, old: torch.Tensor) -> None:
        self._old = old
        self._sum = torch.zeros_like(old, dtype=torch.float32)
        self._weight = 0.0

    def add(self, x: torch.Tensor, weight: float) -> None:
        """Add one client's tensor; it may be overwritten afterwards."""
        self._sum.add_(x, alpha=weight)
        self._weight += weight

    def result(self) -> torch.Tensor:
        """The mean, float32."""
        return self._sum / self._weight if self._weight > 0 else self._old


def refusal(reply: Reply, message: Message, max_norm: float) -> str | None:
    """Why a client's update must not be averaged, or None when it is what the message expects.

    Args:
        reply: the client's reply to a message to train.
        message: what the client was sent.
        max_norm: bound on the L2 distance between what was sent and what came back under the same name; 0: none.
    """
    if reply.error is not None:
        return reply.error
    if not (math.isfinite(reply.examples) and reply.examples >= 1):
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
        if new.is_floating_point() and not bool(torch.isfinite(new).all()):
            return f"{name} is not finite"
        old = message.tensors.get(name)
        if max_norm > 0 and old is not None:
            part = new[tuple(map(slice, old.shape))]  # what grew is no distance
            moved += float((part - old).double().square().sum())
    if moved**0.5 > max_norm > 0:
        return f"the update is {moved**0.5:.3g} long, more than max_update_norm = {max_norm:g}"
    for name, mine in message.private.items():
        kept = reply.private.get(name)
        if kept is None or kept.dtype != mine.dtype or kept.shape != mine.shape:
            return f"its private {name} is missing, or of another shape or type than before"
    for name, kept in reply.private.items():
        if not bool(torch.isfinite(kept).all()):
            return f"its private {name} is not finite"
    return None
