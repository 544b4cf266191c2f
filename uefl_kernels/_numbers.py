"""Whole numbers in arguments, without torch."""

from __future__ import annotations

import operator
from typing import Any


def as_integer(value: Any) -> int | None:
    """Return an integer of Python, NumPy or anything with ``__index__`` as an int.

    Return None for all else, such as bools.
    """
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
    if str(getattr(value, "dtype", "")).endswith("bool") or getattr(value, "ndim", 0) != 0:
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        return None


def is_count(value: Any) -> bool:
    """Return True for an integer of at least 1."""
    number = as_integer(value)
    return number is not None and number >= 1


def is_seed(value: Any) -> bool:
    """Return True for an integer from 0 to 2^63 - 1."""
    number = as_integer(value)
    return number is not None and 0 <= number < 2**63
