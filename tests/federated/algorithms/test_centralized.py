"""Centralized training: with one client and a fresh optimizer it is FedAvg."""

from dataclasses import replace

import pytest
import torch

from tests.federated.algorithms.test_local import Uniform, alone
from tests.federated.tiny import arm, federation, finish, settings, values
from uefl.errors import UserError


def one_client():
    """Return a federation of one client, with the name that orders the server's batches and dropout."""
    fed = alone(federation(), 0)
    return replace(fed, clients=(replace(fed.clients[0], name="server"),))


@pytest.mark.parametrize(
    "keys", [{"dropout": 0.3}, {"optimizer": "sgd", "momentum": 0.9, "local_steps": 4}], ids=["adam", "sgd"]
)
def test_one_client_equals_fedavg_bit_for_bit(keys):
    own = arm(settings("centralized", keep_optimizer=False, **keys), one_client())[0]
    average = arm(settings("fedavg", **keys), one_client(), algorithm=Uniform())[0]
    measured = ("accuracy", "nll", "entropy", "holdout_entropy")
    assert [[r[k] for k in measured] for r in finish(own)] == [
        [r[k] for k in measured] for r in finish(average)
    ]
    assert torch.equal(values(own), values(average))


@pytest.mark.parametrize("keys", [{}, {"optimizer": "sgd", "momentum": 0.9}], ids=["adam", "momentum"])
def test_rounds_with_the_optimizer_kept_are_one_long_training(keys):
    """Compare three rounds of one epoch, which is a batch, with one round of three epochs."""
    keys |= {"batch_size": 1000, "dropout": 0.0}
    rounds = arm(settings("centralized", rounds=[3], **keys))[0]
    once = arm(settings("centralized", rounds=[1], local_epochs=3, **keys))[0]
    apart = arm(settings("centralized", rounds=[3], keep_optimizer=False, **keys))[0]
    for one in (rounds, once, apart):
        finish(one)
    assert torch.allclose(values(rounds), values(once), atol=1e-4)
    assert not torch.allclose(values(rounds), values(apart), atol=1e-3)


def test_uses_the_images_of_all_clients():
    one = arm(settings("centralized"), federation(sizes=(48, 32, 40)))[0]
    assert len(one.teacher._data.train) == 120
    records = finish(one)
    assert all(r["server_loss"] > 0 and r["train_loss"] is None and r["bytes_received"] == 0 for r in records)
    assert sorted({r["client"] for r in records}) == ["silo-0", "silo-1", "silo-2"]


def test_clients_that_keep_their_images_are_refused():
    def stays():
        raise UserError("the images of this client stay with it")

    fed = federation()
    workspace = arm(settings("centralized"), fed)[1]
    workspace.algorithm.check(fed, "arm", workspace.net)
    apart = replace(fed, clients=tuple(replace(client, load=stays) for client in fed.clients))
    with pytest.raises(UserError, match=r"image.* client"):
        workspace.algorithm.check(apart, "arm", workspace.net)


def test_members_of_an_ensemble_and_clients_that_never_train():
    one = arm(settings("centralized", uncertainty="ensemble", members=2), federation(unseen=1))[0]
    records = finish(one)
    assert not torch.equal(one.members[0].state.tensors["values"], one.members[1].state.tensors["values"])
    assert {r["client"] for r in records if r.get("unseen")} == {"unseen-0"}
