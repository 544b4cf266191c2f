"""Messages and replies as packets: plain values that JSON holds, and named groups of tensors as raw bytes.
Nothing is pickled."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import torch

from .base import Expected, Message, Reply

Header = dict[str, Any]
Tensors = dict[str, torch.Tensor]

_PLAIN = ("client", "examples", "metrics", "error", "training", "states")
"""fields of a reply that are no tensors"""
_ALIGNED = 8  # bytes: the largest element
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Unreadable(ValueError):
    """A packet that is no message of ours, or a damaged one."""


class Packet(NamedTuple):
    """The messages."""

    header: Header
    """what JSON holds, NaN and infinities included"""
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
        Unreadable: it is no message.
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
            raise TypeError("a value of another type than that of a reply")
        return Reply(client, examples, parts["update"], metrics, error, parts["private"], training, states)
    except (KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None


def _is_metric(value: Any) -> bool:
    """Return the metrics of a reply: a number, None where a measurement does not apply, or a list of
    numbers."""
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    return all(type(number) in (int, float) for number in numbers)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, uint8 on the CPU; they share its memory if possible."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8)


def from_raw(dtype: str, shape: tuple[int, ...], data: torch.Tensor) -> torch.Tensor:
    """Undo :func:`raw`; the tensor shares the memory of the bytes.

    Raises:
        ValueError: the bytes do not match such a tensor.
    """
    kind = DTYPES.get(dtype)
    if kind is None or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"an array of {dtype[:20]} {list(shape)}")
    if len(data) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{len(data)} bytes for {kind} {list(shape)}")
    try:
        return data.view(kind).reshape(shape) if len(data) else torch.empty(shape, dtype=kind)
    except (RuntimeError, TypeError):  # 0 elements in a shape that no tensor may have
        raise ValueError(f"an array of {len(shape)} dimensions, one of them too large") from None


def encode(packet: Packet) -> torch.Tensor:
    """Encode a packet as uint8: the length of the JSON in 8 bytes, the JSON, and the tensors one after the
    other."""
    tensors = [(part, name, tensor) for part, group in packet.parts.items() for name, tensor in group.items()]
    table = {
        part: [[name, NAMES[t.dtype], list(t.shape)] for name, t in group.items()]
        for part, group in packet.parts.items()
    }
    text = bytearray(json.dumps(packet.header | {"tensors": table}).encode())
    pieces = [
        raw(torch.tensor(len(text))),
        torch.frombuffer(text, dtype=torch.uint8),
        *(raw(tensor) for *_, tensor in tensors),
    ]
    frame = torch.empty(sum(_aligned(len(piece)) for piece in pieces), dtype=torch.uint8)
    place = 0
    for piece in pieces:
        frame[place : place + len(piece)] = piece
        place += _aligned(len(piece))
    return frame


def decode(data: torch.Tensor | bytearray) -> Packet:
    """Undo :func:`encode`; the tensors share the memory of the data.

    Raises:
        Unreadable: the bytes are no packet.
    """
    try:
        frame = data if isinstance(data, torch.Tensor) else torch.frombuffer(data, dtype=torch.uint8)
        length = int(frame[:_ALIGNED].view(torch.int64))
        header = json.loads(bytes(frame[_ALIGNED : _ALIGNED + length].numpy()))
        place, parts = _ALIGNED + _aligned(length), {}
        for part, table in header.pop("tensors").items():
            group = parts[part] = dict[str, torch.Tensor]()
            for name, dtype, shape in table:
                if not isinstance(name, str):
                    raise TypeError(f"a tensor has the name {name!r}")
                size = math.prod(shape) * DTYPES[dtype].itemsize
                group[name] = from_raw(dtype, tuple(shape), frame[place : place + size])
                place += _aligned(size)
    except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:  # the first too of JSON
        raise Unreadable(f"{type(error).__name__}: {error}") from None  # that is nested without end
    return Packet(header, parts)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
