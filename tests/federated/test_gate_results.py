"""The comparisons of FedGate's saved results with controls, and the tables of their page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reproduction import gate

PAGE = Path(__file__).parents[2] / "docs" / "preregistration.md"


@pytest.mark.parametrize(
    ("found", "said"),
    [([0.1, 0.2, 0.3, 0.2], "better"), ([-0.1, -0.2, -0.3, -0.2], "worse"), ([-0.1, 0.2, 0.3, -0.2], "open")],
)
def test_a_verdict_needs_an_interval_without_zero(found, said):
    assert gate.verdict(found) == said


def test_the_less_uncertain_arm_is_chosen_by_seed():
    entropies = {"fedavg": {"0": 0.5, "1": 0.3}, "fedper": {"0": 0.4, "1": 0.6}, "fedgate": {"0": 0, "1": 0}}
    accuracies = {"fedavg": {"0": 0.9, "1": 0.8}, "fedper": {"0": 0.7, "1": 0.7}, "fedgate": {"0": 0, "1": 0}}
    arms = {arm: {"entropy": entropies[arm], "accuracy": accuracies[arm]} for arm in entropies}
    assert gate.chosen_by_entropy(arms) == {"0": "fedper", "1": "fedavg"}
    (row,) = gate.gated_by_entropy({"one": arms}).rows
    assert row[:3] == ["one", "1 of 2", "1 of 2"]
    assert row[3].startswith("+0.050 ")


def test_the_page_has_the_tables_of_the_saved_results():
    federations = json.loads(gate.RESULTS.read_text(encoding="utf-8"))["cases"]
    page = PAGE.read_text(encoding="utf-8")
    for table in (gate.against_controls(federations), gate.gated_by_entropy(federations)):
        assert table.markdown() in page
