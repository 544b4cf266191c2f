"""Every scenario of ``make chaos``, with real processes."""

import pytest

pytest.importorskip("flwr")

from tests.federated.deploy.chaos.scenarios import SCENARIOS, running_scenarios


@pytest.fixture(scope="module")
def execute():
    with running_scenarios() as execute:
        yield execute


# One of each kind; `make chaos` runs all of them.
QUICK = ("nan", "late", "client", "server", "checkpoint", "two")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.large) for name in SCENARIOS]
)
def test_a_fault_costs_no_more_than_it_must(name, execute):
    assert execute(name)
