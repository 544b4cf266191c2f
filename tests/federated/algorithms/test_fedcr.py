"""The divergence and the product of experts of FedCR have the values of their formulas.

Without them and without draws, FedCR is FedPer.
"""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from tests.federated.algorithms.test_local import alone
from tests.federated.tiny import arm, federation, finish, first_turn, settings, split, state, values
from uefl.algorithms.fedcr import FedCR, ProductOfExperts, divergence, sums
from uefl.algorithms.fedper import FedPer
from uefl.algorithms.gaussian_features import GaussianFeatures
from uefl.data.federation import ClientData, Federation, LabeledData, Split
from uefl.engines.base import Message, Reply
from uefl.errors import UserError
from uefl.models.gaussian import Gaussian, GaussianNet


class GaussianFedPer(FedPer):
    """FedPer of the mean features."""

    def build_model(self, spec):
        return super().build_model(replace(spec, given=lambda: GaussianNet(spec.network(), 8, hidden=True)))


@pytest.mark.parametrize(
    "keys", [{}, {"optimizer": "sgd", "participation": 0.5, "precision": "bf16"}], ids=["adam", "sgd bf16"]
)
def test_without_divergence_and_draws_it_is_fedper_bit_for_bit(keys):
    own = arm(
        settings("fedcr", dim=8, beta=0.0, stochastic=False, gradient_bound=0.0, head_epochs=0, **keys)
    )[0]
    per = arm(settings("fedper", personal="last", **keys), algorithm=GaussianFedPer())[0]
    assert finish(own) == finish(per)
    assert torch.equal(values(own), values(per))
    for mine, theirs in zip(own.members[0].private.values(), per.members[0].private.values(), strict=True):
        assert mine.keys() == theirs.keys() == {"net.values", "net.buffers"}
        assert torch.equal(mine["net.values"], theirs["net.values"])


def test_the_divergence_begins_with_the_class():
    """Check m = 0, s = 1, mu = 1 and sigma = 2, which gives 1.3068528 if the Gaussians are exchanged."""
    mean = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    std = torch.full((1, 1), 2.0, dtype=torch.float64, requires_grad=True)
    of_class = Gaussian(torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64))
    value = divergence(of_class, Gaussian(mean, std))
    value.backward()
    assert [x.item() for x in (value, mean.grad, std.grad)] == pytest.approx(
        [0.4431472, 0.25, 0.25], abs=1e-6
    )


def test_divergence_equals_torch():
    torch.manual_seed(0)
    means, stds = torch.randn(2, 5, 3, dtype=torch.float64), torch.rand(2, 5, 3, dtype=torch.float64) + 0.5
    expected = kl_divergence(Normal(means[0], stds[0]), Normal(means[1], stds[1])).sum(1).mean()
    assert torch.allclose(divergence(Gaussian(means[0], stds[0]), Gaussian(means[1], stds[1])), expected)


def start(classes=3, d=4):
    return torch.stack([torch.zeros(classes, d), torch.ones(classes, d)])


def test_product_of_two_clients_with_a_missing_class():
    """N(1, 1) twice, times N(0, 1), has mean 2/3 and deviation 1 / sqrt 3."""
    product = ProductOfExperts(torch.tensor([[[3.0], [3.0]], [[2.0], [2.0]]]), 1.0)
    product.add(*sums(Gaussian(torch.ones(2, 1), torch.ones(2, 1)), torch.tensor([0, 0]), 2))
    means, stds = product.result()
    assert means[:, 0].tolist() == pytest.approx([2 / 3, 3.0])
    assert stds[:, 0].tolist() == pytest.approx([0.5773503, 2.0])


def test_rate_mixes_the_product_with_the_previous_one():
    product, old = ProductOfExperts(start(1, 1), 0.25), start(1, 1)
    product.add(torch.full((1, 1), 2.0), torch.full((1, 1), 2.0))
    assert product.result().flatten().tolist() == pytest.approx([0.25 * 2 / 3, 0.75 + 0.25 * 0.5773503])
    kept = ProductOfExperts(old, 0.0)
    kept.add(torch.full((1, 1), 2.0), torch.full((1, 1), 2.0))
    assert torch.equal(kept.result(), old)


def test_the_product_ignores_the_order_of_images_and_clients():
    torch.manual_seed(0)
    gaussian, labels = Gaussian(torch.randn(20, 4), torch.rand(20, 4) + 0.1), torch.arange(20) % 3
    results = []
    for order in (torch.arange(20), torch.randperm(20)):
        product = ProductOfExperts(start(), 1.0)
        for half in order.split(7):
            product.add(*sums(Gaussian(gaussian.mean[half], gaussian.std[half]), labels[half], 3))
        results.append(product.result())
    assert torch.allclose(*results, rtol=1e-6, atol=0)


def test_training_uses_only_the_last_pass():
    """The precisions count the images, and class 2 without images keeps the Gaussian N(0, 1)."""
    images = split(48, 0, 0.1)
    train = Split(images.images[images.labels < 2], images.labels[images.labels < 2])
    fed = federation()
    one_silo = ClientData.of("silo-0", LabeledData(train, split(12, 1, 0.1), split(12, 2, 0.1)))
    fed = Federation(fed.kind, (one_silo,), fed.classes, fed.shape, fed.mean, fed.std)
    deviations = []

    class SumsWatched(FedCR):
        def loss(self, work, batch):
            loss = super().loss(work, batch)
            summed.add((work.epoch, bool(work.memory["sums"].any())))
            return loss

    for epochs in (1, 3):
        cfg, summed = settings("fedcr", local_epochs=epochs, optimizer="sgd", lr=1e-9), set()
        one = arm(cfg, fed, algorithm=SumsWatched(dim=8, samples=2))[0]
        one.turn()
        assert summed == {(epoch, epoch == epochs - 1) for epoch in range(epochs)}
        means, stds = state(one).tensors["classes"]
        assert torch.equal(means[2], torch.zeros(8))
        assert torch.equal(stds[2], torch.ones(8))
        assert bool((stds[:2] < 0.5).all())
        deviations.append(stds[:2])
    assert torch.allclose(*deviations, rtol=0.05)  # three times the images would make it 1 / sqrt 3


def test_divergence_changes_the_encoder_and_gaussians_are_sent():
    with_it, without = (arm(settings("fedcr", dim=8, beta=beta, samples=2))[0] for beta in (0.1, 0.0))
    with_it.turn(), without.turn()
    assert not torch.equal(values(with_it), values(without))
    sent = [one.turn()[0]["bytes_sent"] for one in (with_it, without)]
    assert sent[0] - sent[1] == 2 * 3 * 8 * 4


def test_clients_train_only_their_heads_at_the_end():
    """A client without a part in the last round trains its head, too."""
    sgd = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.1}
    keys = {"rounds": [2], "participation": 0.6, "samples": 2, **sgd}
    tuned, plain = (arm(settings("fedcr", dim=8, head_epochs=epochs, **keys))[0] for epochs in (2, 0))
    for one in (tuned, plain):
        one.turn(), one.turn()
    assert all(
        torch.equal(a["net.values"], b["net.values"])
        for a, b in zip(tuned.members[0].private.values(), plain.members[0].private.values(), strict=True)
    )
    ours, theirs = tuned.turn(), plain.turn()
    assert tuned.finished
    assert torch.equal(values(tuned), values(plain))
    assert torch.equal(state(tuned).tensors["buffers"], state(plain).tensors["buffers"])
    assert not any(
        torch.equal(a["net.values"], b["net.values"])
        for a, b in zip(tuned.members[0].private.values(), plain.members[0].private.values(), strict=True)
    )
    assert all(mine["nll"] != other["nll"] for mine, other in zip(ours, theirs, strict=True))


def test_heads_train_with_the_last_rate_of_a_schedule():
    heads = [
        arm(settings("fedcr", dim=8, rounds=[2], lr_schedule="cosine", head_epochs=epochs, samples=2))[0]
        for epochs in (2, 0)
    ]
    finish(heads[0]), finish(heads[1])
    assert not any(
        torch.equal(*(one.members[0].private[name]["net.values"] for one in heads))
        for name in heads[0].context.clients
    )


def test_a_client_that_trains_only_its_head_is_measured_with_it():
    """One of three clients takes part in the only round, and the others still have own heads."""
    keys = {"rounds": [1], "participation": 0.3, "samples": 2}
    tuned, plain = (arm(settings("fedcr", dim=8, head_epochs=epochs, **keys))[0] for epochs in (2, 0))
    finish(tuned), finish(plain)
    assert len(plain.have_trained) == 1
    assert tuned.have_trained == list(tuned.context.clients)


def test_a_client_whose_head_cannot_be_trained_keeps_it():
    one, _, notices = arm(settings("fedcr", dim=8, rounds=[1]))
    original = one.engine._clients["silo-1"]

    def broken(message):
        if "ask" in message.options:
            raise RuntimeError("broken")
        return original(message)

    one.engine._clients["silo-1"] = broken
    assert len(finish(one)) == 3
    assert notices == ["round 2: rejected silo-1: broken"]


def test_a_long_gradient_is_shortened_and_a_short_one_is_not():
    steps = {}
    for bound in (0.0, 1e-3, 1e6):
        one, workspace, _ = arm(
            settings("fedcr", dim=8, gradient_bound=bound, optimizer="sgd", lr=1.0, local_steps=1, samples=2),
            alone(federation(), 0),
        )
        before = workspace.named(state(one).tensors, one.members[0].private["silo-0"])
        one.turn()
        after = workspace.named(state(one).tensors, one.members[0].private["silo-0"])
        moved = [(after[name] - before[name]).flatten() for name in before if "running" not in name]
        steps[bound] = torch.cat(moved)
    assert steps[0.0].norm() > 0.1
    assert steps[1e-3].norm().item() == pytest.approx(1e-3, rel=1e-2)
    assert torch.nn.functional.cosine_similarity(steps[0.0], steps[1e-3], dim=0) > 0.999
    assert torch.equal(steps[0.0], steps[1e6])


def test_impossible_gaussians_are_refused():
    """With a far mean, the loss of the other clients would overflow."""
    for precision, weighted, why in [(-1.0, 0.0, "precision"), (0.0, 1.0, "mean"), (2.0, -2e4, "1000")]:
        reply = Reply(
            "a", 1, {"precision": torch.tensor([precision]), "weighted_mean": torch.tensor([weighted])}
        )
        assert why in FedCR().rejection(Message(), reply)


def test_head_phase_trains_on_the_measured_encoder():
    """The encoder uses its running statistics, which do not change, and gets no gradient."""
    work = first_turn(settings("fedcr", dim=8, samples=2))
    before = {name: buffer.clone() for name, buffer in work.net.named_buffers()}
    work.workspace.flat.values.grad.zero_()
    work.workspace.algorithm._head_loss(work, work.batch(torch.arange(6))).backward()
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in work.net.named_buffers())
    with_gradient = {
        name.partition(".")[0]
        for name, p in work.net.named_parameters()
        if p.grad is not None and p.grad.abs().max() > 0
    }
    assert with_gradient == {"head"}


def test_head_phase_moves_only_the_head():
    work = first_turn(settings("fedcr", dim=8, samples=2, head_epochs=1, weight_decay=0.1))
    work.message.options["ask"] = "0/0/1"
    before = work.workspace.shared()["values"].clone(), work.workspace.private()["net.values"].clone()
    work.workspace.algorithm.reply(work)
    assert torch.equal(work.workspace.shared()["values"], before[0])
    assert not torch.equal(work.workspace.private()["net.values"], before[1])


def test_the_mean_of_the_logits_predicts():
    """With a large spread, the mean of logits, not of probabilities, is close to the logits of the mean."""
    _, workspace, _ = arm(settings("fedcr", dim=8, precision="fp32"))
    net = workspace.net.eval()
    net.gaussian.bias.data[8:], net.head.bias.data[0] = 10.0, 2.0
    images = torch.randn(5, 1, 8, 8)
    work = SimpleNamespace(net=net, passes=4000, amp=nullcontext)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = net(images).softmax(1)
        ours, other = FedCR().predict(work, images), GaussianFeatures().predict(work, images)
    assert torch.allclose(ours.probs, expected, atol=0.05)
    assert (other.probs - expected).abs().max() > 0.1
    assert torch.allclose(ours.expected_entropy, other.expected_entropy, atol=0.05)


def test_an_infinite_divergence_is_refused():
    with pytest.raises(UserError, match=r"beta: .*0.*stochastic = true"):
        FedCR(stochastic=False)
