"""Private tensors that serve only the training are in no prediction.

So they are in no saved model and make no global accuracy.
"""

from __future__ import annotations

import pytest
import torch

import uefl
from uefl.algorithms.base import Algorithm

from .tiny import KEYS, arm, finish, settings


class Counting(Algorithm):
    """FedAvg with clients that count their rounds."""

    def client_state(self, client):
        return {"turns": torch.zeros(())}

    def private_mean(self, states):
        return {"turns": torch.zeros(())}

    def before_round(self, work):
        work.private["turns"] = work.private["turns"] + 1


class Shifting(Counting):
    """Its count is added to the pixels, also where it predicts.

    The mean omits the weight of the count.
    """

    private_predicts = ("turns", "weight")

    def client_state(self, client):
        return super().client_state(client) | {"weight": torch.ones(())}

    def predict(self, work, images):
        return super().predict(work, images + work.private["turns"] * work.private["weight"])

    def infer(self, net, images, tensors):
        return net(images + tensors["turns"] * tensors["weight"])


class Undeclared(Shifting):
    private_predicts = ()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    keys = {
        **KEYS,
        "run": {"threads": 1, "precision": "fp32", "passes": 2},
        "training": {"rounds": [2], "local_epochs": 1},
    }
    data = {"clients": 2, "train_per_client": 32, "test_per_client": 12}
    arms = {"counting": Counting(), "shifting": Shifting()}
    return uefl.train(keys | {"data": data}, out=tmp_path_factory.mktemp("private") / "run", arms=arms)


def test_a_saved_model_predicts_without_a_client(run):
    model = run.model("counting")
    assert model.clients == ()
    assert model.predict(torch.zeros(3, *model.shape, dtype=torch.uint8)).shape == (3, len(model.classes))


def test_there_is_no_global_accuracy(run):
    assert "global_accuracy" not in run.summary["counting"]
    assert run.metrics[run.metrics.arm == "counting"].global_accuracy.isna().all()
    assert "global_accuracy" in run.summary["shifting"]


def test_tensors_for_predictions_are_saved_per_client(run):
    model = run.model("shifting")
    assert set(model.clients) == {"silo-0", "silo-1"}
    assert {float(own["turns"]) for own in model.members[0].clients.values()} == {2.0}


def test_a_prediction_sees_no_other_private_tensor():
    with pytest.raises(KeyError, match="turns"):
        finish(arm(settings("fedavg"), algorithm=Undeclared())[0])


def test_training_continues_with_all_private_state():
    one = arm(settings("fedavg", rounds=[3]), algorithm=Counting())[0]
    finish(one)
    assert {float(own["turns"]) for own in one.members[0].private.values()} == {3.0}
