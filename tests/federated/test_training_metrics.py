"""Measurements of a client during its training, ``work.metrics``."""

from __future__ import annotations

import json
import math
from typing import ClassVar

import pytest
import torch

import uefl
import uefl_kernels
from uefl.algorithms.base import Algorithm
from uefl.client.work import RESERVED
from uefl.errors import RunError

from .tiny import KEYS, arm, federation, finish, settings


class Measured(Algorithm):
    """FedAvg that records the mean of a value for every client.

    Half of the value depends on the seed, to tell members apart.
    """

    columns: ClassVar = {"drift": "mean of a term"}
    value = staticmethod(lambda work: torch.tensor(1.5))

    def after_round(self, work):
        work.metrics["drift"] = self.value(work)


def made(value=None, **keys):
    algorithm = Measured()
    if value is not None:
        algorithm.value = value
    return arm(settings("fedavg", **keys), algorithm=algorithm)[0]


def test_training_metrics_are_recorded_for_trained_clients_only():
    one = made(participation=0.5, rounds=[3])
    records = finish(one)
    assert {r["drift"] for r in records if r["train_loss"] is not None} == {1.5}
    assert all(("drift" in r) == (r["train_loss"] is not None) for r in records)
    assert sum("drift" in r for r in records) == 3 * 2


def test_noted_value_is_the_mean_over_images_of_the_round():
    """Batches of 16 divide 40 images into 16 + 16 + 8."""

    class Noted(Algorithm):
        def loss(self, work, batch):
            work.note("batch_size", torch.tensor(float(len(batch.labels))), len(batch.labels))
            return super().loss(work, batch)

    one = arm(settings("fedavg"), federation(sizes=(40, 40, 40)), algorithm=Noted())[0]
    records = finish(one)
    assert {r["batch_size"] for r in records} == {(2 * 16 * 16 + 8 * 8) / 40}


def test_training_accuracy_is_measured_in_the_steps():
    """A step that moves next to nothing keeps the model that was sent.

    So the accuracy is the one of this model in training mode.
    """
    one, workspace, _ = arm(
        settings("fedavg", optimizer="sgd", lr=1e-12, batch_size=48, dropout=0.0, rounds=[1])
    )
    records = finish(one)
    workspace.net.train()
    for client, record in zip(federation().clients, records, strict=True):
        train = client.load().train
        with torch.no_grad():
            right = workspace.net(workspace.normalize(train.images)).argmax(1) == train.labels
        assert record["train_accuracy"] == pytest.approx(float(right.double().mean()))
    assert {"vq_loss"} & records[0].keys() == set()


def test_the_loss_of_the_quantizer_is_recorded():
    """With a tiny step it is the value of the sent model, in training mode."""
    one, workspace, _ = arm(settings("uefl", optimizer="sgd", lr=1e-12, batch_size=48, rounds=[1]))
    codebook = one.members[0].state.tensors["part.0"].clone()
    records = finish(one)
    workspace.net.train()
    for client, record in zip(federation().clients, records, strict=True):
        out = uefl_kernels.vq(
            workspace.net.tokens(workspace.normalize(client.load().train.images)),
            codebook,
            commitment_weight=0.25,
        )
        assert record["vq_loss"] == pytest.approx(float(out.loss.detach()), rel=1e-4)


def test_metrics_are_averaged_over_members_that_have_a_value():
    seeds = set()

    def value(work):
        seeds.add(work.seed)
        return float(sorted(seeds).index(work.seed))

    one = made(value, uncertainty="ensemble", members=2)
    one.turn()
    assert len(seeds) == 2
    later = {r["drift"] for r in one.turn()}
    assert later <= {0.0, 0.5, 1.0}
    assert 0.5 in later


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_client_with_a_value_that_is_not_finite_is_rejected(value):
    with pytest.raises(RunError, match=rf"\b0 .*\b3 .*\(silo-0: .*drift .*{value};"):
        made(lambda work: value).turn()


@pytest.mark.parametrize("name", ["accuracy", "train_loss", "client"])
def test_a_reserved_name_is_refused(name):
    class Taken(Algorithm):
        def after_round(self, work):
            work.metrics[name] = 1.0

    with pytest.raises(ValueError, match=rf"work\.metrics: .*'{name}'"):
        arm(settings("fedavg"), algorithm=Taken())[0].turn()


def test_plain_run_records_only_built_in_names():
    found = set()
    for algorithm in ("fedavg", "fedbn"):
        cfg = settings(algorithm, personalized=True)
        found |= {key for record in finish(arm(cfg, federation(unseen=1))[0]) for key in record}
    assert found | {"reason", "epsilon", "tested"} == RESERVED | {
        "train_accuracy"
    }  # the loss of FedAvg notes this metric


def test_training_metric_is_in_file_and_report(tmp_path):
    data = {"data": {"clients": 2, "train_per_client": 32, "test_per_client": 12}}
    uefl.train(
        {**KEYS, **data, "run": {"threads": 1, "precision": "fp32", "passes": 2}},
        out=tmp_path / "run",
        arms={"measured": Measured()},
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["drift"] == 1.5 for line in lines)
    report = (tmp_path / "run" / "report.md").read_text()
    assert "`drift`: mean of a term." in report
    assert "| 1.5 |" in report
