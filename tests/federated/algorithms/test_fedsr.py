"""The two terms of FedSR have the values of their formulas.

Without them and without draws, FedSR is FedAvg.
"""

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from tests.federated.tiny import arm, finish, message_to, settings, state, values
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.fedsr import FedSR, divergence
from uefl.config import load
from uefl.errors import UserError
from uefl.models.gaussian import Gaussian, GaussianNet

OFF = {"norm_weight": 0.0, "divergence_weight": 0.0, "stochastic": False}


class GaussianFedAvg(FedAvg):
    """FedAvg of the mean features."""

    def build_model(self, spec):
        return GaussianNet(super().build_model(spec), 8, hidden=False)


KEYS = {
    "adam": {},
    "sgd bf16": {"optimizer": "sgd", "participation": 0.5, "precision": "bf16"},
    "pooled": {"pooled": True},
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_without_its_terms_and_draws_it_is_fedavg_bit_for_bit(keys):
    own = arm(settings("fedsr", dim=8, **OFF, **keys))[0]
    average = arm(settings("fedavg", **keys), algorithm=GaussianFedAvg())[0]
    assert finish(own) == finish(average)
    assert torch.equal(values(own), values(average))


def leaves(*numbers):
    return [torch.tensor(number, dtype=torch.float64, requires_grad=True) for number in numbers]


def test_the_divergence_and_its_gradients():
    """Check one dimension at q = mu = sigma = 1, m = 0 and r = 1, with rho = softplus(r)."""
    mean, std, m, q = leaves([[1.0]], [[1.0]], [[0.0]], 1.0)
    rho = nn.functional.softplus(torch.ones(1, 1, dtype=torch.float64))
    value = divergence(Gaussian(mean, std), m, rho, q)
    value.backward()
    found = [x.item() for x in (value, mean.grad, std.grad, m.grad, q.grad)]
    assert found == pytest.approx([0.3523396, 0.5798257, -0.4201743, -0.5798257, 0.1596514], abs=1e-6)


def test_the_divergence_at_the_start():
    """Check mu = 0 and sigma = softplus(0)."""
    zero, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    softplus = nn.functional.softplus
    assert float(divergence(Gaussian(zero, softplus(zero)), zero, softplus(one), one)) == pytest.approx(
        0.2783163, abs=1e-6
    )


def test_divergence_equals_torch_and_is_zero_for_equals():
    torch.manual_seed(0)
    mean, m = torch.randn(2, 5, 3, dtype=torch.float64)
    std, rho = torch.rand(2, 5, 3, dtype=torch.float64) + 0.5
    q = torch.tensor(0.7, dtype=torch.float64)
    expected = kl_divergence(Normal(q * mean, q * std), Normal(m, rho)).sum(1).mean()
    assert torch.allclose(divergence(Gaussian(mean, std), m, rho, q), expected)
    mean.requires_grad_(), std.requires_grad_(), m.requires_grad_()
    equal = divergence(Gaussian(mean, std), q * mean.detach(), q * std.detach(), q)
    equal.backward()
    assert equal.item() == pytest.approx(0.0, abs=1e-12)
    assert mean.grad.abs().max() < 1e-12
    assert std.grad.abs().max() < 1e-12


def gaussians(one):
    return [
        {name: own[name] for name in ("class_mean", "class_std", "scale")}
        for own in one.members[0].private.values()
    ]


def test_local_gaussians_differ_and_shared_ones_are_the_servers():
    local = arm(settings("fedsr", dim=8, lr=1e-2))[0]
    local.turn()
    first, second, _ = gaussians(local)
    assert not any(torch.equal(first[name], second[name]) for name in first)
    assert "class_mean" not in state(local).tensors

    shared = arm(settings("fedsr", dim=8, lr=1e-2, class_gaussians="shared"))[0]
    before = state(shared).tensors["class_mean"].clone()
    shared.turn()
    assert not torch.equal(state(shared).tensors["class_mean"], before)
    assert shared.members[0].private == {name: {} for name in shared.context.clients}


def test_each_term_lowers_its_quantity():
    """A large weight of the norm makes features short."""
    plain, short = (
        arm(settings("fedsr", dim=8, local_epochs=10, norm_weight=weight, divergence_weight=0.0))[0]
        for weight in (0.0, 1.0)
    )
    lengths = []
    for one in (plain, short):
        one.turn()
        client = one.engine._clients["silo-0"]
        workspace = client._workspace
        workspace.load(message_to(one, "silo-0", train=False))
        images = workspace.normalize(client._data().train.images)
        lengths.append(workspace.net.eval().distribution(images).mean.norm(dim=1).mean().item())
    assert lengths[1] < 0.5 * lengths[0]


def test_predictions_are_means_over_samples_and_disagree():
    records = finish(arm(settings("fedsr", dim=8, passes=20))[0])
    assert all(r["mutual_info"] > 1e-4 for r in records)
    assert all(r["mutual_info"] == 0 for r in finish(arm(settings("fedsr", dim=8, **OFF))[0]))


@pytest.mark.parametrize("encoder", ["cnn5x5", "resnet18_nopool"])
def test_other_heads_are_refused(encoder):
    keys = {"width": 4} if encoder == "cnn5x5" else {}
    with pytest.raises(UserError, match=r"encoder = 'cnn', .*'resnet18', .*'vgg16_bn'"):
        arm(load({"model": {"encoder": encoder, **keys}, "arms": {"fedsr": {}}}))


def test_an_infinite_divergence_is_refused():
    with pytest.raises(UserError, match=r"divergence_weight: .*0 .*FedL2R"):
        FedSR(stochastic=False)
