"""A table of text, for the terminal, Markdown and HTML.

This module is outside of the package ``report``, because that package imports torch and matplotlib, and a
command that only prints a list must be fast.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from .terminal import nearest_characters

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """Text in rows and columns, with the name of each row in the first column."""

    title: str
    header: list[str]
    rows: list[list[str]]
    numeric: bool = True
    """whether the columns after the first hold numbers, aligned right"""
    note: str = ""
    """text below the table in the terminal"""

    def markdown(self) -> str:
        """Return the table in Markdown, without its title."""
        rule = [":--"] + ["--:" if self.numeric else ":--"] * (len(self.header) - 1)
        lines = [self.header, rule, *([escape_markdown(cell) for cell in row] for row in self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def html(self) -> str:
        """Return the table in HTML, without its title."""
        head = "".join(f"<th scope=col>{escape(name)}</th>" for name in self.header)
        rows = [f"<tr><th scope=row>{escape(row[0])}</th>{_cells(row[1:])}</tr>\n" for row in self.rows]
        return (
            f"<div class=scroll><table{' class=numbers' if self.numeric else ''}>\n"
            f"<tr>{head}</tr>\n{''.join(rows)}</table></div>\n"
        )

    def split(self, width: int) -> list[Table]:
        """Split the table by columns into tables that fit a terminal of ``width`` characters."""
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
            title, note = "" if number else self.title, self.note if group is groups[-1] else ""
            made.append(Table(title, header, rows, self.numeric, note))
        return made

    def _width(self, column: int) -> int:
        """Return the width of a column."""
        from rich.cells import cell_len

        return max(cell_len(row[column]) for row in (self.header, *self.rows))

    def rich(self, encoding: str = "utf-8") -> RichTable:
        """Return the table for a terminal, without markup in square brackets."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        padding = (0, 0 if self.numeric else 1)  # a narrow gap, to fit 80 columns
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


def _cells(row: list[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in row)


def escape_markdown(cell: str) -> str:
    """Escape a cell for Markdown."""
    return re.sub(r"([\\`*\[\]<|$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))", r"\\\1", cell)
