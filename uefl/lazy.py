"""Mappings that make a value when it is asked for, so that what there is for every client is never there for all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")


class Lazy(Mapping[str, T]):
    """A mapping that keeps its names, and the last value that it made.

    Args:
        names: in their order.
        make: the value of a name.
    """

    def __init__(self, names: Iterable[str], make: Callable[[str], T]) -> None:
        self._names, self._make = dict.fromkeys(names), make
        self._last: tuple[str, T] | None = None

    def __getitem__(self, name: str) -> T:
        """The value, made anew unless it was the last one that was asked for."""
        if self._last is None or self._last[0] != name:
            if name not in self._names:
                raise KeyError(name)
            self._last = None  # before the next one is made: two are never there
            self._last = name, self._make(name)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._names)
