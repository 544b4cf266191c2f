"""The tables of a report, once, for the terminal and for Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from ..terminal import nearest_characters
from .folder import Run
from .words import label, spans

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_MOST = 50  # rows on answers that were left out

Columns = dict[str, Callable[[dict[str, Any]], str]]
"""header and cell of an arm"""


@dataclass(frozen=True)
class Table:
    """Text in rows and columns; the first column names the row."""

    title: str
    header: list[str]
    rows: list[list[str]]
    numeric: bool = True
    """the columns after the first hold numbers, set flush right"""
    note: str = ""
    """what the terminal shows below it"""

    def markdown(self) -> str:
        """The table in Markdown, without its title."""
        rule = [":--"] + ["--:" if self.numeric else ":--"] * (len(self.header) - 1)
        lines = [self.header, rule, *([inert(cell) for cell in row] for row in self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def html(self) -> str:
        """The table in HTML, without its title."""
        head = "".join(f"<th scope=col>{escape(name)}</th>" for name in self.header)
        rows = [f"<tr><th scope=row>{escape(row[0])}</th>{_cells(row[1:])}</tr>\n" for row in self.rows]
        return (
            "<div"
            f" class=scroll><table{' class=numbers' if self.numeric else ''}>\n<tr>{head}</tr>\n{''.join(rows)}</table></div>\n"
        )

    def parts(self, width: int) -> list[Table]:
        """The same table in as many as it takes to fit into ``width`` columns of a terminal with no number
        broken; words are."""
        if not self.numeric:
            return [self]
        needed = [self._width(i) + 1 for i in range(len(self.header))]
        width -= 2  # the frame
        groups: list[list[int]] = [[]]
        for i in range(1, len(self.header)):
            if groups[-1] and needed[0] + sum(needed[j] for j in groups[-1]) + needed[i] > width:
                groups.append([])
            groups[-1].append(i)
        made = []
        for number, group in enumerate(groups):
            header, *rows = ([line[0], *(line[i] for i in group)] for line in (self.header, *self.rows))
            made.append(
                Table(
                    "" if number else self.title,
                    header,
                    rows,
                    self.numeric,
                    self.note if group is groups[-1] else "",
                )
            )
        return made

    def _width(self, column: int) -> int:
        """The width of the longest cell, or of the header."""
        from rich.cells import cell_len

        return max(cell_len(row[column]) for row in (self.header, *self.rows))

    def rich(self, encoding: str = "utf-8") -> RichTable:
        """Return the table for a terminal of this encoding; its text is taken as it is, because names may
        hold square brackets."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        padding = (0, 0 if self.numeric else 1)  # a narrow gap, so that the widest table stands in 80 columns
        title = Text(nearest_characters(self.title, encoding), "bold")
        table = RichTable(
            title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=padding
        )
        table.caption = Text(nearest_characters(self.note, encoding), "table.caption") if self.note else None
        table.caption_justify = "left"
        for i, name in enumerate(self.header):
            table.add_column(Text(name), justify="right" if i and self.numeric else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(nearest_characters(cell, encoding)) for cell in row))
        return table


def arm_table(run: Run) -> Table:
    """One row per arm: means over its clients at the last round, its accuracy over the last four rounds and,
    where there are validation images, at the round that is best on them. Columns that no arm has are left
    out."""
    columns: Columns = {
        "accuracy": lambda arm: number(arm["accuracy"]),
        last_rounds(run): lambda arm: plus_minus(arm["accuracy_last4"]["mean"], arm["accuracy_last4"]["sd"]),
        "selected": lambda arm: _at_round(arm.get("selected")),
        "entropy": lambda arm: number(arm["entropy"]),
        "NLL": lambda arm: number(arm["nll"]),
        "ECE": lambda arm: number(arm["ece"]),
        "epsilon": lambda arm: number(arm.get("epsilon"), 2),
        "left out": lambda arm: str(arm.get("rejected", "-")),
        "rounds": lambda arm: str(arm["rounds"]),
        "seconds": lambda arm: number(arm.get("seconds"), 1),
        "CPU s": lambda arm: number(arm.get("cpu_seconds"), 1),
    }
    own = {
        key: {name: own_number(_own(run, name, key)) for name in run.arms}
        for key in run.columns
        if key not in columns
    }
    added = [key for key, cells in own.items() if set(cells.values()) != {"-"}]
    header, rows = _filled(run, columns, ("entropy", "left out", "rounds", "seconds"))
    header, rows = [*header, *added], [[*row, *(own[key][row[0]] for key in added)] for row in rows]
    note = (
        f"accuracy: of the last round; {last_rounds(run)}: mean ± standard deviation over these rounds"
        if "accuracy" in header
        else ""
    )
    return Table(f"{run.path}{'' if run.finished else ' (unfinished)'}", header, rows, note=note)


def _own(run: Run, arm: str, key: str) -> float | None:
    """A column of an algorithm: of the clients that are trained on, or, where these have none, of those that
    are measured only."""
    found = run.mean(arm, key)
    return run.arms[arm].get(key) if found is None else found


def protocol_table(run: Run) -> Table:
    """One row per arm: its best round, the worst tenth of its clients, what was measured beside the global
    model, and megabytes moved."""
    columns: Columns = {
        "best": lambda arm: _at_round(arm.get("best")),
        "worst 10 %": lambda arm: number(arm.get("worst_tenth")) if len(arm["clients"]) > 1 else "-",
        "global": lambda arm: number(arm.get("global_accuracy")),
        "personalised": lambda arm: number(arm.get("personalised_accuracy")),
        "unseen": lambda arm: number(arm.get("unseen_accuracy")),
        "to target": _reached,
        "MB sent": lambda arm: number(arm["bytes_sent"] / 1e6, 1) if "bytes_sent" in arm else "-",
        "MB back": lambda arm: number(arm["bytes_received"] / 1e6, 1) if "bytes_received" in arm else "-",
    }
    header, rows = _filled(run, columns, ("MB sent", "MB back"))
    return Table("clients and traffic", header, rows)


def _filled(run: Run, columns: Columns, always: tuple[str, ...]) -> tuple[list[str], list[list[str]]]:
    """Header and rows without the columns that no arm has."""
    kept = [
        name
        for name, cell in columns.items()
        if name in always or any(cell(arm) != "-" for arm in run.arms.values())
    ]
    return ["arm", *kept], [[name, *(columns[key](arm) for key in kept)] for name, arm in run.arms.items()]


def _at_round(found: dict[str, Any] | None) -> str:
    return f"{number(found['accuracy'])} @ {found['round']}" if found else "-"


def last_rounds(*runs: Run) -> str:
    """The rounds that the mean accuracy is of: the last four of every arm, where it has as many."""
    counts = {min(4, arm["rounds"]) for run in runs for arm in run.arms.values()}
    most = max(counts)
    return (f"last {most} rounds" if most > 1 else "last round") + (" or fewer" if len(counts) > 1 else "")


def tables(run: Run) -> list[Table]:
    """Return the tables of a report: arms, clients where they differ, and answers left out where some were.

    On unlabeled sets all clients share one model and one test set.
    """
    left_out = left_out_table(run)
    return [
        arm_table(run),
        protocol_table(run),
        *([] if run.on_sets else [client_table(run)]),
        *([left_out] if left_out else []),
    ]


def client_table(run: Run) -> Table:
    """One row per client: accuracy and entropy in each arm at the last round, and what its algorithm adds
    where clients differ in it."""

    def values(key: str, arm: str) -> list[Any]:
        return [run.arms[arm]["clients"].get(client, {}).get(key) for client in run.clients]

    columns = {
        f"{key} {arm}": [number(value) for value in values(key, arm)]
        for key in ("accuracy", "entropy")
        for arm in run.arms
    }
    own = {
        f"{key} {arm}": [own_number(value) for value in values(key, arm)]
        for key in run.columns
        for arm in run.arms
    }
    columns |= {name: cells for name, cells in own.items() if len(set(cells)) > 1}
    rows = [
        [run.labels[client], *(cells[i] for cells in columns.values())]
        for i, client in enumerate(run.clients)
    ]
    return Table("per client", ["client", *columns], rows)


def left_out_table(run: Run) -> Table | None:
    """One row per arm, client and reason: the rounds in which its answer was left out; None where none
    was."""
    rounds: dict[tuple[str, str, str], list[int]] = {}
    for line in run.left_out:
        rounds.setdefault((line["arm"], line["client"], line["left_out"]), []).append(line["round"] + 1)
    if not rounds:
        return None
    rows = [
        [arm, run.labels.get(client) or label(client), spans(found), str(len(found)), reason]
        for (arm, client, reason), found in rounds.items()
    ]
    more = f"{len(rows) - _MOST} rows more: metrics.jsonl" if len(rows) > _MOST else ""
    return Table(
        "left out of the averages",
        ["arm", "client", "rounds", "times", "why"],
        rows[:_MOST],
        numeric=False,
        note=more,
    )


def _cells(row: list[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in row)


def inert(cell: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*\[\]<|$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))", r"\\\1", cell)


def _reached(arm: dict[str, Any]) -> str:
    if "rounds_to_target" not in arm:
        return "-"
    return str(arm["rounds_to_target"]) if arm["rounds_to_target"] is not None else "never"


def number(value: Any, digits: int = 3) -> str:
    """A number with fixed digits, or a dash for what was not measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def own_number(value: float | None) -> str:
    """A metric of an algorithm, of any magnitude: four digits, of a count that is whole all of them."""
    if value is None:
        return "-"
    return str(int(value)) if value == int(value) else f"{value:.4g}"


def plus_minus(mean: float | None, sd: float | None) -> str:
    """Mean and deviation in one cell."""
    return "-" if mean is None else f"{number(mean)} ± {number(sd)}"
