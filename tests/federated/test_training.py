"""The step loop of a client: optimizers of torch, a budget in epochs or in steps."""

import pytest
import torch
from torch import nn

from tests.federated.algorithms.test_local import alone
from tests.federated.tiny import arm, federation, settings, values, workspace_of
from uefl.algorithms.base import Algorithm
from uefl.client.client import Clients
from uefl.engines.base import Message

OPTIMIZERS = {
    "adam": ({"weight_decay": 0.1}, torch.optim.Adam),
    "adamw": ({"weight_decay": 0.1}, torch.optim.AdamW),
    "sgd": ({"weight_decay": 0.1, "momentum": 0.9}, torch.optim.SGD),
}


class Linear(Algorithm):
    """A network of one layer."""

    def build_model(self, spec):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, spec.classes))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_round_of_one_client_is_a_plain_loop_of_torch(name):
    keys, optimizer = OPTIMIZERS[name]
    fed = alone(federation(), 0)
    one, workspace, _ = arm(
        settings("fedavg", optimizer=name, lr=0.05, batch_size=1000, local_steps=3, **keys),
        fed,
        algorithm=Linear(),
    )
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    nn.utils.vector_to_parameters(values(one).clone(), net.parameters())
    train = fed.clients[0].load().train
    plain = optimizer(net.parameters(), lr=0.05, **keys)
    for _ in range(3):
        plain.zero_grad()
        nn.functional.cross_entropy(net(workspace.normalize(train.images)), train.labels).backward()
        plain.step()
    before = values(one).clone()
    one.turn()
    assert torch.allclose(values(one), nn.utils.parameters_to_vector(net.parameters()), atol=1e-5)
    assert not torch.allclose(values(one), before, atol=1e-2)


class Near(Algorithm):
    """The loss has the proximal term of FedProx, over the flat parameters."""

    def loss(self, work, batch):
        distance = work.workspace.flat.values - work.message.tensors["values"]
        return super().loss(work, batch) + 5.0 * distance.square().sum()


def test_a_loss_may_use_the_flat_parameters():
    settings_of = {"optimizer": "sgd", "lr": 0.02, "batch_size": 4}
    near, _, _ = arm(settings("fedavg", **settings_of), algorithm=Near())
    prox, _, _ = arm(settings("fedprox", mu=10.0, **settings_of))
    plain, _, _ = arm(settings("fedavg", **settings_of))
    for one in (near, prox, plain):
        one.exchange(measure=False, train=True)
    torch.testing.assert_close(values(near), values(prox), rtol=1e-5, atol=1e-6)
    assert float((values(near) - values(plain)).abs().max()) > 1e-3


def test_the_training_loss_is_the_mean_over_images():
    """The last batch is smaller than the others."""
    fed = alone(federation(sizes=(48, 48, 48)), 0)
    cfg = settings("fedavg", optimizer="sgd", lr=1e-9, batch_size=20, local_epochs=1)
    one, workspace, _ = arm(cfg, fed, algorithm=Linear())
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    nn.utils.vector_to_parameters(values(one).clone(), net.parameters())
    train = fed.clients[0].load().train
    loss = nn.functional.cross_entropy(net(workspace.normalize(train.images)), train.labels)
    one.turn()
    assert one.last["silo-0"]["train_loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "steps"), [({"local_epochs": 2}, 2 * 3), ({"local_steps": 5}, 5), ({"local_steps": 2}, 2)]
)
def test_the_budget_is_in_epochs_or_in_steps(keys, steps):
    fed = alone(federation(sizes=(48, 48, 48)), 0)
    one = arm(settings("fedavg", batch_size=16, **keys), fed, algorithm=Linear())[0]
    one.turn()
    assert one.last["silo-0"]["steps"] == steps


def test_replies_are_no_views_of_the_resident_network():
    class Live(Algorithm):
        def after_round(self, work):
            work.private["mine"] = work.values

    fed = federation()
    cfg = settings("fedavg")
    workspace = workspace_of(cfg, fed, Live())
    start = workspace.initial(0)[0]
    clients = Clients(fed.clients, workspace.device).handlers(workspace)
    replies = [
        clients[client.name](
            Message({name: t.clone() for name, t in start.items()}, {"train": True, "round": 0, "seed": 0})
        )
        for client in fed.clients[:2]
    ]
    for reply in replies:
        assert torch.equal(reply.tensors["values"], reply.private["mine"])
    assert not torch.equal(replies[0].tensors["values"], replies[1].tensors["values"])
