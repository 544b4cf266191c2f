"""The changes of clients after an extension, and the table of their page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reproduction import extensions

PAGE = Path(__file__).parents[2] / "docs" / "reproduction.md"


def records(losses, extended=()):
    """Return two iterations of a round: the loss of each client in both rounds."""
    return [
        {
            "iteration": i,
            "round": i + 1,
            "client": name,
            "holdout_nll": loss[i],
            "accuracy": 1 - loss[i],
            "extended": bool(i) and name in extended,
        }
        for name, loss in losses.items()
        for i in range(2)
    ]


def test_changes_are_between_ends_of_iterations():
    """The client c joins after the decision."""
    losses = {"a": (0.9, 0.4), "b": (0.3, 0.5), "c": (0.9, 0.1)}
    control = records({"a": (0.8, 0.7), "b": (0.3, 0.3), "c": (0.5, 0.5)})
    a, b = extensions.changes(records(losses, {"a", "c"}), control, {"c": 2})
    assert a == {
        "round": 1,
        "client": "a",
        "extended": True,
        "holdout_nll": -0.5,
        "accuracy": 0.5,
        "control_holdout_nll": -0.1,
        "control_accuracy": 0.1,
    }
    assert (b["client"], b["extended"], b["holdout_nll"]) == ("b", False, 0.2)
    found = [{"case": "one", "seed": seed} | change for seed in (0, 1) for change in (a, b)]
    (row,) = extensions.table(found).rows
    assert row[:4] == ["one", "2 of 2", "-0.500", "+0.200"]
    assert row[4].startswith("-0.400 ")


def test_a_folder_without_runs_is_refused(tmp_path):
    """The program writes the changes of the folder over the saved ones, so an empty list would lose them."""
    with pytest.raises(SystemExit, match=r"CASE/uefl/seed-N"):
        extensions.read(tmp_path)


def test_the_page_has_the_table_of_the_saved_changes():
    found = json.loads(extensions.RESULTS.read_text(encoding="utf-8"))
    assert extensions.table(found).markdown() in PAGE.read_text(encoding="utf-8")
    extended = [change["holdout_nll"] < 0 for change in found if change["extended"]]
    assert f"{sum(extended)} of {len(extended)} extended clients" in PAGE.read_text(encoding="utf-8")
