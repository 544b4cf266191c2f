"""What the clients of FedUL and its baselines minimise: batches, losses, and the penalty."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from uefl import config
from uefl.algorithms.client import Device
from uefl.algorithms.objectives import Labels, Objective, Proportions, PseudoLabels, SmoothProportions, TenthOfLabels, Transition
from uefl.data.sets import build_sets
from uefl.seeds import derive

from .tiny_sets import arm, federation, settings


def objective(kind, name="fedul", round=0, **keys):
    fed = federation(clients=1)
    _, device = arm(settings(name, **keys), fed)
    return kind(device, fed.silos[0], round)


def batch_of(task, n=12):
    batch = torch.arange(n)
    return task.device.normalize(task.silo.images[batch]), batch


def test_batches_cover_an_epoch_and_leave_out_a_single_image():
    task = objective(Transition, batch_size=59)  # 60 images
    torch.manual_seed(0)
    assert [len(b) for b in task.epoch()] == [59]
    task = objective(Transition, batch_size=16)
    assert sorted(torch.cat(list(task.epoch())).tolist()) == list(range(60))
    assert [len(b) for b in task.epoch()] == [16, 16, 16, 12]


def test_a_tenth_of_the_labels_is_the_same_in_every_round():
    first, later = objective(TenthOfLabels), objective(TenthOfLabels, round=7)
    assert len(first.images) == 6
    assert torch.equal(first.images, later.images)
    assert len(objective(Labels).images) == 60


def test_pseudo_labels_begin_with_the_likeliest_class_of_the_set():
    task = objective(PseudoLabels, "fedpl", round=4)
    x, batch = batch_of(task)
    expected = torch.nn.functional.cross_entropy(task.logits(x), task.silo.priors[task.silo.sets[batch]].argmax(1))
    torch.testing.assert_close(task.loss(x, batch), expected)


def test_pseudo_labels_follow_the_priors_that_were_drawn():
    config_ = settings("fedpl", data="digits", clients=5, train_per_client=200, test_per_client=20, sets=10, split="noniid")
    silo = build_sets(config_).silos[0]
    assert silo.drawn.argmax(1).tolist() == list(range(10))
    assert silo.priors.argmax(1).tolist() != list(range(10))  # nearly all that this client has is of two classes
    device = Device(config_, federation(), torch.device("cpu"))
    assert torch.equal(PseudoLabels(device, silo, 0).guess, silo.sets)
    smooth = build_sets(config.from_table(vars(config_) | {"prior_smoothing": 0.9})).silos[0]  # which keeps the order of a row
    assert not torch.equal(smooth.priors, silo.priors)
    own, own_smooth = replace(silo, drawn=None), replace(smooth, drawn=None)  # the user's own sets have none
    for plain, smoothed in ((silo, smooth), (own, own_smooth)):
        assert torch.equal(PseudoLabels(device, plain, 0).guess, PseudoLabels(device, smoothed, 0).guess)
    few = {"clients": 1, "sets": 2, "split": "iid"}
    for blurred in ({"prior_noise": 0.1}, {"priors": "estimated", "labeled": 120}):  # labels know no more than the priors
        assert build_sets(config.from_table(vars(config_) | few | blurred)).silos[0].drawn is None


def test_pseudo_labels_mix_sure_with_unsure_predictions():
    task = objective(PseudoLabels, "fedpl", round=5)
    x, batch = batch_of(task)
    logits = torch.tensor([[5.0, 0, 0], [0.3, 0.2, 0.1], [0, 4.0, 0], [0, 3.0, 0]]).repeat(3, 1)
    task.logits = lambda _: logits
    torch.manual_seed(3)
    share = float(task.beta.sample())
    sure, unsure = logits[[0, 2, 3, 4, 6, 7, 8, 10, 11]], logits[[1, 5, 9]]
    ce = torch.nn.functional.cross_entropy
    mixed = share * sure[:3] + (1 - share) * unsure
    labels = sure.argmax(1)
    expected = ce(sure, labels) + 0.3 * (share * ce(mixed, labels[:3]) + (1 - share) * ce(mixed, unsure.argmax(1)))
    torch.manual_seed(3)
    torch.testing.assert_close(task.loss(x, batch), expected)
    confident = 9 * torch.eye(3).repeat(4, 1)
    task.logits = lambda _: confident  # where the published code would stop to learn
    torch.testing.assert_close(task.loss(x, batch), ce(confident, confident.argmax(1)))


def test_proportions_take_a_set_per_step():
    task = objective(Proportions, "fedllp")
    batches = list(task.epoch())
    assert sorted(len(b) for b in batches) == sorted(task.silo.sizes.tolist())
    assert all(len(task.silo.sets[b].unique()) == 1 for b in batches)
    batch = batches[0]
    x = task.device.normalize(task.silo.images[batch])
    task.device.net.eval()
    mean = task.logits(x).softmax(1).mean(0)
    expected = -(task.silo.priors[task.silo.sets[batch[0]]].float().clamp(1e-7, 1) * mean.log()).sum()
    torch.testing.assert_close(task.loss(x, batch), expected)


def test_the_dropout_of_label_proportions_is_theirs_alone():
    algorithm, device = arm(settings("fedllp"))
    rates, dropouts = [], [m for m in device.net.modules() if isinstance(m, torch.nn.Dropout)]
    hook = device.net.register_forward_pre_hook(lambda net, _: rates.append({m.p for m in dropouts}))
    algorithm.turn()
    hook.remove()
    assert {0.2} in rates
    assert {m.p for m in dropouts} == {0.0}
    assert len(dropouts) == 5


def test_label_proportions_drop_no_logits():
    algorithm, device = arm(settings("fedllp", encoder="cnn"))
    head, rates = device.net.head, set()
    hook = head.fc2.register_forward_hook(lambda *_: rates.add((head.drop.p, head.logit_drop.p)))
    algorithm.turn()
    hook.remove()
    assert rates == {(0.1, 0.0), (0.2, 0.0)}  # measuring, training


def test_smoothness_leaves_the_running_statistics_and_has_a_gradient():
    task = objective(SmoothProportions, "fedllp-vat", vat_epsilon=2.0)
    x, _ = batch_of(task)
    task.device.net.train()
    before = task.device.flat.statistics.clone()
    torch.manual_seed(0)
    smoothness = task.smoothness(x)
    assert torch.equal(before, task.device.flat.statistics)
    assert float(smoothness.detach()) > 0
    smoothness.backward()
    assert float(task.device.flat.values.grad.abs().sum()) > 0
    task.logits(x)
    assert not torch.equal(before, task.device.flat.statistics)  # and they are at work again
    task.device.net.eval()
    p = task._log_probs(x).exp()
    noise = torch.randn_like(x)
    noise = 2.0 * noise / noise.flatten(1).norm(dim=1)[:, None, None, None]
    at_random = torch.nn.functional.kl_div(task._log_probs(x + noise), p, reduction="batchmean")
    assert float(task.smoothness(x).detach()) > float(at_random.detach())  # the direction is adversarial


def test_the_ramp_of_smoothness():
    weights = {}
    for legacy in (False, True):
        task = objective(SmoothProportions, "fedllp-vat", round=10, vat_legacy_ramp=legacy)
        task.smoothness = lambda x: torch.ones(())
        x, batch = batch_of(task)
        task.device.net.eval()
        plain = float(Proportions.loss(task, x, batch).detach())
        weights[legacy] = (float(task.loss(x, batch).detach()) - plain) / task.config.vat_weight
    assert weights[False] == pytest.approx(math.exp(-5 * 0.5**2), rel=1e-2)  # epoch 10 of 20
    assert weights[True] == pytest.approx(math.exp(-5), rel=1e-1)  # always at the beginning


@pytest.mark.parametrize("name", ["fedul", "fedpl"])
def test_the_penalty_is_that_of_autograd(name):
    cfg, fed = settings(name, penalty=1e-2, batch_size=60), federation(clients=1)
    algorithm, device = arm(cfg, fed)
    start = algorithm.values.clone(), algorithm.statistics.clone()
    algorithm.turn()
    device.flat.set(*start)
    task = {"fedul": Transition, "fedpl": PseudoLabels}[name](device, fed.silos[0], 0)
    decay = cfg.penalty if name == "fedpl" else 0.0
    optimizer = torch.optim.Adam([device.flat.values], lr=cfg.lr, weight_decay=decay, fused=True)
    with torch.random.fork_rng():
        torch.manual_seed(derive(0, "train", 0, "client-0"))
        (batch,) = task.epoch()
    device.net.train()
    optimizer.zero_grad(set_to_none=False)
    loss = task.loss(device.normalize(fed.silos[0].images[batch]), batch)
    if name == "fedul":
        loss = loss + cfg.penalty * sum(w.abs().sum() for w in device.net.parameters())
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(algorithm.values, device.flat.values.detach(), atol=1e-7, rtol=1e-5)


def test_an_objective_without_a_loss_is_a_mistake_of_the_program():
    with pytest.raises(NotImplementedError):
        Objective.loss(objective(Transition), torch.zeros(1), torch.zeros(1))
