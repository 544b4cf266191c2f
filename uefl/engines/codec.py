"""Convert messages and replies to packets: plain values as JSON, and named groups of tensors as raw bytes.

There is no pickle.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch

from . import layout
from .base import Expected, Message, Reply

Header = dict[str, Any]
Tensors = dict[str, torch.Tensor]

_PLAIN = ("client", "examples", "metrics", "error", "training", "states")
"""fields of a reply that are not tensors"""
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in layout.SIZES}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Unreadable(ValueError):
    """A packet that is damaged, or not a message of this package."""


class Packet(NamedTuple):
    """A message or a reply, ready to be sent: plain values and named groups of tensors."""

    header: Header
    """values that JSON supports, also NaN and infinities"""
    parts: dict[str, Tensors]


def packed_message(message: Message, header: Header) -> Packet:
    """Pack a message; ``header`` holds everything else that the receiver has to know."""
    expects = {
        name: [list(expected.shape), NAMES[expected.dtype]] for name, expected in message.expects.items()
    }
    plain = header | {"options": message.options, "expects": expects}
    return Packet(
        plain, {"broadcast": message.tensors, "private": message.private, "reference": message.reference}
    )


def message_of(packet: Packet) -> Message:
    """Undo :func:`packed_message`.

    Raises:
        Unreadable: it is not a message.
    """
    header, parts = packet
    try:
        expects = {
            name: Expected(tuple(shape), DTYPES[dtype]) for name, (shape, dtype) in header["expects"].items()
        }
        return Message(parts["broadcast"], header["options"], expects, parts["private"], parts["reference"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None


def packed_reply(reply: Reply) -> Packet:
    """Pack a reply."""
    return Packet(
        {name: getattr(reply, name) for name in _PLAIN}, {"update": reply.tensors, "private": reply.private}
    )


def reply_of(packet: Packet) -> Reply:
    """Undo :func:`packed_reply`.

    Raises:
        Unreadable: the bytes hold no reply, or values of other types.
    """
    header, parts = packet
    try:
        client, examples, metrics, error, training, states = (header[name] for name in _PLAIN)
        known = (
            isinstance(client, str) and type(examples) is int and (error is None or isinstance(error, str))
        )
        numbers = all(type(value) in (int, float) for value in training.values())
        known = known and isinstance(states, list) and all(isinstance(state, str) for state in states)
        if not known or not numbers or not all(_is_metric(value) for value in metrics.values()):
            raise TypeError("a field of the reply has a wrong type")
        return Reply(client, examples, parts["update"], metrics, error, parts["private"], training, states)
    except (KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None


def _is_metric(value: Any) -> bool:
    """Return True for a value that a metric may have.

    This is a number, None if it was not measured, or a list of numbers.
    """
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    return all(type(number) in (int, float) for number in numbers)


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor; they share its memory if possible."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")


def from_raw(stored: layout.Stored) -> torch.Tensor:
    """Undo :func:`raw`; the tensor shares the memory of the bytes.

    Raises:
        ValueError: the bytes do not match such a tensor.
    """
    kind, shape, data = DTYPES[stored.dtype], stored.shape, stored.data
    if len(data) != layout.size_of(stored.dtype, shape):
        raise ValueError(f"{len(data)} bytes for {kind} {list(shape)}")
    try:
        return torch.frombuffer(data, dtype=kind).reshape(shape) if data else torch.empty(shape, dtype=kind)
    except (RuntimeError, TypeError):  # 0 elements in a shape that no tensor may have
        raise ValueError(f"an array of {len(shape)} dimensions, one of them too large") from None


def encode(packet: Packet) -> bytearray:
    """Encode a packet as a frame; see :mod:`uefl.engines.layout`."""
    tables = {
        part: [[name, NAMES[t.dtype], list(t.shape)] for name, t in group.items()]
        for part, group in packet.parts.items()
    }
    text = json.dumps(packet.header | {"tensors": tables}).encode()
    return layout.join(text, (raw(t) for group in packet.parts.values() for t in group.values()))


def decode(frame: bytearray) -> Packet:
    """Undo :func:`encode`; the tensors share the memory of the frame.

    Raises:
        Unreadable: the bytes are not a packet.
    """
    try:
        header = json.loads(layout.text_of(frame))
        groups = layout.tensors_of(frame, header.pop("tensors"))
        parts = {part: {one.name: from_raw(one) for one in group} for part, group in groups.items()}
    # json raises RecursionError, a RuntimeError, for deeply nested text
    except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None
    return Packet(header, parts)
