"""Mappings that create a value on access, so that memory does not grow with the number of clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")


class Lazy(Mapping[str, T]):
    """A mapping that keeps its names and caches only the last value."""

    def __init__(self, names: Iterable[str], make: Callable[[str], T]) -> None:
        self._names, self._make = dict.fromkeys(names), make
        self._last: tuple[str, T] | None = None

    def __getitem__(self, name: str) -> T:
        """Return the value of a name, created unless it is the last one."""
        if self._last is None or self._last[0] != name:
            if name not in self._names:
                raise KeyError(name)
            self._last = None  # free the old value before the new one is created
            self._last = name, self._make(name)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._names)
