"""Show the progress of a run: a live line in a terminal, a plain line per round elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from .report.words import count, label, means

_LOGGER = logging.getLogger(__package__)


class PlainProgress:
    """Give a line per round to ``notice``, by default the logger ``uefl`` at level INFO."""

    def __init__(self, notice: Callable[[str], None] = _LOGGER.info) -> None:
        self.notice = notice
        self._rounds = 0

    def start(self, arms: list[str], rounds: int, clients: int) -> None:
        """Show that the run begins."""
        self._rounds = rounds
        planned = f"{count(rounds, 'round')} over " if rounds else ""
        self.notice(f"{', '.join(arms)}: {planned}{count(clients, 'client')}")

    def arm(self, name: str, done_rounds: int) -> None:
        """Show that an arm begins or continues."""
        if done_rounds:
            self.notice(f"{name} continues after {_place(done_rounds, self._rounds)}")

    def client(self, arm: str, round: int, client: str) -> None:
        """Do nothing when a client begins."""

    def round(self, arm: str, round: int, records: list[dict[str, Any]]) -> None:
        """Show the metrics of a round."""
        self.notice(f"{arm} {_place(round + 1, self._rounds)}  {means(records)}")


class LiveProgress:
    """Show one bar over all arms that advances with each client, and the time left of an arm."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, round="", client="", measured="")
        self._arms: list[str] = []
        self._rounds = self._clients = self._begun = 0

    def start(self, arms: list[str], rounds: int, clients: int) -> None:
        """Show that the run begins."""
        self._arms, self._rounds, self._clients = arms, rounds, clients

    def arm(self, name: str, done_rounds: int) -> None:
        """Show that an arm begins or continues."""
        self._progress.reset(
            self._task,
            total=len(self._arms) * self._rounds * self._clients or None,
            completed=self._steps(name, done_rounds),
            description=escape(name),
            round="",
            client="",
            measured="",
        )

    def client(self, arm: str, round: int, client: str) -> None:
        """Show that a client begins, after the earlier ones of a round, which may only be measured."""
        place = _place(min(round + 1, self._rounds or round + 1), self._rounds)
        self._begun = self._begun + 1 if self._progress.tasks[0].fields["round"] == place else 0
        steps = min(
            self._steps(arm, round) + min(self._begun, self._clients - 1), self._steps(arm, self._rounds)
        )
        self._progress.update(self._task, completed=steps, round=place, client=escape(label(client)))

    def round(self, arm: str, round: int, records: list[dict[str, Any]]) -> None:
        """Show the metrics of a round, while the next one has been trained already."""
        self._progress.update(self._task, measured=means(records))

    def notice(self, message: str) -> None:
        """Show a notice, which stays above the bar."""
        self._progress.console.print(message, markup=False, highlight=False)

    def _steps(self, arm: str, rounds: int) -> int:
        return (self._arms.index(arm) * self._rounds + rounds) * self._clients


def _place(round: int, rounds: int) -> str:
    return f"round {round}/{rounds}" if rounds else f"round {round}"


def _columns(place: str) -> tuple[ProgressColumn, ...]:
    """Return a description, a bar, a text about the place, and the time that is left."""
    return (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn(place),
        TimeRemainingColumn(),
        TextColumn("left"),
    )


@contextmanager
def watch(console: Console) -> Iterator[PlainProgress | LiveProgress]:
    """Yield an observer that shows as much of a run as the console can display."""
    if not console.is_terminal:
        yield PlainProgress(partial(console.print, markup=False, highlight=False, soft_wrap=True))
        return
    columns = _columns("{task.fields[round]}  {task.fields[client]}  {task.fields[measured]}")
    # a client may take minutes, so the speed is estimated over a long time
    with Progress(*columns, console=console, speed_estimate_period=900, transient=True) as progress:
        yield LiveProgress(progress)


@contextmanager
def bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a bar by a number of steps, without a bar outside of a terminal."""
    with Progress(
        *_columns("{task.completed}/{task.total}"),
        console=console,
        transient=True,
        redirect_stdout=False,  # the console may be stderr
        redirect_stderr=False,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(what, total=total)
        yield partial(progress.advance, task)
