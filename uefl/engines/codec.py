"""Convert messages and replies to packets, and packets to frames.

There is no pickle. A frame has the length of its JSON, the JSON, and the tensors as raw bytes, each at a
multiple of 8 bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import faults
from .base import Expected, Message, Reply
from .frames import HEADER

Header = dict[str, Any]
Tensors = dict[str, torch.Tensor]

_PLAIN = ("client", "examples", "metrics", "error", "training", "states")
"""fields of a reply that are not tensors"""
_ALIGNED = 8  # bytes: the largest element, and the length of the JSON
_LISTS = 2**18  # most lists in a header, two for each tensor: an empty list takes 64 bytes of memory
_DIMENSIONS = 64  # most dimensions of a tensor of torch; a product of many more sizes takes minutes
_KINDS = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _KINDS.split()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Unreadable(ValueError):
    """A packet that is damaged, or not a message of this package."""


class Packet(NamedTuple):
    """A message or a reply, ready to be sent: plain values and named groups of tensors."""

    header: Header
    """values that JSON supports, also NaN and infinities"""
    groups: dict[str, Tensors]


def packed_message(message: Message, header: Header) -> Packet:
    """Pack a message.

    ``header`` holds all other facts for the receiver.
    """
    expects = {
        name: [list(expected.shape), NAMES[expected.dtype]] for name, expected in message.expects.items()
    }
    plain = header | {"options": message.options, "expects": expects}
    return Packet(
        plain,
        {"broadcast": message.tensors, "private": message.private, "private_mean": message.private_mean},
    )


def message_of(packet: Packet) -> Message:
    """Undo :func:`packed_message`, or raise Unreadable."""
    header, groups = packet
    try:
        expects = {
            name: Expected(tuple(shape), DTYPES[dtype]) for name, (shape, dtype) in header["expects"].items()
        }
        shared, private, mean = (groups[name] for name in ("broadcast", "private", "private_mean"))
        return Message(shared, header["options"], expects, private, mean)
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
    header, groups = packet
    try:
        client, examples, metrics, error, training, states = (header[name] for name in _PLAIN)
        # a metric is a number, None (not measured), or a list of numbers
        lists = [each if isinstance(each, list) else [each] for each in metrics.values() if each is not None]
        known = (
            isinstance(client, str)
            and type(examples) is int
            and (error is None or isinstance(error, str))
            and all(type(value) in (int, float) for value in training.values())
            and all(type(value) in (int, float) for values in lists for value in values)
            and isinstance(states, list)
            and all(isinstance(state, str) for state in states)
        )
        if not known:
            raise TypeError("a field of the reply has a wrong type")
        return Reply(client, examples, groups["update"], metrics, error, groups["private"], training, states)
    except (KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None


def received(packet: Packet, client: str) -> Reply:
    """Return the reply of a client.

    If there is no usable reply, the error of the returned reply is the reason.
    """
    try:
        reply = reply_of(packet)
    except Unreadable:
        return Reply(client, error=faults.NOT_READ)
    if reply.client != client:
        return Reply(client, error="the reply is of another client")
    return reply if reply.error is None else Reply(client, error=faults.describe(reply.error))


def encode(packet: Packet) -> bytearray:
    """Encode a packet as a frame."""
    tables = {
        group: [[name, NAMES[t.dtype], list(t.shape)] for name, t in tensors.items()]
        for group, tensors in packet.groups.items()
    }
    text = json.dumps(packet.header | {"tensors": tables}).encode()
    pieces: list[bytes | memoryview] = [len(text).to_bytes(_ALIGNED, "little"), text]
    pieces += [_raw(t) for group in packet.groups.values() for t in group.values()]
    return bytearray().join(aligned for piece in pieces for aligned in (piece, bytes(-len(piece) % _ALIGNED)))


def decode(frame: bytearray) -> Packet:
    """Undo :func:`encode`.

    The tensors share the memory of the frame.

    Raises:
        Unreadable: the bytes are not a packet.
    """
    length, place = int.from_bytes(frame[:_ALIGNED], "little"), _ALIGNED
    groups: dict[str, Tensors] = {}
    try:
        if length > HEADER:
            raise ValueError(f"a header of {length} bytes")
        text = frame[place : place + length]
        if text.count(b"[") + text.count(b"{") > _LISTS:
            raise ValueError(f"more than {_LISTS} lists")
        header = json.loads(text)
        place += _aligned(length)
        for group, table in header.pop("tensors").items():
            groups[group] = {}
            for name, dtype, shape in table:
                if not isinstance(name, str):
                    raise TypeError(f"a tensor has the name {name!r}")
                groups[group][name] = tensor = _tensor(frame, place, DTYPES[dtype], shape)
                place += _aligned(tensor.nbytes)
        if place != len(frame):
            raise ValueError(f"{len(frame)} bytes, and the header describes {place}")
    # json raises RecursionError, a RuntimeError, for deeply nested text
    except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None
    return Packet(header, groups)


def _raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, which share its memory if possible."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")


def _tensor(frame: bytearray, place: int, kind: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor that begins at a place of a frame, or raise any of the errors of a packet."""
    if len(shape) > _DIMENSIONS or min(shape, default=0) < 0:
        raise ValueError(f"a tensor of {len(shape)} dimensions, or of a negative size")
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(frame, dtype=kind, count=count, offset=place).reshape(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
