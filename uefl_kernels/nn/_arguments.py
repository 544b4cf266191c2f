"""Checks of constructor arguments; each message says what was wrong and what was expected."""

from __future__ import annotations

from numbers import Real
from operator import index
from typing import Any

from .._numbers import is_count


def counts(layer: str, **values: Any) -> tuple[int, ...]:
    """The values as ints; ValueError for one that is no int of at least 1."""
    for name, value in values.items():
        if not is_count(value):
            raise ValueError(f"{layer}: {name} is {value!r}, expected an int of at least 1")
    return tuple(map(index, values.values()))


def numbers(layer: str, most: float | None, **values: Any) -> None:
    """ValueError for a value that is no finite number from 0 on, or from 0 to ``most``."""
    for name, value in values.items():
        number = float(value) if isinstance(value, Real) else -1.0
        if not 0 <= number <= (float("inf") if most is None else most) or number == float("inf"):
            expected = "of at least 0" if most is None else f"from 0 to {most}"
            raise ValueError(f"{layer}: {name} is {value!r}, expected a number {expected}")


def refuse_together(layer: str, *found: tuple[bool, str]) -> None:
    """ValueError for the first pair whose condition holds."""
    for refused, message in found:
        if refused:
            raise ValueError(f"{layer}: {message}")
