"""The committed table of faults has every scenario, in its words, and no row that is not as wanted."""

import pytest

pytest.importorskip("flwr")

from tests.federated.deploy.chaos.__main__ import ABOUT, PAGE
from tests.federated.deploy.chaos.scenarios import SCENARIOS


def test_every_scenario_has_a_row_and_is_as_wanted():
    page = PAGE.read_text()
    table = page.removeprefix(ABOUT).splitlines()
    assert all(line.startswith("| ") for line in table)  # exactly the output of the command
    rows = [line.strip("| ").split(" | ") for line in table][2:]
    assert [name for name, *_ in rows] == list(SCENARIOS)
    for name, fault, wanted, _, right in rows:
        assert (fault, wanted) == (SCENARIOS[name].fault, SCENARIOS[name].wanted)
        assert right == "yes"
