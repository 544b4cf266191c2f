"""Names of algorithms, data sets, partitions, networks and metrics: modules of a folder and entry points."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

from .errors import UserError, nearest

Entry = TypeVar("Entry")
Registered = TypeVar("Registered")
"""the entry of a decorator, which keeps its own type"""


class Registry(Generic[Entry]):
    """Entries by name, each called ``what`` in messages.

    The first look-up imports the modules of ``package``, which register their entries, and loads the entry
    points ``group`` of installed packages, such as ``uefl.sources``. Another process does the same.
    """

    def __init__(self, package: str, what: str, group: str) -> None:
        self._package, self._what, self._group = package, what, group
        self._entries: dict[str, Entry] = {}
        self._complete = False

    def add(self, name: str, entry: Entry) -> None:
        """Register an entry, also a second time under its name.

        Raises:
            ValueError: another entry has the name.
        """
        if self._entries.get(name, entry) is not entry:
            raise ValueError(f"the {self._what} {name!r} is registered already; choose another name")
        self._entries[name] = entry

    def decorator(self, name: str) -> Callable[[Registered], Registered]:
        """Return a decorator that registers a class or a function without a change."""

        def register(entry: Registered) -> Registered:
            self.add(name, cast(Entry, entry))
            return entry

        return register

    def __contains__(self, name: str) -> bool:
        """Return True if an entry has this name."""
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names, sorted."""
        return iter(sorted(self._all()))

    def __getitem__(self, name: str) -> Entry:
        """Return the entry of a name.

        Raises:
            ValueError: no entry has the name; the message lists all names.
        """
        entries = self._all()
        if name not in entries:
            raise ValueError(
                f"{name!r} is no {self._what}{nearest(name, entries)}; there are {', '.join(self)}"
            )
        return entries[name]

    def known_elsewhere(self, name: str) -> bool:
        """Return True if another process finds an entry: a module of the package or an entry point has it."""
        packaged = {point.name for point in importlib.metadata.entry_points(group=self._group)}
        return name in packaged or str(self[name].__module__).startswith(f"{self._package}.")

    def _all(self) -> dict[str, Entry]:
        if not self._complete:
            self._import_modules()
            for point in importlib.metadata.entry_points(group=self._group):
                self.add(point.name, self._loaded(point))
            self._complete = True
        return self._entries

    def _import_modules(self) -> None:
        """Import the modules of the package, which register their entries."""
        path = importlib.import_module(self._package).__path__
        for module in pkgutil.walk_packages(path, f"{self._package}."):
            importlib.import_module(module.name)

    def _loaded(self, point: importlib.metadata.EntryPoint) -> Any:
        """Load an entry point."""
        try:
            return point.load()
        except Exception as error:  # an import of a third party may raise anything
            package = point.dist.name if point.dist is not None else point.value
            raise UserError(
                f"the {self._what} {point.name!r} of the package {package} cannot be loaded"
                f" ({type(error).__name__}: {error}); update or uninstall the package"
            ) from error
