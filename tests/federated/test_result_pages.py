"""The tables of the pages have the numbers of the saved results."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from uefl.report.compare import half_width
from uefl.suites import suite

ROOT = Path(__file__).parents[2]
PAGE, DEMO, PLAN = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("reproduction", "demo", "preregistration")
)
NUMBER = re.compile(r"± |\[.*\]$")  # a mean with its deviation, or a difference with its interval
MEASURES = {  # by the title of a column on the page
    "0°": "accuracy@0",
    "-50°": "accuracy@-50",
    "120°": "accuracy@120",
    "VQ loss": "vq_loss",
    "accuracy after training once more": "personalized_accuracy",
    "accuracy when the phase began": "start_accuracy",
    "best accuracy": "best_accuracy",
    "entropy of that round": "best_entropy",
    "training accuracy": "train_accuracy",
    "k-means, ms": "kmeans_milliseconds",
    "millions of parameters": "parameters_millions",
    "late clients at arrival": "arrival_accuracy",
    "late clients at the end": "late_accuracy",
    "late clients, own models": "late_personalized_accuracy",
    "all clients": "accuracy",
}
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


def by_measure(table: list[list[str]]) -> dict[str, dict[str, str]]:
    """Return the cells by row and measure, also differences and numbers of the paper, which follow one."""
    titles: list[str] = []
    measure = ""
    for title in table[0]:
        of_measure = title == "paper" or title.startswith("minus")
        measure = measure if of_measure else MEASURES.get(title, title)
        titles.append(f"{measure}, {title}" if of_measure else measure)
    return {row[0]: dict(zip(titles, row, strict=True)) for row in table[1:]}


@pytest.mark.parametrize("table", BY_ARM, ids=lambda table: table[1][0].replace(" / ", "-"))
def test_a_column_is_the_saved_column_of_its_title(table: list[list[str]]) -> None:
    found = by_measure(table)
    pages = [by_measure(rows) for whole in SAVED.values() for rows in whole]
    pages = [saved for saved in pages if found.keys() <= saved.keys()]
    checked = [
        (label, title, cell)
        for label, cells in found.items()
        for title, cell in cells.items()
        if NUMBER.search(cell) or title.endswith(", paper")
    ]
    assert checked
    assert any(
        all(number(saved[label].get(title, "")) == number(cell) for label, title, cell in checked)
        for saved in pages
    )


def number(cell: str) -> str | float:
    """Return the number of a cell, or its text: a page may omit the zeros at the end."""
    try:
        return float(cell)
    except ValueError:
        return cell


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


PLANNED = [
    (["test", "test-rest"], 1, "UEFL minus FedAvg, accuracy, 95 %", ["uefl", "fedavg"]),
    (["test-longer"], 3, "UEFL minus FedAvg, accuracy, 95 %", ["uefl", "fedavg"]),
    (["gate"], 1, "minus FedPer", ["fedgate", "fedper"]),
    (["gate"], 4, "minus FedAvg", ["fedgate", "fedavg"]),
]


@pytest.mark.parametrize(("names", "column", "title", "arms"), PLANNED)
def test_planned_comparisons_are_of_saved_runs(
    names: list[str], column: int, title: str, arms: list[str]
) -> None:
    """Each row has the mean difference, the ends of its interval, and the verdict that follows."""
    cases: dict[str, Any] = {}
    for name in names:
        path = ROOT / "reproduction" / "results" / f"{name}.json"
        cases |= json.loads(path.read_text(encoding="utf-8"))["cases"]
    (table,) = (each for each in tables(PLAN) if each[0][column : column + 1] == [title])
    for row in table[1:]:
        case = row[0].strip("`").removesuffix("-longer")
        measure = "late_accuracy" if case == "late" else "accuracy"
        one, other = (cases[case][arm][measure] for arm in arms)
        found = [one[seed] - other[seed] for seed in one]
        mean, half = statistics.fmean(found), half_width(found)
        numbers = [float(each) for each in re.findall(r"[-+][\d.]+", row[column])]
        assert numbers == pytest.approx([mean, mean - half, mean + half], abs=6e-4), row[0]
        if "verdict" in table[0]:
            assert ("loses" in row[-1], row[-1] == "open") == (
                mean + half < 0,
                mean - half <= 0 <= mean + half,
            )
