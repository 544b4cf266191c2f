"""The committed table of faults names scenarios that there are, in their words, and has no row that is not as wanted."""

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from uefl.deploy.chaos.scenarios import SCENARIOS

TABLE = Path(__file__).parents[3] / "docs" / "faults.md"


def test_every_row_is_of_a_scenario_and_as_wanted():
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")][2:]
    assert rows
    for name, fault, wanted, _, right in rows:
        assert (fault, wanted) == (SCENARIOS[name].fault, SCENARIOS[name].wanted)
        assert right == "yes"
