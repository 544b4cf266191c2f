"""The tables of docs/reproduction.md and docs/demo.md have the numbers of the saved results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from uefl.suites import suite

ROOT = Path(__file__).parents[2]
PAGE, DEMO = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("reproduction", "demo"))
NUMBER = re.compile(r"± |\[.*\]$")  # a mean with its deviation, or a difference with its interval
BRIDGE = [("fedavg", 2), ("fedavg", 4), ("fedper", 2), ("personal", 2), ("uefl", 2), ("uefl", 3)]


def tables(text: str) -> list[list[list[str]]]:
    """Return the cells of each table by row, beginning with the header."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    whole = [[[cell.strip() for cell in line.split("|")[1:-1]] for line in b.splitlines()] for b in blocks]
    return [[header, *rows] for header, _, *rows in whole]


SAVED = {
    path.stem: tables(path.read_text(encoding="utf-8"))
    for path in (ROOT / "reproduction" / "results").glob("*.md")
}
BY_ARM = [table for table in tables(PAGE) if table[0][0].endswith(" / arm")]


@pytest.mark.parametrize("table", BY_ARM, ids=lambda table: table[1][0].replace(" / ", "-"))
def test_rows_of_a_table_are_of_one_saved_suite(table: list[list[str]]) -> None:
    numbers = {row[0]: {cell for cell in row if NUMBER.search(cell)} for row in table[1:]}
    assert any(numbers.values())
    saved = [
        {
            label: {cell for rows in whole for row in rows if row[0] == label for cell in row}
            for label in numbers
        }
        for whole in SAVED.values()
    ]
    assert any(all(found <= cells[label] for label, found in numbers.items()) for cells in saved)


def test_means_of_every_other_table_are_saved() -> None:
    saved = {cell for whole in SAVED.values() for rows in whole for row in rows for cell in row}
    found = {cell for table in tables(PAGE) for row in table for cell in row if "± " in cell}
    assert len(found) > 300
    assert found <= saved


def test_tables_of_the_demos_are_saved() -> None:
    for name, table in zip(("demo", "fedul-demo"), tables(DEMO), strict=True):
        saved = {row[0].rpartition(" / ")[2]: row for row in SAVED[name][0]}
        for label, *cells in table[1:]:
            expected = " ".join(saved[label.split("`")[1]]).replace("\\", "")
            assert all(cell in expected for cell in cells), label


def test_the_bridge_has_the_means_of_its_arms() -> None:
    rows = {row[0]: row for row in SAVED["bridge"][0]}
    ((_, *steps),) = (table for table in tables(PAGE) if table[0][0] == "step")
    for (_, *found), case in zip(steps, suite.load("bridge").cases, strict=True):
        assert found == [rows[f"{case} / {arm}"][column].split(" ±")[0] for arm, column in BRIDGE], case
