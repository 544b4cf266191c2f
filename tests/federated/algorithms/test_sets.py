"""The losses of the clients of FedUL and its baselines: batches, losses, and the penalty."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.federated.tiny import finish
from tests.federated.tiny_sets import arm, federation, settings
from uefl import config
from uefl.algorithms.fedul.fedavg_labeled import FedAvgLabeled
from uefl.algorithms.fedul.fedllp import FedLLP
from uefl.algorithms.fedul.fedpl import self_labeled
from uefl.client.client import Client
from uefl.client.work import Work
from uefl.data import build
from uefl.engines.base import Message
from uefl.seeds import derive


def turn(name: str, round: int = 0, data: Any = None, **keys: Any) -> Work:
    """Return the turn of the only client, before its first step."""
    fed = federation(clients=1)
    one, workspace, _ = arm(settings(name, **keys), fed)
    message = Message(
        {k: one.members[0].state.tensors[k] for k in ("values", "buffers")}, {"seed": 0, "round": round}
    )
    work = Client("client-0", lambda: data or fed.clients[0].load(), workspace, b"")._work(message)
    workspace.load(message)
    work.epochs = workspace.context.training.local_epochs
    workspace.algorithm.before_round(work)
    return work


def loss(work: Work, batch: Any) -> torch.Tensor:
    return work.workspace.algorithm.loss(work, batch)


def test_batches_cover_an_epoch_and_leave_out_a_single_image():
    work = turn("fedul", batch_size=59)  # 60 images
    assert [len(b) for b in work.workspace.algorithm.epoch(work)] == [59]
    work = turn("fedul", batch_size=16)
    batches = list(work.workspace.algorithm.epoch(work))
    assert sorted(torch.cat(batches).tolist()) == list(range(60))
    assert [len(b) for b in batches] == [16, 16, 16, 12]


def test_a_tenth_of_the_labels_is_the_same_in_every_round():
    chosen = []
    for round in (0, 7):
        torch.manual_seed(round)
        work = turn("fedavg-labeled", round, share=0.1)
        chosen.append(sorted(torch.cat(list(work.workspace.algorithm.epoch(work))).tolist()))
    assert len(chosen[0]) == 6
    assert chosen[0] == chosen[1]
    work = turn("fedavg-labeled", batch_size=60)
    assert [len(b) for b in work.workspace.algorithm.epoch(work)] == [60]


def test_first_pseudo_label_is_the_likeliest_class_of_the_set():
    work = turn("fedpl", round=4)
    batch = work.batch(torch.arange(12))
    expected = torch.nn.functional.cross_entropy(
        work.logits(batch.images), work.sets.priors[work.sets.sets[:12]].argmax(1)
    )
    torch.testing.assert_close(loss(work, batch), expected)


def dealt(**keys):
    small = {"train_per_client": 200, "test_per_client": 20, "labeled": 0, "validation": 0}
    own = {"clients": 5, "sets": 10, "split": "noniid"}
    cfg = config.load("fedul-demo", arms=["fedpl"], **small | own | keys)
    return build(cfg.data, kind="sets", seed=0).clients[0].load()


def guess(data):
    return turn("fedpl", data=data).memory["guess"]


def test_pseudo_labels_follow_the_priors_that_were_drawn():
    data = dealt()
    assert data.drawn.argmax(1).tolist() == list(range(10))
    # nearly all that this client has is of two classes
    assert data.priors.argmax(1).tolist() != list(range(10))
    assert torch.equal(guess(data), data.sets)
    smooth = dealt(prior_smoothing=0.9)  # which keeps the order of a row
    assert not torch.equal(smooth.priors, data.priors)
    own, own_smooth = replace(data, drawn=None), replace(smooth, drawn=None)  # the user's own sets have none
    for plain, smoothed in ((data, smooth), (own, own_smooth)):
        assert torch.equal(guess(plain), guess(smoothed))
    few = {"clients": 1, "sets": 2, "split": "iid"}
    # labels know no more than the priors
    for blurred in ({"prior_noise": 0.1}, {"priors": "estimated", "labeled": 120}):
        assert dealt(**few | blurred).drawn is None


@pytest.mark.parametrize(("round", "own"), [(4, False), (5, True)])
def test_self_training_starts_in_the_sixth_round(round, own, monkeypatch):
    work = turn("fedpl", round=round)
    # which is sure of each
    monkeypatch.setattr(work, "logits", lambda images: 20 * torch.eye(3)[torch.arange(len(images)) % 3])
    found = float(work.workspace.algorithm.loss(work, work.batch(torch.arange(6))))
    assert (found < 1e-6) is own


def test_pseudo_labels_mix_sure_with_unsure_predictions():
    logits = torch.tensor([[5.0, 0, 0], [0.3, 0.2, 0.1], [0, 4.0, 0], [0, 3.0, 0]]).repeat(3, 1)
    share = np.random.default_rng(3).beta(0.75, 0.75)
    sure, unsure = logits[[0, 2, 3, 4, 6, 7, 8, 10, 11]], logits[[1, 5, 9]]
    ce = torch.nn.functional.cross_entropy
    mixed = share * sure[:3] + (1 - share) * unsure
    labels = sure.argmax(1)
    expected = ce(sure, labels) + 0.3 * (
        share * ce(mixed, labels[:3]) + (1 - share) * ce(mixed, unsure.argmax(1))
    )
    torch.testing.assert_close(self_labeled(logits, np.random.default_rng(3)), expected)
    confident = 9 * torch.eye(3).repeat(4, 1)  # where the published code would stop to learn
    torch.testing.assert_close(
        self_labeled(confident, np.random.default_rng(0)), ce(confident, confident.argmax(1))
    )


@pytest.mark.parametrize(("confidence", "sure"), [(0.41, True), (0.39, False)])
def test_a_prediction_is_sure_from_a_probability_of_four_tenths(confidence, sure):
    rest = (1 - confidence) / 2
    loss = self_labeled(torch.tensor([[confidence, rest, rest]]).log(), np.random.default_rng(0))
    assert float(loss) == pytest.approx(-math.log(confidence) if sure else 0.0, rel=1e-5)


def test_proportions_use_one_set_per_step():
    work = turn("fedllp")
    batches = list(work.workspace.algorithm.epoch(work))
    assert sorted(len(b) for b in batches) == sorted(work.sets.sizes.tolist())
    assert all(len(work.sets.sets[b].unique()) == 1 for b in batches)
    batch = work.batch(batches[0])
    work.net.eval()
    mean = work.logits(batch.images).softmax(1).mean(0)
    expected = -(work.sets.priors[work.sets.sets[batches[0][0]]].float().clamp(1e-7, 1) * mean.log()).sum()
    torch.testing.assert_close(loss(work, batch), expected)


def test_label_proportions_have_their_own_dropout():
    algorithm, workspace, _ = arm(settings("fedllp"))
    rates, dropouts = [], [m for m in workspace.net.modules() if isinstance(m, torch.nn.Dropout)]
    hook = workspace.net.register_forward_pre_hook(lambda net, _: rates.append({m.p for m in dropouts}))
    algorithm.turn()
    hook.remove()
    assert {0.2} in rates
    assert {m.p for m in dropouts} == {0.0}
    assert len(dropouts) == 5


def test_failed_step_restores_the_dropout(monkeypatch):
    def fail(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(FedLLP, "loss", fail)
    algorithm, workspace, notices = arm(settings("fedllp", quorum=0.01))
    with pytest.raises(Exception, match=r"\b0 of 2\b"):
        algorithm.turn()
    assert "broken" in notices[0]
    assert {m.p for m in workspace.net.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}


def test_label_proportions_drop_no_logits():
    algorithm, workspace, _ = arm(settings("fedllp", encoder="cnn"))
    head, rates = workspace.net.head, set()
    hook = head.fc2.register_forward_hook(lambda *_: rates.add((head.drop.p, head.logit_drop.p)))
    algorithm.turn()
    hook.remove()
    assert rates == {(0.1, 0.0), (0.2, 0.0)}  # measuring, training


def test_smoothness_keeps_running_statistics_and_has_a_gradient():
    work = turn("fedllp-vat", vat_epsilon=2.0)
    workspace, algorithm = work.workspace, work.workspace.algorithm
    x = work.batch(torch.arange(12)).images
    workspace.net.train()
    before = workspace.flat.buffers.clone()
    torch.manual_seed(0)
    smoothness = algorithm.smoothness(work, x)
    assert torch.equal(before, workspace.flat.buffers)
    assert float(smoothness.detach()) > 0
    smoothness.backward()
    assert float(workspace.flat.values.grad.abs().sum()) > 0
    work.logits(x)
    assert not torch.equal(before, workspace.flat.buffers)  # and they are at work again
    workspace.net.eval()
    p = work.logits(x).softmax(1)
    noise = torch.randn_like(x)
    noise = 2.0 * noise / noise.flatten(1).norm(dim=1)[:, None, None, None]
    at_random = torch.nn.functional.kl_div(work.logits(x + noise).log_softmax(1), p, reduction="batchmean")
    # the direction is adversarial
    assert float(algorithm.smoothness(work, x).detach()) > float(at_random.detach())


def test_smoothness_is_the_divergence_after_one_power_step():
    """The perturbation is r = epsilon g / |g|, after one power step.

    Here g is the gradient of KL(p(x) || p(x + xi d)) with respect to d, and d is a random unit vector.
    """
    work = turn("fedllp-vat", vat_epsilon=2.0, vat_xi=0.5)
    for m in work.net.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
    work.net.train()
    x, before = work.batch(torch.arange(12)).images, work.generator.get_state()
    found = work.workspace.algorithm.smoothness(work, x)
    work.generator.set_state(before)
    p = work.net(x).softmax(1).detach()

    def divergence(r):
        return (p * (p.log() - work.net(x + r).log_softmax(1))).sum(1).mean()

    def unit(d):
        return d / d.flatten(1).norm(dim=1)[:, None, None, None]

    d = unit(torch.randn(x.shape, generator=work.generator)).requires_grad_()
    (slope,) = torch.autograd.grad(divergence(0.5 * d), d)
    torch.testing.assert_close(found, divergence(2.0 * unit(slope)), rtol=1e-4, atol=1e-6)


def test_the_ramp_of_smoothness(monkeypatch):
    weights = {}
    for legacy in (False, True):
        work = turn("fedllp-vat", round=10, vat_legacy_ramp=legacy)
        algorithm = work.workspace.algorithm
        monkeypatch.setattr(type(algorithm), "smoothness", lambda self, work, x: torch.ones(()))
        batch = work.batch(torch.arange(12))
        work.net.eval()
        plain = float(FedLLP.loss(algorithm, work, batch).detach())
        weights[legacy] = (float(loss(work, batch).detach()) - plain) / algorithm.parameters.vat_weight
    assert weights[False] == pytest.approx(math.exp(-5 * 0.5**2), rel=1e-2)  # epoch 10 of 20
    assert weights[True] == pytest.approx(math.exp(-5), rel=1e-1)  # always at the beginning


@pytest.mark.parametrize("name", ["fedul", "fedpl"])
def test_penalty_equals_autograd(name):
    cfg, fed = settings(name, penalty=1e-2, batch_size=60), federation(clients=1)
    algorithm, _, _ = arm(cfg, fed)
    algorithm.turn()
    work = turn(name, penalty=1e-2, batch_size=60)
    workspace = work.workspace
    decay = 1e-2 if name == "fedpl" else 0.0
    optimizer = torch.optim.Adam([workspace.flat.values], lr=cfg.training.lr, weight_decay=decay, fused=True)
    with torch.random.fork_rng():
        torch.manual_seed(derive(0, "train", 0, "client-0"))
        (positions,) = workspace.algorithm.epoch(work)
    workspace.net.train()
    optimizer.zero_grad(set_to_none=False)
    total = loss(work, work.batch(positions))
    if name == "fedul":
        total = total + 1e-2 * sum(w.abs().sum() for w in workspace.net.parameters())
    total.backward()
    optimizer.step()
    torch.testing.assert_close(
        algorithm.members[0].state.tensors["values"], workspace.flat.values.detach(), atol=1e-7, rtol=1e-5
    )


def test_smoothness_without_weight_is_fedllp_bit_for_bit():
    runs = [arm(settings("fedllp-vat", vat_weight=0.0))[0], arm(settings("fedllp"))[0]]
    assert finish(runs[0]) == finish(runs[1])
    assert torch.equal(*(run.members[0].state.tensors["values"] for run in runs))


def test_draws_of_an_algorithm_change_no_order_or_dropout():
    """The smoothness term has such a small weight that only its draws could change the training."""
    orders = []
    for name in ("fedllp", "fedllp-vat"):
        one, _, _ = arm(settings(name))
        seen, batch = [], Work.batch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                Work,
                "batch",
                lambda self, p, seen=seen, batch=batch: (seen.append(p.tolist()), batch(self, p))[1],
            )
            one.turn()
        orders.append(seen)
    assert orders[0] == orders[1]


def test_labeled_shares_are_fixed_and_differ_between_clients():
    def images(client):
        work = SimpleNamespace(client=client, seed=3, examples=100, training=SimpleNamespace(batch_size=4))
        return set(torch.cat(list(FedAvgLabeled(share=0.2).epoch(work))).tolist())

    assert images("a") == images("a")
    assert len(images("a")) == 20
    assert images("a") != images("b")
