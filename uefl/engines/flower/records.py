"""Packets as Flower's records: tensors as raw bytes with dtype and shape, everything else as JSON. Nothing is
pickled."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from .. import bounds, faults
from ..base import Reply
from ..codec import NAMES, Packet, Unreadable, from_raw, packed_reply, raw

_LOG = logging.getLogger("uefl.silo")
_STORED = "uefl.raw"


def pack(packet: Packet) -> RecordDict:
    """Pack a packet into records; JSON holds NaN and infinities too, and the order of the tensors is kept."""
    order = {part: list(tensors) for part, tensors in packet.parts.items()}
    records = RecordDict({"header": ConfigRecord({"json": json.dumps(packet.header | {"tensors": order})})})
    for part, tensors in packet.parts.items():
        if tensors:
            records[part] = ArrayRecord({name: _array(tensor) for name, tensor in tensors.items()})
    return records


def unpack(records: RecordDict) -> Packet:
    """Undo :func:`pack`; the tensors are on the CPU.

    Raises:
        Unreadable: the records do not match their description.
    """
    try:
        text = str(records.config_records["header"]["json"])
        if len(text) > bounds.HEADER:
            raise ValueError(f"a header of {len(text)} characters")
        header = json.loads(text)
        order = header.pop("tensors")
        parts = {part: _tensors(records, part, names) for part, names in order.items()}
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:  # the last of JSON that is nested without end
        raise Unreadable(f"{type(error).__name__}: {error}") from None
    return Packet(header, parts)


def on_records(program: Callable[[Packet | None], Packet]) -> Callable[[RecordDict], RecordDict]:
    """Adapt a program that answers packets to records; it receives None for unreadable records. It never
    raises."""

    def reply(records: RecordDict) -> RecordDict:
        try:
            packet = unpack(records)
        except Unreadable:
            packet = None
        found = program(packet)
        try:
            return pack(found)
        except Exception:  # a user's algorithm may put anything there
            _LOG.exception("a reply cannot be packed")
            return pack(packed_reply(Reply(str(found.header.get("client", "")), error=faults.PROGRAM)))

    return reply


def _array(tensor: torch.Tensor) -> Array:
    return Array(NAMES[tensor.dtype], tuple(tensor.shape), _STORED, raw(tensor).numpy().tobytes())


def _tensors(records: RecordDict, part: str, names: list[str]) -> dict[str, torch.Tensor]:
    found = records.array_records[part] if names else {}
    if len(names) != len(found):  # a tensor that is named again and again would be copied as often
        raise ValueError(f"{len(names)} names of {len(found)} tensors")
    return {name: _tensor(found[name]) for name in names}


def _tensor(array: Array) -> torch.Tensor:
    if array.stype != _STORED:
        raise ValueError(f"an array stored as {array.stype[:20]}")
    data = (
        torch.frombuffer(bytearray(array.data), dtype=torch.uint8)
        if array.data
        else torch.empty(0, dtype=torch.uint8)
    )
    return from_raw(array.dtype, tuple(array.shape), data)
