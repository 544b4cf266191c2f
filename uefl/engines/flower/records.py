"""Packets as Flower's records: tensors as raw bytes with dtype and shape, everything else as JSON. Nothing is
pickled. This module does not import torch, so the processes that only pass messages on stay small."""

from __future__ import annotations

import json
import math
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from .. import frames

_STORED = "uefl.raw"
_ALIGNED = 8  # bytes, as in a frame


def records_of(frame: bytes | bytearray) -> RecordDict:
    """Return the records of a frame made by :func:`uefl.engines.codec.encode`."""
    length = int.from_bytes(frame[:_ALIGNED], "little")
    text = bytes(frame[_ALIGNED : _ALIGNED + length])
    records = RecordDict({"header": ConfigRecord({"json": text.decode()})})
    place = _ALIGNED + _aligned(length)
    for part, table in json.loads(text)["tensors"].items():
        arrays = {}
        for name, dtype, shape in table:
            size = math.prod(shape) * _SIZES[dtype]
            arrays[name] = Array(dtype, tuple(shape), _STORED, bytes(frame[place : place + size]))
            place += _aligned(size)
        if arrays:
            records[part] = ArrayRecord(arrays)
    return records


def frame_of(records: RecordDict, most: int) -> bytes:
    """Undo :func:`records_of`. :func:`uefl.engines.codec.decode` checks the frame.

    Args:
        records: the content of a message, from an untrusted sender.
        most: the largest size of the frame in bytes.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the records do not match their description.
        MemoryError: the frame is larger, or its JSON is.
    """
    text = str(records.config_records["header"]["json"]).encode()
    if len(text) > min(most, frames.HEADER):
        raise MemoryError
    table: dict[str, Any] = json.loads(text)["tensors"]
    pieces = [len(text).to_bytes(_ALIGNED, "little"), text]
    size = len(text)
    for part, tensors in table.items():
        arrays = records.array_records[part] if tensors else {}
        if len(tensors) != len(arrays):  # a tensor that is named again and again would be copied as often
            raise ValueError(f"{len(tensors)} names of {len(arrays)} tensors")
        for name, dtype, shape in tensors:
            array = arrays[name]
            if (array.stype, array.dtype, list(array.shape)) != (_STORED, dtype, shape):
                raise ValueError(f"an array of {array.dtype[:20]} {list(array.shape)}")
            if len(array.data) != math.prod(shape) * _SIZES[dtype]:
                raise ValueError(f"{len(array.data)} bytes for {dtype} {shape}")
            size += len(array.data)
            if size > most:
                raise MemoryError
            pieces.append(array.data)
    return b"".join(piece.ljust(_aligned(len(piece)), b"\0") for piece in pieces)


_SIZES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
_SIZES |= {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
