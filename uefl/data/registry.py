"""Names of data sets and of partitions: each is a module of its folder, found by walking it."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Entries by name. The modules of a package register theirs when they are imported, which happens at the
    first look-up.

    Args:
        package: whose modules hold the entries.
        what: what an entry is called in messages.
    """

    def __init__(self, package: str, what: str) -> None:
        self._package, self._what = package, what
        self._entries: dict[str, Entry] = {}
        self._complete = False

    def add(self, name: str, entry: Entry) -> None:
        """Register an entry; a name is taken once.

        Raises:
            ValueError: another entry has the name.
        """
        if name in self._entries:
            raise ValueError(f"the {self._what} {name!r} is registered already; choose another name")
        self._entries[name] = entry

    def __contains__(self, name: str) -> bool:
        """Whether an entry has this name."""
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        """All names, sorted."""
        return iter(sorted(self._all()))

    def __getitem__(self, name: str) -> Entry:
        """The entry of a name.

        Raises:
            ValueError: nothing has the name; the message lists what there is.
        """
        entries = self._all()
        if name not in entries:
            close = difflib.get_close_matches(name, entries, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"{name!r} is no {self._what}{hint}; there are {', '.join(self)}")
        return entries[name]

    def _all(self) -> dict[str, Entry]:
        if not self._complete:
            for module in pkgutil.iter_modules(importlib.import_module(self._package).__path__):
                importlib.import_module(f"{self._package}.{module.name}")
            self._complete = True
        return self._entries
