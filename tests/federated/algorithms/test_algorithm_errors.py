"""An error in a user's algorithm is reported with the method that made it, and never ignored."""

import logging
import re

import pytest
import torch

from tests.federated.tiny import arm, settings
from uefl.aggregation import WeightedMean
from uefl.algorithms.base import Algorithm
from uefl.algorithms.fedavg import FedAvg
from uefl.errors import RunError


def turns(algorithm):
    """Run two turns: the first one trains, the second one measures."""
    one = arm(settings("fedavg"), algorithm=algorithm)[0]
    one.turn()
    one.turn()


class TwoMeans(Algorithm):
    def averages(self, state):
        return super().averages(state) | {"extra": WeightedMean(torch.zeros(2))}


class NoTensor(Algorithm):
    def client_state(self, client):
        return {"turns": 0.5}


class NoJson(Algorithm):
    def server_state(self, values, buffers, net):
        state = super().server_state(values, buffers, net)
        state.plain["sum"] = torch.zeros(2)
        return state


class NotTrained(Algorithm):
    def before_round(self, work):
        work.trained["offset"] = torch.zeros(2)


class NoMean(Algorithm):
    def loss(self, work, batch):
        return torch.nn.functional.cross_entropy(work.logits(batch.images), batch.labels, reduction="none")


class NoReturn(Algorithm):
    def loss(self, work, batch):
        super().loss(work, batch)


class NoPrediction(Algorithm):
    def predict(self, work, images):
        return work.logits(images).softmax(1)


class NoNumber(Algorithm):
    def record(self, state, client, turn):
        return {"length": state.tensors["values"].norm()}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (TwoMeans, "TwoMeans.averages: .*'extra'.*broadcast.*update"),
        (NoTensor, "NoTensor.client_state: 'turns'.*float.*tensor"),
        (NoJson, "state.plain: .*Tensor.*JSON"),
        (NotTrained, "work.trained: 'offset'.*gradient"),
        (NoMean, r"NoMean.loss: .*scalar.*\[16\]"),
        (NoReturn, "NoReturn.loss: .*scalar.*NoneType"),
        (NoPrediction, "NoPrediction.predict: .*Prediction.*Tensor"),
        (NoNumber, "NoNumber.record: 'length'.*Tensor.*number"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_the_method_is_named(kind, message):
    with pytest.raises((TypeError, ValueError), match=message):
        turns(kind())


@pytest.mark.parametrize("method", ["record", "measure"])
@pytest.mark.parametrize("name", ["accuracy", "round"])
def test_built_in_metrics_cannot_be_replaced(method, name):
    algorithm = type("Better", (Algorithm,), {method: lambda *arguments: {name: 1.0}})()
    with pytest.raises(ValueError, match=rf"Better\.{method}: .*'{name}'"):
        turns(algorithm)


def test_the_traceback_of_own_algorithms_is_logged_at_debug(caplog, monkeypatch):
    def loss(self, work, batch):
        raise RuntimeError("shapes")

    monkeypatch.setattr(FedAvg, "loss", loss)
    with pytest.raises(RunError, match=r"silo-0: .*shapes"), caplog.at_level(logging.DEBUG, "uefl"):
        arm(settings("fedavg"))[0].turn()
    said = next(record for record in caplog.records if record.exc_info)
    assert said.levelname == "DEBUG"
    assert re.search(r"silo-0: FedAvg\.loss .*RuntimeError", said.getMessage())


def test_error_outside_of_the_methods_names_no_method(caplog):
    with pytest.raises(TypeError), caplog.at_level(logging.ERROR, "uefl"):
        turns(NotTrained())
    (record,) = caplog.records
    assert re.search("silo-0: NotTrained .*TypeError", record.getMessage())
