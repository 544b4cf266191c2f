"""Local training: each client is a federation of itself."""

import pytest
import torch

from tests.federated.tiny import arm, federation, finish, settings, values
from uefl.algorithms.fedavg import FedAvg
from uefl.data.federation import Federation
from uefl.errors import UserError


class Uniform(FedAvg):
    """An average over one client is then its model, without rounding."""

    def weight(self, update):
        return 1.0


def alone(fed: Federation, i: int) -> Federation:
    return Federation(fed.kind, (fed.clients[i],), fed.classes, fed.shape, fed.mean, fed.std)


def of(records, client):
    names = ("global_accuracy", "bytes_sent", "bytes_received")
    return [
        {k: v for k, v in record.items() if k not in names}
        for record in records
        if record["client"] == client
    ]


@pytest.mark.parametrize("keys", [{}, {"optimizer": "sgd", "lr": 0.1, "local_steps": 4}], ids=["adam", "sgd"])
def test_each_client_equals_fedavg_of_one_client_bit_for_bit(keys):
    fed = federation(sizes=(48, 32, 40))
    together, _, _ = arm(settings("local", **keys), fed)
    records = finish(together)
    for i, name in enumerate(together.context.clients):
        own = arm(settings("fedavg", **keys), alone(fed, i), algorithm=Uniform())[0]
        assert of(finish(own), name) == of(records, name)
        assert torch.equal(together.members[0].private[name]["net.values"], values(own))
    assert len(values(together)) == 0


def test_clients_send_nothing_and_get_only_the_measured_mean():
    one, workspace, _ = arm(settings("local"))
    records = finish(one)
    model = 4 * (workspace.flat.values.numel() + workspace.flat.buffers.numel())
    assert {r["bytes_received"] for r in records} == {0}
    # the mean, to measure it in each of three rounds
    assert sum(r["bytes_sent"] for r in records if r["client"] == "silo-0") == 3 * model


def test_clients_that_never_train_are_refused():
    fed = federation(unseen=1)
    _, workspace, _ = arm(settings("local"), fed)
    with pytest.raises(UserError, match="arm 'arm': client 'unseen-0'"):
        workspace.algorithm.check(fed, "arm", workspace.net)
