"""VHL adds separable noise images, and pulls features by the supervised contrastive loss.

Without virtual images it is FedAvg.
"""

import hashlib
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.federated.tiny import arm, finish, settings, values, without
from uefl.algorithms.vhl import VHL, contrast, virtual_images
from uefl.errors import UserError


def test_without_virtual_images_it_is_fedavg_bit_for_bit():
    # The extra classes make the flat tensor longer. Torch's fused Adam rounds its last elements in another
    # way on some CPUs; SGD does not.
    (own, workspace, _), average = (
        arm(settings("vhl", virtual_batch=0, optimizer="sgd")),
        arm(settings("fedavg", optimizer="sgd"))[0],
    )
    assert without(finish(own), "bytes") == without(finish(average), "bytes")
    extra = sum(p.numel() for p in workspace.net.head.virtual.parameters())
    assert torch.equal(values(own)[:-extra], values(average))


E = torch.eye(4)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [((0, 1, 0, 1), 1.2497e-6), ((0, 1, 1, 0), 14.2857155)],
    ids=["matched", "swapped"],
)
def test_the_pull_of_two_real_and_two_equal_virtual_features(labels, expected):
    features = torch.stack([E[0], E[1], E[0], E[1]])
    assert float(contrast(features.double(), torch.tensor(labels), 0.07)) == pytest.approx(expected, rel=1e-4)


def test_an_anchor_without_its_like_counts_as_zero():
    assert float(contrast(E[:3], torch.tensor([0, 1, 2]), 0.07)) == 0
    pair = torch.stack([E[0], E[0], E[1]])
    assert float(contrast(pair, torch.tensor([0, 0, 1]), 1.0)) == pytest.approx(
        2 / 3 * float(torch.tensor([1.0, 0.0]).logsumexp(0) - 1)
    )


def test_the_pull_is_scale_invariant_with_finite_gradients():
    features = torch.randn(
        6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True
    )
    labels = torch.tensor([0, 0, 1, 1, 2, 0])
    assert torch.autograd.gradcheck(lambda x: contrast(x, labels, 0.07), features)
    assert contrast(5 * features, labels, 0.07).item() == pytest.approx(
        contrast(features, labels, 0.07).item()
    )


def work_of(net, epoch=0):
    """Return a turn with virtual images, without dropout, and a batch of four real images."""
    work = SimpleNamespace(
        net=net.eval(),
        epoch=epoch,
        generator=torch.Generator().manual_seed(0),
        cross_entropy=cross_entropy,
        memory={"virtual": virtual_images(1, (1, 8, 8), 3, 5)},
        amp=lambda: torch.autocast("cpu", enabled=False),
        workspace=SimpleNamespace(normalize=lambda images: images / 255),
    )
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(7))
    return work, SimpleNamespace(images=images, labels=torch.tensor([0, 1, 2, 0]))


def test_the_features_of_virtual_images_are_not_pulled(monkeypatch):
    """Only real images get a gradient from the pull."""
    workspace, inputs = arm(settings("vhl"))[1], []
    tokens = workspace.net.tokens
    monkeypatch.setattr(
        workspace.net, "tokens", lambda images: inputs.append(images.requires_grad_()) or tokens(images)
    )
    algorithm = VHL(virtual_weight=0.0, virtual_contrast=0.0).bound(workspace.context)
    (slope,) = torch.autograd.grad(algorithm.loss(*work_of(workspace.net)), inputs[0])
    assert all(slope[:4].flatten(1).norm(dim=1) > 0)
    assert slope[4:].abs().sum() == 0


def test_every_client_has_the_same_virtual_images(monkeypatch):
    one = arm(settings("vhl"))[0]
    found = {}

    def spy(self, work, batch):
        found.setdefault(work.client, set()).add(
            hashlib.sha256(work.memory["virtual"].images.numpy().tobytes()).hexdigest()
        )

    monkeypatch.setattr(VHL, "after_batch", spy)
    one.turn(), virtual_images.cache_clear(), one.turn()
    assert found.keys() == {"silo-0", "silo-1", "silo-2"}
    assert len(set.union(*found.values())) == 1


def test_virtual_images_are_separable_noise():
    split = virtual_images(0, (3, 32, 32), 10, 200)
    pixels = split.images.float() / 255
    assert pixels.shape == (2000, 3, 32, 32)
    assert float(pixels.mean()) == pytest.approx(0.275, abs=0.02)
    assert float(pixels.std()) == pytest.approx(0.361, abs=0.02)
    means = torch.stack([pixels[split.labels == k].mean(0) for k in range(10)]).flatten(1)
    assert torch.equal(torch.cdist(pixels.flatten(1), means).argmin(1), split.labels)


def test_a_network_without_such_a_head_is_refused():
    with pytest.raises(UserError, match=r"arm 'arm': virtual .*encoder = 'cnn'"):
        VHL().check(None, "arm", torch.nn.Linear(2, 2))
