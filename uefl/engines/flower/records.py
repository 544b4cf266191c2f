"""Packets as Flower's records: tensors as raw bytes with dtype and shape, everything else as JSON.

Nothing is pickled. This module does not import torch, so the processes that only pass messages on stay small.
"""

from __future__ import annotations

import json
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from .. import frames, layout

_STORED = "uefl.raw"


def records_of(frame: bytes | bytearray) -> RecordDict:
    """Return the records of a frame made by :func:`uefl.engines.codec.encode`."""
    text = layout.text_of(frame)
    records = RecordDict({"header": ConfigRecord({"json": text.decode()})})
    for part, group in layout.tensors_of(frame, json.loads(text)["tensors"]).items():
        arrays = {one.name: Array(one.dtype, one.shape, _STORED, bytes(one.data)) for one in group}
        if arrays:
            records[part] = ArrayRecord(arrays)
    return records


def frame_of(records: RecordDict, most: int) -> bytearray:
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
    tables: dict[str, Any] = json.loads(text)["tensors"]
    pieces, size = list[bytes](), len(text)
    for part, table in tables.items():
        arrays = records.array_records[part] if table else {}
        if len(table) != len(arrays):  # a tensor that is named again and again would be copied as often
            raise ValueError(f"{len(table)} names of {len(arrays)} tensors")
        for name, dtype, shape in table:
            array = arrays[name]
            if (array.stype, array.dtype, list(array.shape)) != (_STORED, dtype, shape):
                raise ValueError(f"an array of {array.dtype[:20]} {list(array.shape)}")
            if len(array.data) != layout.size_of(dtype, shape):
                raise ValueError(f"{len(array.data)} bytes for {dtype} {shape}")
            size += len(array.data)
            if size > most:
                raise MemoryError
            pieces.append(array.data)
    return layout.join(text, pieces)
