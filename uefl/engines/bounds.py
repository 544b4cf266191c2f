"""Limits of messages: larger than any algorithm needs, and small enough for the memory of a machine.

A larger message is rejected, with the reason.
"""

from __future__ import annotations

import math

from .base import Message, Reply, bytes_of
from .frames import HEADER

REPORT = 2**22
"""bytes of a silo's report before a run: sizes of 100,000 sets are less than one million"""
METRICS = 1000
"""metrics of a reply, or new tensors that a client keeps; algorithms have tens"""
NAME = 200
"""characters of the name of a metric or a private tensor, which goes into files and onto screens. Other
tensors must have the expected names"""
NUMBERS = 20_000
"""numbers in the lists of a reply: a confusion matrix of 100 classes has 10,000. The limit is higher if the
tensors of the message have more elements, because there may be a count for each row of a tensor"""
_KEPT = 4
"""most new private state of a client, as a multiple of the received tensors: optimizers keep two
values for each parameter"""
_MIB = 2**20


def size_rejection(reply: Reply, message: Message) -> str | None:
    """Return why a reply is too large for its message, or None if it is not."""
    metrics = len(reply.metrics) + len(reply.training)
    if metrics > METRICS:
        return f"it sends {metrics} metrics, more than {METRICS}"
    longest = max(map(len, (*reply.metrics, *reply.training, *reply.private)), default=0)
    if longest > NAME:
        return f"it sends a name of {longest} characters, more than {NAME}"
    numbers = sum(len(value) for value in reply.metrics.values() if isinstance(value, list))
    most = max(NUMBERS, sum(tensor.numel() for tensor in message.tensors.values()))
    if numbers > most:
        return f"it sends lists of {numbers} numbers, more than {most}"
    if len(reply.private) > len(message.private) + METRICS:
        return f"it keeps {len(reply.private)} private tensors; it had {len(message.private)}"
    kept, most = bytes_of(reply.private), _private(message)
    if kept > most:
        return f"it keeps {kept} bytes of private tensors, more than {most}"
    return None


def largest_reply(message: Message) -> int:
    """Return the most bytes that the reply to a message may have."""
    expected = sum(math.prod(one.shape) * one.dtype.itemsize for one in message.expects.values())
    return expected + _private(message) + HEADER


def _private(message: Message) -> int:
    """Return the bytes of private tensors that may come back."""
    return bytes_of(message.private) + _KEPT * message.bytes + _MIB
