"""Messages and replies as Flower's records: tensors as raw bytes with dtype and shape, everything else as JSON. Nothing is pickled."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from ..base import Expected, Message, Reply

Header = dict[str, Any]
Tensors = dict[str, torch.Tensor]

_PLAIN = ("client", "examples", "metrics", "error", "training")
"""fields of a reply that are no tensors"""
_STORED = "uefl.raw"
_DTYPES = {
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
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Unreadable(ValueError):
    """Records that are no message of ours, or a damaged one."""


def pack(header: Header, **parts: Mapping[str, torch.Tensor]) -> RecordDict:
    """Plain values and named groups of tensors as records.

    Args:
        header: what JSON holds, NaN and infinities included.
        parts: the order of the tensors is kept.
    """
    order = {part: list(tensors) for part, tensors in parts.items()}
    records = RecordDict({"header": ConfigRecord({"json": json.dumps(header | {"tensors": order})})})
    for part, tensors in parts.items():
        if tensors:
            records[part] = ArrayRecord({name: _array(tensor) for name, tensor in tensors.items()})
    return records


def unpack(records: RecordDict) -> tuple[Header, dict[str, Tensors]]:
    """The opposite of :func:`pack`; the tensors are on the CPU.

    Raises:
        Unreadable: the records do not hold what they say.
    """
    try:
        header = json.loads(str(records.config_records["header"]["json"]))
        order = header.pop("tensors")
        parts = {
            part: {name: _tensor(records.array_records[part][name]) for name in names} if names else {} for part, names in order.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None
    return header, parts


def pack_message(message: Message, header: Header) -> RecordDict:
    """A message; ``header`` says what else the receiver has to know."""
    expects = {name: [list(expected.shape), _NAMES[expected.dtype]] for name, expected in message.expects.items()}
    plain = header | {"options": message.options, "expects": expects}
    return pack(plain, broadcast=message.tensors, private=message.private, reference=message.reference)


def unpack_message(header: Header, parts: dict[str, Tensors]) -> Message:
    """The message in what :func:`unpack` gave.

    Raises:
        Unreadable: it is no message.
    """
    try:
        expects = {name: Expected(tuple(shape), _DTYPES[dtype]) for name, (shape, dtype) in header["expects"].items()}
        return Message(parts["broadcast"], header["options"], expects, parts["private"], parts["reference"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None


def pack_reply(reply: Reply) -> RecordDict:
    """A reply."""
    plain = {name: getattr(reply, name) for name in _PLAIN}
    return pack(plain, update=reply.tensors, private=reply.private)


def unpack_reply(records: RecordDict) -> Reply:
    """The opposite of :func:`pack_reply`.

    Raises:
        Unreadable: it is no reply, or one with values of other types than those of a reply.
    """
    header, parts = unpack(records)
    try:
        client, examples, metrics, error, training = (header[name] for name in _PLAIN)
        known = isinstance(client, str) and type(examples) is int and (error is None or isinstance(error, str))
        numbers = all(type(value) in (int, float) for value in training.values())
        if not known or not numbers or not all(_is_metric(value) for value in metrics.values()):
            raise TypeError("a value of another type than that of a reply")
        return Reply(client, examples, parts["update"], metrics, error, parts["private"], training)
    except (KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None


def _is_metric(value: Any) -> bool:
    """What a reply has in its metrics: a number, None where a measurement does not apply, or a list of numbers."""
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    return all(type(number) in (int, float) for number in numbers)


def _array(tensor: torch.Tensor) -> Array:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
    return Array(_NAMES[tensor.dtype], tuple(tensor.shape), _STORED, data)


def _tensor(array: Array) -> torch.Tensor:
    dtype, shape = _DTYPES.get(array.dtype), tuple(array.shape)
    if array.stype != _STORED or dtype is None or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"an array of {array.dtype[:20]} {list(shape)} stored as {array.stype[:20]}")
    if len(array.data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(array.data)} bytes for {dtype} {list(shape)}")
    if not array.data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=torch.uint8).view(dtype).reshape(shape)
