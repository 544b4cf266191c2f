"""FedGate: both layers learn, the holdout images weigh them, and the messages are those of FedAvg."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributions import Categorical

from tests.federated.tiny import arm, federation, finish, first_turn, settings
from uefl.algorithms.base import find
from uefl.algorithms.fedgate import GatedLayer, GatedNet
from uefl.errors import UserError


def started(**keys):
    one, workspace, _ = arm(settings("fedgate", rounds=[3], **keys))
    return one, workspace


def test_the_mixture_has_the_probabilities_of_both_layers():
    layer, x = GatedLayer(nn.Linear(5, 3)), torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    layer.own.weight.data.neg_()
    shared, own = layer.shared(x).softmax(-1), layer.own(x).softmax(-1)
    for weight in (0.0, 0.3, 1.0):
        layer.weight.fill_(weight)
        torch.testing.assert_close(layer(x).exp(), (1 - weight) * shared + weight * own)
        torch.testing.assert_close(layer(x).softmax(-1), layer(x).exp())


def test_only_the_own_layer_and_its_weight_stay_with_the_client():
    one, workspace = started()
    assert {name.rpartition("fc2.")[2] for name in workspace.private_names()} == {
        "own.weight",
        "own.bias",
        "weight",
    }
    own, of_fedper = (
        sum(tensor.numel() for tensor in space.private().values())
        for space in (workspace, arm(settings("fedper"))[1])
    )
    assert own == of_fedper + 1
    average = arm(settings("fedavg"))[1]
    assert len(one.members[0].state.tensors["values"]) == sum(p.numel() for p in average.net.parameters())


class TurnOnHoldout:
    """Stand in for a client's turn: the holdout probabilities are given, no network runs."""

    def __init__(self, workspace, shared, own):
        self.net, self.workspace, self.metrics = workspace.net, workspace, {}
        self.data = federation().clients[0].load()
        n, labels = len(self.data.holdout), self.data.holdout.labels
        self.both = torch.zeros(2, n, 3)
        for logits, chances in zip(self.both, (shared, own), strict=True):
            chances = torch.as_tensor(chances).expand(n)
            logits[:] = ((1 - chances) / 2).log()[:, None]
            logits[torch.arange(n), labels] = chances.log()

    def logits(self, images):
        assert self.net.gate.apart
        assert not self.net.training
        return self.both


@pytest.mark.parametrize(
    ("gate", "shared", "own", "weight"),
    [
        ("likelihood", 0.2, 0.9, 1.0),
        ("likelihood", 0.9, 0.2, 0.0),
        ("entropy", 0.6, 0.01, 1.0),  # wrong, but less uncertain: two classes remain
        ("entropy", 0.9, 0.2, 0.0),
    ],
)
def test_the_better_layer_gets_the_weight(gate, shared, own, weight):
    _, workspace = started(gate=gate)
    turn = TurnOnHoldout(workspace, shared, own)
    workspace.algorithm.before_round(turn)
    assert float(workspace.net.gate.weight) == turn.metrics["own_share"] == weight
    assert not workspace.net.gate.apart


@pytest.mark.parametrize(
    ("gate", "score", "mixes"),
    [
        ("likelihood", lambda mixed, labels: Categorical(mixed).log_prob(labels).sum(), True),
        ("entropy", lambda mixed, _: -Categorical(mixed).entropy().mean(), False),
    ],
)
def test_layers_that_err_on_different_images_are_mixed(gate, score, mixes):
    _, workspace = started(gate=gate)
    n = len(federation().clients[0].load().holdout)
    first = torch.arange(n) < n - 1
    turn = TurnOnHoldout(workspace, torch.where(first, 0.9, 0.01), torch.where(first, 0.5, 0.99))
    workspace.algorithm.before_round(turn)
    shared, own = turn.both.double().softmax(-1)
    weights, labels = [w / 10 for w in range(11)], turn.data.holdout.labels
    scores = {w: float(score((1 - w) * shared + w * own, labels)) for w in weights}
    best = max(scores, key=scores.get)
    assert (0 < best < 1) == mixes  # an entropy is concave in the weight
    assert turn.metrics["own_share"] == pytest.approx(best)


def test_the_loss_is_the_mean_of_both_cross_entropies():
    work = first_turn(settings("fedgate"))
    net, algorithm = work.net.eval(), work.workspace.algorithm
    net.gate.own.weight.data.neg_()
    batch = work.batch(torch.arange(6))
    loss = algorithm.loss(work, batch)
    net.gate.weight.zero_()
    shared = net(batch.images).detach()
    net.gate.weight.fill_(1)
    own = net(batch.images).detach()
    wanted = -(shared + own).double()[torch.arange(6), batch.labels].mean() / 2
    torch.testing.assert_close(loss.detach().double(), wanted, rtol=1e-6, atol=1e-6)
    loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in (net.gate.own.weight, net.gate.shared.weight))


def test_a_run_records_the_share_of_the_own_layer():
    records = finish(started()[0])
    shares = [r["own_share"] for r in records if r.get("own_share") is not None]
    assert shares
    assert all(0 <= share <= 1 for share in shares)


class TwoLayers(nn.Module):
    """Two linear layers, and an operation after them."""

    def __init__(self, after=lambda logits: logits, names=("one", "two")):
        super().__init__()
        for name in names:
            self.add_module(name, nn.LazyLinear(3))
        self.after = after

    def forward(self, x):
        return self.after(self.two(self.one(x.flatten(1))))


@pytest.mark.parametrize("algorithm", ["fedgate", "tpt"])
@pytest.mark.parametrize(
    ("keys", "fits"),
    [
        ({}, True),
        ({"after": lambda z: z.log_softmax(-1)}, True),
        ({"after": lambda z: z.log_softmax(0)}, False),
        ({"after": lambda z: 5 * z}, False),
        ({"after": lambda z: z.view(4, 9)}, False),
        ({"names": ("two", "one")}, False),
    ],
)
def test_the_network_must_return_the_output_of_its_last_layer(algorithm, keys, fits):
    kind, fed, net = find(algorithm), federation(), TwoLayers(**keys)
    net.one(torch.zeros(1, math.prod(fed.shape)))
    net.two(torch.zeros(1, 3))
    net = GatedNet(net) if algorithm == "fedgate" else net
    with nullcontext() if fits else pytest.raises(UserError, match=r"'one': .*unchanged"):
        kind(kind.Parameters()).check(fed, "one", net)


def test_dropout_after_the_gate_is_refused():
    _, workspace, _ = arm(settings("fedgate", model={"logit_dropout": True}))
    with pytest.raises(UserError, match=r"'gate': .*model\.logit_dropout"):
        workspace.algorithm.check(federation(), "gate", workspace.net)
