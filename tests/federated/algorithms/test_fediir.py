"""FedIIR has the term and the gradients of the closed form."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.federated.algorithms.test_local import alone
from tests.federated.tiny import arm, federation, settings, state, values
from uefl.algorithms.fediir import FedIIR
from uefl.client.work import Batch
from uefl.errors import UserError


def turn(head, average):
    """Return a turn of a network that consists of its head."""
    message = SimpleNamespace(tensors={"gradient": average})
    return SimpleNamespace(net=head, logits=head, message=message, cross_entropy=nn.functional.cross_entropy)


def test_the_values_of_two_features():
    """Check h = (1, 2), W = 0 and b = 0 with two classes, labels 0 and 1, and no average yet."""
    head = nn.Linear(1, 2).double()
    nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
    features = torch.tensor([[1.0], [2.0]], dtype=torch.float64, requires_grad=True)
    labels, average = torch.tensor([0, 1]), torch.zeros(4, dtype=torch.float64)
    work = turn(head, average)
    batch = Batch(features, torch.arange(2), labels)
    plain = nn.functional.cross_entropy(head(features), labels)
    assert plain.item() == pytest.approx(0.6931472)
    gradient = FedIIR(layers="last")._gradient(work, plain, create_graph=False)
    assert gradient.tolist() == pytest.approx([0.25, -0.25, 0.0, 0.0])
    term = FedIIR(layers="last", invariance=1.0).loss(work, batch) - nn.functional.cross_entropy(
        head(features), labels
    )
    assert term.item() == pytest.approx(0.125)
    found = torch.autograd.grad(term, [head.weight, head.bias, features])
    assert [x for part in found for x in part.flatten().tolist()] == pytest.approx(
        [0.625, -0.625, 0.375, -0.375, -0.25, 0.25]
    )


def test_gradients_equal_the_closed_form():
    """A linear head has u_i = J_i (A h_i + a), dR/dW = 2/B sum u_i h_i', dR/dh_i = 2/B (W' u_i + A' p_i)."""
    torch.manual_seed(0)
    images, inputs, classes = 6, 4, 3
    head = nn.Linear(inputs, classes).double()
    h = torch.randn(images, inputs, dtype=torch.float64, requires_grad=True)
    labels, average = (
        torch.arange(images) % classes,
        torch.randn(classes * inputs + classes, dtype=torch.float64),
    )
    batch = Batch(h, torch.arange(images), labels)
    work = turn(head, average)
    term = FedIIR(layers="last", invariance=1.0).loss(work, batch) - nn.functional.cross_entropy(
        head(h), labels
    )
    found = torch.autograd.grad(term, [head.weight, head.bias, h])

    with torch.no_grad():
        probs = head(h).softmax(1)
        p = probs - nn.functional.one_hot(labels, classes)
        g_weight, g_bias = average[: classes * inputs].view(classes, inputs), average[classes * inputs :]
        a_weight, a_bias = p.T @ h / images - g_weight, p.mean(0) - g_bias
        v = h @ a_weight.T + a_bias
        u = probs * v - probs * (probs * v).sum(1, keepdim=True)
        expected = [
            2 / images * u.T @ h,
            2 / images * u.sum(0),
            2 / images * (u @ head.weight + p @ a_weight),
        ]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-14)


def test_the_term_is_zero_for_a_full_batch_at_the_global_model():
    """With one client, one batch, decay 0 and no dropout, the average is the gradient of the first step."""
    fed = federation(sizes=(48,), noise=(0.1,))
    keys = {"batch_size": 48, "local_steps": 1, "dropout": 0.0, "optimizer": "sgd", "lr": 1.0}
    for layers in ("last", "head"):
        own = arm(settings("fediir", layers=layers, decay=0.0, invariance=1.0, **keys), fed)[0]
        average = arm(settings("fedavg", **keys), fed)[0]
        own.turn(), average.turn()
        assert torch.allclose(values(own), values(average), atol=1e-5)
        assert own.last["silo-0"]["train_loss"] == pytest.approx(
            average.last["silo-0"]["train_loss"], abs=1e-6
        )
        assert state(own).tensors["gradient"].norm() > 1e-3


def test_the_average_is_exponential():
    """For a constant gradient g, the average after T rounds is (1 - 0.95^T) g."""
    keys = {"batch_size": 1000, "dropout": 0.0, "optimizer": "sgd", "lr": 1e-12, "rounds": [4]}
    fed = federation(sizes=(48, 24), noise=(0.1, 0.5))
    one, whole = (arm(settings("fediir", decay=decay, **keys), fed)[0] for decay in (0.95, 0.0))
    whole.turn()
    for T in range(1, 4):
        one.turn()
        assert torch.allclose(
            state(one).tensors["gradient"], (1 - 0.95**T) * state(whole).tensors["gradient"], atol=1e-5
        )


def test_clients_count_by_their_batches():
    """The mean is over all batches: a client with two batches counts twice as much as a client with one."""
    cfg, fed = (
        settings("fediir", batch_size=24, dropout=0.0, decay=0.0),
        federation(sizes=(48, 24), noise=(0.1, 0.5)),
    )
    gradients = []
    for clients in (fed, alone(fed, 0), alone(fed, 1)):
        one = arm(cfg, clients)[0]
        one.turn()
        gradients.append(state(one).tensors["gradient"])
    assert torch.allclose(gradients[0], (2 * gradients[1] + gradients[2]) / 3, atol=1e-6)
    assert not torch.allclose(gradients[0], (gradients[1] + gradients[2]) / 2, atol=1e-3)


def test_the_exchange_is_counted_and_the_term_changes_the_model():
    own, average = arm(settings("fediir", layers="last", invariance=1.0))[0], arm(settings("fedavg"))[0]
    own.turn(), average.turn()
    assert not torch.equal(values(own), values(average))
    mine, theirs = (one.turn()[0] for one in (own, average))
    floats = 16 * 3 + 3
    # the sum of the gradients, and the number of batches
    assert mine["bytes_received"] - theirs["bytes_received"] == 4 * floats + 8
    assert mine["bytes_sent"] == 2 * theirs["bytes_sent"] + 4 * floats  # the model twice, and the average


def test_a_client_without_a_reply_is_rejected():
    one, _, notices = arm(settings("fediir", rounds=[1]))
    original = one.engine._clients["silo-1"]

    def broken(message):
        if "ask" in message.options:
            raise RuntimeError("broken")
        return original(message)

    one.engine._clients["silo-1"] = broken
    one.turn()
    assert notices == ["round 1: rejected silo-1: broken"]
    assert [line["reason"] for line in one.rejected] == ["broken"]
    assert state(one).tensors["gradient"].norm() > 0


def test_a_network_without_such_layers_is_refused():
    with pytest.raises(UserError, match=r"key 'arms.arm.layers': .*'head'"):
        FedIIR(layers="head").check(federation(), "arm", nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
