"""Write TensorBoard events of a run, if the extra ``tensorboard`` is installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from .words import mean

_MEANS = ("accuracy", "entropy", "nll", "ece", "train_loss", "epsilon")
_PER_CLIENT = ("accuracy", "entropy")


class EventWriter:
    """Write ``<metric>/<arm>`` (mean over the clients) and ``<metric> <arm>/<client>`` for every round.

    Raises:
        ImportError: the extra ``tensorboard`` is not installed.
    """

    def __init__(self, directory: Path, columns: Iterable[str] = (), weighted: Iterable[str] = ()) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory))
        self._means, self._weighted = (*_MEANS, *columns), frozenset(weighted)

    def round(self, arm: str, round: int, records: list[dict[str, Any]]) -> None:
        """Add the records of a round, without null values and unseen clients."""
        records = [r for r in records if not r.get("unseen")]
        for key in self._means:
            value = mean(records, key, self._weighted)
            if value is not None:
                self.writer.add_scalar(f"{key}/{arm}", value, round)
        for key in _PER_CLIENT:
            for r in records:
                if r[key] is not None:
                    self.writer.add_scalar(f"{key} {arm}/{r['client']}", r[key], round)
        self.writer.flush()


@contextmanager
def event_writer(
    directory: Path,
    records: Iterable[dict[str, Any]] = (),
    columns: Iterable[str] = (),
    weighted: Iterable[str] = (),
) -> Iterator[EventWriter | None]:
    """Yield a writer of events, or None if the extra is not installed.

    The events of ``records`` replace all events in the folder, since TensorBoard would show a round twice.
    """
    try:
        importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        yield None
        return
    for old in directory.glob("events.out.tfevents.*"):
        if not old.is_dir():  # a folder has no events of this run
            old.unlink()
    events = EventWriter(directory, columns, weighted)
    with events.writer:
        for (arm, number), lines in groupby(records, key=lambda r: (r["arm"], r["round"])):
            events.round(arm, number, list(lines))
        yield events
