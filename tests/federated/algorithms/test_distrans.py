"""DisTrans follows the formulas of its mixtures.

Without the offset, the twin network trains as the single one.
"""

import pytest
import torch
from torch import nn

from tests.federated.tiny import arm, finish, message_to, settings, state, values
from uefl.algorithms.base import ModelSpec
from uefl.algorithms.distrans import DisTrans, TwinNet, mixtures
from uefl.config import load
from uefl.errors import UserError
from uefl.models.net import Net


def test_the_mixtures_mirror_each_other():
    """Check x = 1 and t = 3 with alpha = 0.2."""
    plus, minus = mixtures(torch.ones(2, 1, 1, 1), torch.full((1, 1, 1), 3.0), 0.2)
    assert plus.flatten().tolist() == pytest.approx([1.4, 1.4])
    assert minus.flatten().tolist() == pytest.approx([0.6, 0.6])
    assert torch.allclose((plus + minus) / 2, torch.ones(2, 1, 1, 1))


class EqualTwins(DisTrans):
    """A network with the last layer [A, A] / 2 and half its gradient, trained as layer A of FedAvg."""

    def build_model(self, spec):
        single, twin = Net(spec.settings, spec.shape, spec.classes), super().build_model(spec)
        assert isinstance(twin, TwinNet)
        twin.encoder.load_state_dict(single.encoder.state_dict())
        twin.head.fc1.load_state_dict(single.head.fc1.state_dict())
        twin.head.fc2.bias.data.copy_(single.head.fc2.bias.data)
        twin.head.fc2.weight.data.copy_(single.head.fc2.weight.data.repeat(1, 2) / 2)
        twin.head.fc2.weight.register_hook(lambda gradient: gradient / 2)
        return twin


def test_without_offset_it_trains_as_fedavg():
    """Compare steps of gradient descent, up to the bits that depend on the order of sums."""
    keys = {"optimizer": "sgd", "lr": 0.05, "dropout": 0.0, "rounds": [3], "local_epochs": 2}
    twin, single = (
        arm(settings("distrans", alpha=0.0, **keys), algorithm=EqualTwins(alpha=0.0)),
        arm(settings("fedavg", **keys)),
    )
    finish(twin[0]), finish(single[0])
    models = [
        workspace.named(one.members[0].state.tensors, one.members[0].private["silo-0"])
        for one, workspace, _ in (twin, single)
    ]
    ours, theirs = models
    ours["head.fc2.weight"] = ours["head.fc2.weight"].view(3, 2, 16).sum(1)
    start = arm(settings("fedavg", **keys))
    for name, tensor in start[1].named(start[0].members[0].state.tensors, {}).items():
        if "running" not in name:  # two forward passes a step move them further
            assert torch.allclose(ours[name], theirs[name], atol=2e-6), name
            assert not torch.equal(theirs[name], tensor) or name.endswith("bias"), name


def test_without_alpha_the_logits_do_not_depend_on_the_offset():
    cfg = settings("distrans", alpha=0.0)
    net = arm(cfg)[1].net.eval()
    images = torch.randn(4, 1, 8, 8)
    before = net(images)
    net.offset.fill_(5.0)
    assert torch.equal(net(images), before)


def test_gradient_of_the_offset_equals_finite_differences():
    torch.manual_seed(0)
    net = TwinNet(ModelSpec(settings("distrans").model, (1, 8, 8), 3), 0.2).double().eval()
    images, labels = torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    net.offset.normal_().requires_grad_()

    def loss():
        return nn.functional.cross_entropy(net(images), labels)

    loss().backward()
    for place in ((0, 0, 0), (0, 3, 5), (0, 7, 2)):
        with torch.no_grad():
            found = []
            for step in (1e-5, -2e-5):
                net.offset[place] += step
                found.append(loss())
            net.offset[place] += 1e-5
        assert float((found[0] - found[1]) / 2e-5) == pytest.approx(float(net.offset.grad[place]), rel=1e-5)


def offsets(one):
    return [own["net.buffers"].clone() for own in one.members[0].private.values()]


def test_offsets_are_drawn_once_and_stay_with_learning_rate_zero():
    one, workspace, _ = arm(settings("distrans", offset_lr=0.0))
    one.turn()
    first = offsets(one)
    assert all(tensor.shape == (64,) for tensor in first)
    assert not torch.equal(first[0], first[1])
    pixels = workspace._std.flatten() * first[0] + workspace._mean.flatten()
    assert 0 <= pixels.min() < 10
    assert 245 < pixels.max() <= 255.001
    one.turn()
    assert all(torch.equal(*pair) for pair in zip(first, offsets(one), strict=True))
    assert not workspace.net.offset.requires_grad


def test_members_of_an_ensemble_draw_their_own_offsets():
    one, _, _ = arm(settings("distrans", offset_lr=0.0, uncertainty="ensemble", members=2))
    one.turn()
    assert not torch.equal(*(each.private["silo-0"]["net.buffers"] for each in one.members))


def test_an_offset_moves_by_its_own_learning_rate():
    """Twice the rate of plain gradient descent gives twice the distance."""
    moved = []
    start = arm(settings("distrans", offset_lr=0.0, local_steps=1))[0]
    start.turn()
    for rate in (1.0, 2.0):
        one = arm(settings("distrans", offset_lr=rate, local_steps=1))[0]
        one.turn()
        moved.append(offsets(one)[0] - offsets(start)[0])
    assert moved[0].abs().max() > 0
    assert one.last["silo-0"]["offset_moved"] == pytest.approx(
        float(moved[1].norm() / offsets(start)[0].norm()), rel=1e-3
    )
    assert start.last["silo-0"]["offset_moved"] == 0
    assert torch.allclose(2 * moved[0], moved[1], atol=1e-6)


def test_averaged_offsets_are_the_servers():
    one, workspace, _ = arm(settings("distrans", offsets="mean"))
    assert not any("global_accuracy" in record for record in one.turn())
    assert one.members[0].private == {name: {} for name in one.context.clients}
    workspace.load(message_to(one, "silo-0", train=False))
    mean = workspace.net.offset.clone()
    local = arm(settings("distrans"))[0]
    local.turn()
    # clients of one size
    assert torch.allclose(mean.flatten(), torch.stack(offsets(local)).mean(0), atol=1e-6)
    one.turn()
    assert 0.3 < float(mean.std()) < float(offsets(local)[0].std())


def test_clients_that_never_trained_take_the_mean_of_the_offsets():
    one, _, _ = arm(settings("distrans"))
    one.turn()
    assert torch.allclose(
        one.members[0].private.mean(one.members[0].algorithm, one.have_trained)["net.buffers"],
        torch.stack(offsets(one)).mean(0),
        atol=1e-6,
    )
    assert len(state(one).tensors["buffers"]) > 0
    assert len(values(one)) > 0


def test_dropout_spreads_its_predictions():
    assert all(r["mutual_info"] > 0 for r in finish(arm(settings("distrans", dropout=0.5))[0]))


def test_other_networks_are_refused():
    with pytest.raises(UserError, match=r"encoder = 'cnn', .*'resnet18', .*'vgg16_bn'"):
        arm(load({"model": {"encoder": "resnet18_nopool"}, "arms": {"distrans": {}}}))
