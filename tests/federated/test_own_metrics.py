"""Metrics that a run adds to the usual ones: at the clients, in the records, the summary and the report."""

import json

import numpy as np
import pytest
import torch

import uefl
from uefl import config
from uefl.errors import UserError
from uefl.metrics import METRICS, metric
from uefl.metrics.base import measured
from uefl.report.run_folder import read_run, summarize
from uefl.report.tables import arm_table

KEYS = {
    "run": {"precision": "fp32", "passes": 3, "metrics": ["balanced_accuracy"]},
    "model": {"encoder": "mlp", "width": 4, "hidden": 4},
    "training": {"rounds": [2], "local_epochs": 1, "batch_size": 8},
}


def clients():
    """Return two clients with test splits of 10 and of 30 rows."""
    rng = np.random.default_rng(0)
    return {
        name: tuple((rng.normal(size=(n, 3)), rng.integers(0, 2, n)) for n in (20, tests))
        for name, tests in (("small", 10), ("large", 30))
    }


def test_balanced_accuracy_is_the_mean_recall_of_present_classes():
    probs = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2])]
    labels = torch.tensor([0, 0, 0, 1, 1])
    found = METRICS["balanced_accuracy"](probs, labels)
    assert float(found) == pytest.approx((2 / 3 + 1 / 2) / 2)


def test_a_metric_is_in_the_records_the_summary_and_the_report(tmp_path):
    run = uefl.train(KEYS, out=tmp_path / "run", clients=clients(), arms=["fedavg"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {(line["client"], line["tested"]) for line in lines} == {("small", 10), ("large", 30)}
    last = {line["client"]: line["balanced_accuracy"] for line in lines if line["round"] == 2}
    expected = (10 * last["small"] + 30 * last["large"]) / 40
    assert run.summary["fedavg"]["balanced_accuracy"] == pytest.approx(expected)
    table = arm_table(read_run(tmp_path / "run"))
    assert table.rows[0][table.header.index("balanced_accuracy")] == f"{expected:.4g}"
    assert "balanced_accuracy" in (tmp_path / "run" / "report.md").read_text()


def test_without_the_key_nothing_is_added(tmp_path):
    keys = KEYS | {"run": {"precision": "fp32", "passes": 3}}
    uefl.train(keys, out=tmp_path / "run", clients=clients(), arms=["fedavg"])
    assert "tested" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_only_these_means_are_weighted():
    line = {"arm": "a", "iteration": 0, "entropy": 0.0, "nll": 0.0, "ece": 0.0, "bytes_sent": 0}
    lines = [
        line | {"round": 1, "client": name, "accuracy": value, "mine": value, "tested": count}
        for name, value, count in (("x", 0.0, 30), ("y", 1.0, 10))
    ]
    found = summarize(lines, 0.0, {"a": ["mine"]}, weighted=["mine"])["a"]
    assert (found["accuracy"], found["mine"]) == (0.5, 0.25)


@pytest.mark.parametrize("names", [["balanced"], ["balanced_accuracy"] * 2])
def test_names_that_are_no_metrics_are_refused(names):
    with pytest.raises(UserError, match=r"run\.metrics"):
        config.load("demo", run={"metrics": names})


@pytest.mark.parametrize("taken", ["accuracy", "perplexity", "tested"])
def test_a_metric_cannot_take_the_name_of_another_column(taken, monkeypatch):
    monkeypatch.setattr(METRICS, "_entries", dict(METRICS._all()))
    metric(taken)(lambda probs, labels: 1.0)
    with pytest.raises(UserError, match=rf"key 'run\.metrics': '{taken}'"):
        config.load("demo", run={"metrics": [taken]})


def test_a_metric_that_is_not_finite_leaves_its_client_out(tmp_path, monkeypatch):
    monkeypatch.setattr(METRICS, "_entries", dict(METRICS._all()))
    metric("broken")(lambda probs, labels: float("nan") if len(labels) == 10 else 0.5)
    keys = KEYS | {"run": KEYS["run"] | {"metrics": ["broken"], "quorum": 0.5}}
    run = uefl.train(keys, out=tmp_path / "run", clients=clients(), arms=["fedavg"])
    assert set(run.rejected["client"]) == {"small"}
    assert run.summary["fedavg"]["broken"] == 0.5


@pytest.mark.parametrize("value", [[1.0, 2.0], [1.0], "high", None, 1j, torch.ones(1, 1)])
def test_a_metric_that_is_no_number_is_named(monkeypatch, value):
    monkeypatch.setattr(METRICS, "_entries", dict(METRICS._all()))
    metric("mine")(lambda probs, labels: value)
    with pytest.raises(TypeError, match=r"'mine'.* number"):
        measured("mine", torch.eye(2), torch.tensor([0, 1]))


def test_a_metric_may_change_what_it_is_given(monkeypatch):
    monkeypatch.setattr(METRICS, "_entries", dict(METRICS._all()))
    metric("mine")(lambda probs, labels: probs.zero_().sum() + labels.zero_().sum())
    probs, labels = torch.eye(2), torch.tensor([0, 1])
    assert float(measured("mine", probs, labels)) == 0
    assert torch.equal(probs, torch.eye(2))
    assert labels.tolist() == [0, 1]
