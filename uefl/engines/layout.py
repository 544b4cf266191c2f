"""The bytes of a packet: the length of its JSON, the JSON, and the tensors, each at a multiple of 8 bytes.

This module does not import torch, so the processes that only pass messages on stay small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Frame = bytes | bytearray | memoryview
Table = Sequence[tuple[str, str, Sequence[int]]]
"""name, dtype and shape of each tensor of a group"""
SIZES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
SIZES |= {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""bytes of an element by dtype"""
_ALIGNED = 8  # bytes: the largest element, and the length of the JSON


class Stored(NamedTuple):
    """A tensor in a frame."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    """too short in a damaged frame"""


def join(text: bytes, tensors: Iterable[Frame]) -> bytearray:
    """Return a frame of a JSON text and the bytes of tensors."""
    pieces = [len(text).to_bytes(_ALIGNED, "little"), text, *tensors]
    return bytearray().join(part for piece in pieces for part in (piece, bytes(-len(piece) % _ALIGNED)))


def text_of(frame: Frame) -> bytes:
    """Return the JSON text of a frame."""
    return bytes(frame[_ALIGNED : _ALIGNED + int.from_bytes(frame[:_ALIGNED], "little")])


def tensors_of(frame: Frame, tables: Mapping[str, Table]) -> dict[str, list[Stored]]:
    """Return the tensors of each group of a frame; they share its memory.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the tables describe no tensors.
    """
    place, found = _ALIGNED + _aligned(len(text_of(frame))), dict[str, list[Stored]]()
    whole = memoryview(frame)
    for group, table in tables.items():
        found[group] = []
        for name, dtype, shape in table:
            if not isinstance(name, str):
                raise TypeError(f"a tensor has the name {name!r}")
            data = whole[place : place + size_of(dtype, shape)]
            found[group].append(Stored(name, dtype, tuple(shape), data))
            place += _aligned(len(data))
    return found


def size_of(dtype: str, shape: Sequence[Any]) -> int:
    """Return the bytes of a tensor.

    Raises:
        KeyError, TypeError, ValueError: there is no such tensor.
    """
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"a tensor of shape {list(shape)}")
    return int(math.prod(shape)) * SIZES[dtype]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
