"""The saved model of each algorithm predicts as the run measured it."""

import pytest

from tests.federated.interrupted import run_of, saved_accuracy

SILOS = ("silo-0", "silo-1")


@pytest.mark.parametrize(
    ("arm", "parameters", "keys", "clients", "error"),
    [
        ("centralized", {}, {"dropout": 0.0}, (), 0.0),
        ("distrans", {}, {"dropout": 0.0}, SILOS, 0.0),
        ("fediir", {}, {"dropout": 0.0}, (), 0.0),
        ("local", {}, {"dropout": 0.0}, SILOS, 0.0),
        # a saved model predicts with dropout off, a run with dropout on
        ("fedbr", {"pseudo": 8}, {}, (), 0.2),
        ("scaffold", {}, {"optimizer": "sgd"}, (), 0.2),
        ("vhl", {"virtual_per_class": 20}, {}, (), 0.2),
        # a saved model predicts from means, a run from samples; the Gaussians of FedSR are for training
        ("fedsr", {"dim": 8}, {"passes": 300}, (), 0.1),
        pytest.param("fedcr", {"dim": 8}, {"passes": 300}, SILOS, 0.1, marks=pytest.mark.slow),
    ],
)
def test_a_saved_model_predicts_as_it_was_measured(tmp_path, arm, parameters, keys, clients, error):
    run = run_of(tmp_path, {arm: parameters}, rounds=[1], **keys)
    assert run.model(arm).clients == clients
    saved, measured = saved_accuracy(run, arm, "silo-1" if clients else None)
    assert saved == pytest.approx(measured, abs=error)
