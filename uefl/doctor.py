"""``uefl doctor`` in the tables of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uefl_kernels import doctor

from .errors import UserError

if TYPE_CHECKING:
    from rich.table import Table as RichTable


def collect() -> dict[str, Any]:
    """Return what :func:`uefl_kernels.doctor.collect` finds.

    Raises:
        UserError: UEFL_BACKEND names no backend, or UEFL_CPU no instruction set that this processor has.
    """
    try:
        return doctor.collect()
    except ValueError as error:
        raise UserError(str(error)) from None


def tables(found: dict[str, Any]) -> list[RichTable]:
    """Lay out what ``collect`` found, for the terminal."""
    from .report.tables import Table

    choices = [[c["op"], c["device"], c["backend"], c["why"]] for c in found["ops"]]
    return [
        Table("this machine", ["what", "found"], list(map(list, doctor.facts(found))), numeric=False).rich(),
        Table("ops", ["op", "device", "backend", "why"], choices, numeric=False).rich(),
    ]
