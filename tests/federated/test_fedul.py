"""FedUL, M1, M2 and the baselines on a federation that a test can train."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import uefl_kernels
from uefl import config
from uefl.algorithms.fedul import ARMS
from uefl.algorithms.objectives import log_transition
from uefl.data.priors import surrogate_floor
from uefl.data.sets import SetSilo, build_sets
from uefl.engines.base import Reply, Request
from uefl.rules import SET_ARMS
from uefl.seeds import derive

from .tiny import finish, split
from .tiny_sets import arm, federation, settings


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(name, fed=None, **keys):
    algorithm, device = arm(settings(name, **keys), fed)
    return algorithm, finish(algorithm), device


def accuracy(records):
    last = max(r["round"] for r in records)
    return np.mean([r["accuracy"] for r in records if r["round"] == last])


# --- the transition ------------------------------------------------------------------------------------------------

PRIORS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.2, 0.5, 0.3]], dtype=torch.float64)
LOGITS = torch.tensor([[2, -1, 0.5], [0, 0, 0], [-3, 4, 1]], dtype=torch.float64)
TARGETS = torch.tensor([0, 2, 3])


def golden(**keys):
    """Four sets of 4, 3, 2 and 1 images: set priors (.4, .3, .2, .1)."""
    sets = torch.tensor([0] * 4 + [1] * 3 + [2] * 2 + [3])
    silo = SetSilo("golden", torch.zeros(10, 1, 8, 8, dtype=torch.uint8), sets, PRIORS, None, split(3, 0, 0.1))
    return log_transition(silo, settings("fedul", **keys))


def test_golden_vectors():
    matrix = golden(test_prior=[0.5, 0.3, 0.2])
    torch.testing.assert_close(matrix.exp().sum(0), torch.tensor([0.76, 1.2, 1.3]))
    loss = uefl_kernels.transition_nll(LOGITS, TARGETS, matrix)
    torch.testing.assert_close(loss, torch.tensor([0.5856166203, 1.4474303611, 1.9831176379], dtype=torch.float64), atol=1e-7, rtol=0)
    uniform = uefl_kernels.transition_nll(LOGITS, TARGETS, golden())
    torch.testing.assert_close(uniform, torch.tensor([0.4424958973, 1.6094379124, 1.9805468137], dtype=torch.float64), atol=1e-7, rtol=0)
    legacy = uefl_kernels.transition_double_softmax(LOGITS, TARGETS, golden())
    torch.testing.assert_close(legacy, torch.tensor([1.0222038047, 1.4425355295, 1.5092377050], dtype=torch.float64), atol=1e-7, rtol=0)


def test_full_rank_priors_can_be_inverted():
    """p = normalise(D_pi Pi^+ D_pibar^-1 g): what makes the surrogate task determine the classifier."""
    pi, shares = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    g = uefl_kernels.log_transition_probs(LOGITS, golden(test_prior=pi.tolist())).exp()
    torch.testing.assert_close(g.sum(1), torch.ones(3, dtype=torch.float64))
    p = (pi[:, None] * torch.linalg.pinv(PRIORS) / shares) @ g.T
    torch.testing.assert_close((p / p.sum(0)).T, LOGITS.softmax(1), atol=1e-6, rtol=0)


def test_the_order_of_the_sets_does_not_matter():
    matrix, order = golden(), torch.tensor([2, 0, 3, 1])
    permuted = uefl_kernels.transition_nll(LOGITS, order.argsort()[TARGETS], matrix[order])
    torch.testing.assert_close(permuted, uefl_kernels.transition_nll(LOGITS, TARGETS, matrix))


def test_sets_that_are_the_classes_give_logit_adjusted_cross_entropy():
    sets = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    silo = SetSilo("pure", torch.zeros(10, 1, 8, 8, dtype=torch.uint8), sets, torch.eye(3, dtype=torch.float64), None, split(3, 0, 0.1))
    loss = uefl_kernels.transition_nll(LOGITS, TARGETS.clamp(max=2), log_transition(silo, settings("fedul")))
    adjusted = LOGITS + torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(adjusted, TARGETS.clamp(max=2), reduction="none"), atol=1e-6, rtol=0)


# --- learning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SET_ARMS)
def test_every_arm_learns_what_can_be_learnt(name):
    few_steps = name in ("fedllp", "fedllp-vat", "fedavg-labeled-10")  # one per set, or of a tenth of the images
    algorithm, records, _ = trained(name, rounds=[8], local_epochs=8 if few_steps else 1)
    assert len(records) == 16
    for r in records:
        assert all(math.isfinite(v) for v in r.values() if isinstance(v, float))
        assert r["validation_accuracy"] is not None
        assert (r["server_loss"] is not None) == (ARMS[name].server != "none")
        assert (r["train_loss"] is None) == (name == "supervised")
    if name.startswith("fedllp"):  # slow learners, by design: a step per set
        assert records[-1]["train_loss"] < records[0]["train_loss"] - 0.05
    else:
        assert accuracy(records) > 0.8
    assert algorithm.finished
    assert algorithm.rejected == 0


@pytest.mark.parametrize("loss", ["nll", "legacy_double_softmax"])
def test_the_surrogate_loss_reaches_its_floor(loss):
    legacy = loss != "nll"
    fed = federation(clients=1, images=120, noise=0.05)
    _, records, _ = trained("fedul", fed, loss=loss, rounds=[12])
    floor = surrogate_floor(fed.silos[0].priors.numpy(), fed.silos[0].sizes.numpy(), legacy=legacy)
    assert floor < math.log(4)
    assert abs(records[-1]["train_loss"] - floor) < (0.02 if legacy else 0.05)


def test_the_supervised_losses_reach_theirs():
    proper = trained("supervised", rounds=[12], server_epochs=4)[1][-1]["server_loss"]
    published = trained("supervised", rounds=[12], server_epochs=4, loss="legacy_double_softmax")[1][-1]["server_loss"]
    assert proper < 0.1
    assert abs(published - (math.log(math.e + 2) - 1)) < 0.01  # with ten classes: 1.4612


@pytest.mark.data
def test_the_published_losses_reach_their_floors_on_mnist(data_root):
    keys = ["loss=legacy_double_softmax", "clients=1", "augment=none", "validation=0"]

    def run(name, *more):
        cfg = config.load("fedul-narrow-iid", [*keys, f'arms=["{name}"]', *more])
        fed = build_sets(cfg, data_root=data_root)
        return finish(arm(cfg, fed)[0])[-1], fed.silos[0]

    last, silo = run("fedul", "overlap=true", "legacy_column_norm=true", "labeled=0", "rounds=[5]")
    floor = surrogate_floor(silo.priors.numpy(), silo.sizes.numpy(), legacy=True)
    assert 2.05 < floor < 2.2  # ten sets: chance is log 10 = 2.303
    assert abs(last["train_loss"] - floor) < 0.02
    last, _ = run("supervised", "train_per_client=100", "test_per_client=100", "rounds=[10]")
    assert abs(last["server_loss"] - (math.log(math.e + 9) - 1)) < 0.01


def test_the_same_seed_gives_the_same_bits():
    one, other = trained("fedul-m2")[1], trained("fedul-m2")[1]
    assert one == other
    assert trained("fedul-m2", seed=1)[1] != one


# --- M1 and M2 -----------------------------------------------------------------------------------------------------


def test_h_0_is_fedul_and_h_1_the_supervised_model_exactly():
    for h, name in ((0.0, "fedul"), (1.0, "supervised")):
        blend, other = trained("fedul-m2", h=h)[0], trained(name)[0]
        assert torch.equal(blend.values, other.values)
        assert torch.equal(blend.statistics, other.statistics)
    assert not torch.equal(trained("fedul-m2", h=0.5)[0].values, other.values)


def test_the_first_average_is_the_same_in_all_three():
    outcomes = {name: trained(name, rounds=[1])[1][0] for name in ("fedul", "fedul-m1", "fedul-m2")}
    assert len({r["aggregate_accuracy"] for r in outcomes.values()}) == 1
    assert len({r["train_loss"] for r in outcomes.values()}) == 1
    assert outcomes["fedul"]["aggregate_accuracy"] == outcomes["fedul"]["validation_accuracy"]


def test_f_prime_goes_its_own_way_unless_it_is_synchronised():
    own, synchronised = arm(settings("fedul-m2"))[0], arm(settings("fedul-m2", resync=True))[0]
    for algorithm in (own, synchronised):
        algorithm.turn()
        algorithm.turn()
    assert own.expert_steps == 4  # 30 images in batches of 16, two rounds
    assert torch.equal(synchronised.expert["values"], synchronised.values)
    assert not torch.equal(own.expert["values"], own.values)
    alone = arm(settings("supervised"))[0]
    alone.turn()
    alone.turn()
    assert torch.equal(own.expert["values"], alone.values)


def test_the_optimizer_of_f_prime_goes_on_where_it_was():
    cfg, fed = settings("supervised", rounds=[2]), federation()
    algorithm, device = arm(cfg, fed)
    start = algorithm.values.clone(), algorithm.statistics.clone()
    finish(algorithm)
    device.flat.set(*start)
    optimizer = torch.optim.Adam([device.flat.values], lr=cfg.lr, fused=True)
    device.net.train()
    for round in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(derive(0, "train", round, "server"))
            order = torch.randperm(30)
        for batch in order.split(16):
            optimizer.zero_grad(set_to_none=False)
            logits, _ = device.net(device.normalize(fed.labeled.images[batch]), None, 0.0)
            torch.nn.functional.cross_entropy(logits, fed.labeled.labels[batch]).backward()
            optimizer.step()
    assert torch.equal(device.flat.values.detach(), algorithm.values)
    assert torch.equal(device.flat.statistics, algorithm.statistics)


def test_the_saved_model_can_be_the_best_on_validation():
    algorithm, records, device = trained("fedul", rounds=[5], lr=3e-2, select="validation")
    best = max(r["validation_accuracy"] for r in records)
    device.flat.set(algorithm.values, algorithm.statistics)
    assert algorithm.validate() == best == algorithm.best_accuracy


@pytest.mark.parametrize("name", ["fedul", "fedul-m1", "fedul-m2", "supervised", "fedllp-vat"])
def test_the_state_between_two_turns_is_all_there_is(name):
    keys = {"select": "validation", "rounds": [4]}
    whole = arm(settings(name, **keys))[0]
    records = finish(whole)
    first, _ = arm(settings(name, **keys))
    kept = [r for _ in range(2) for r in first.turn()]
    second, _ = arm(settings(name, **keys))
    tensors, plain = first.state()
    second.restore({k: v.clone() for k, v in tensors.items()}, plain)
    assert kept + finish(second) == records
    assert torch.equal(second.values, whole.values)


# --- averages ------------------------------------------------------------------------------------------------------


def test_clients_count_alike_or_by_their_images():
    for weights, expected in (("uniform", 2.0), ("examples", 2.5)):
        algorithm, _ = arm(settings("fedul", client_weights=weights))
        algorithm.begin_average()
        for client, value, examples in (("client-0", 1.0, 10), ("client-1", 3.0, 30)):
            like = {"values": algorithm.values, "statistics": algorithm.statistics}
            algorithm.add(Reply(client, examples, {k: torch.full_like(v, value) for k, v in like.items()}))
        algorithm.end_average()
        assert float(algorithm.values[0]) == float(algorithm.statistics[0]) == expected


def test_the_average_of_identical_models_is_that_model():
    algorithm, _ = arm(settings("fedul"))
    before = algorithm.values.clone()
    algorithm.begin_average()
    for client in ("client-0", "client-1"):
        algorithm.add(Reply(client, 7, {"values": before, "statistics": algorithm.statistics}))
    algorithm.end_average()
    assert torch.equal(algorithm.values, before)


def test_a_diverged_client_is_left_out_by_name():
    fed = federation()
    algorithm, _ = arm(settings("fedul", quorum=0.5), fed)
    original = algorithm.engine._clients["client-1"]

    def broken(request: Request) -> Reply:
        reply = original(request)
        if "values" in reply.tensors:
            reply.tensors["values"] = reply.tensors["values"] * torch.nan
        return reply

    algorithm.engine._clients["client-1"] = broken
    algorithm.turn()
    assert algorithm.rejected == 1
    assert bool(torch.isfinite(algorithm.values).all())
