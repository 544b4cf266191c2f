"""FedUL, M1, M2 and the baselines on a federation that a test can train."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import uefl_kernels
from tests.federated import tiny
from tests.federated.engine_wrappers import lies
from tests.federated.tiny import finish, split, state, turn_of, values
from tests.federated.tiny_sets import arm, federation, settings, smallest_surrogate_loss
from uefl import config
from uefl.algorithms.base import registry
from uefl.algorithms.fedul.fedul import FedUL, log_transition
from uefl.data import build
from uefl.data.federation import SetData
from uefl.engines.base import Message, Reply
from uefl.seeds import derive

ARMS = {
    **{name: {} for name, kind in registry().items() if kind.kind == "sets"},
    "fedul-m1": {"algorithm": "fedul", "server": "finetune"},
    "fedul-m2": {"algorithm": "fedul", "server": "blend"},
    "fedavg-labeled-10": {"algorithm": "fedavg-labeled", "share": 0.1},
}
"""the arms of the presets, and their keys"""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def configured(name, **keys):
    more = dict(ARMS[name])
    return settings(more.pop("algorithm", name), **more | keys)


def trained(name, fed=None, **keys):
    algorithm, workspace, _ = arm(configured(name, **keys), fed)
    return algorithm, finish(algorithm), workspace


def buffers(algorithm):
    return state(algorithm).tensors["buffers"]


def accuracy(records):
    last = max(r["round"] for r in records)
    return np.mean([r["accuracy"] for r in records if r["round"] == last])


# --- the transition ---------------------------------------------------------------------------------------

PRIORS = torch.tensor(
    [[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.2, 0.5, 0.3]], dtype=torch.float64
)
LOGITS = torch.tensor([[2, -1, 0.5], [0, 0, 0], [-3, 4, 1]], dtype=torch.float64)
TARGETS = torch.tensor([0, 2, 3])


def four_sets():
    """Return four sets of 4, 3, 2 and 1 images, with set priors (.4, .3, .2, .1)."""
    sets = torch.tensor([0] * 4 + [1] * 3 + [2] * 2 + [3])
    return SetData(torch.zeros(10, 1, 8, 8, dtype=torch.uint8), sets, PRIORS, None, None, split(3, 0, 0.1))


def golden(**keys):
    return log_transition(four_sets(), **keys)


def test_golden_vectors():
    matrix = golden(test_prior=(0.5, 0.3, 0.2))
    torch.testing.assert_close(matrix.exp().sum(0), torch.tensor([0.76, 1.2, 1.3]))
    for loss, of_prior, expected in (
        (uefl_kernels.transition_nll, matrix, [0.5856166203, 1.4474303611, 1.9831176379]),
        (uefl_kernels.transition_nll, golden(), [0.4424958973, 1.6094379124, 1.9805468137]),
        (uefl_kernels.transition_double_softmax, golden(), [1.0222038047, 1.4425355295, 1.5092377050]),
    ):
        wanted = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(loss(LOGITS, TARGETS, of_prior), wanted, atol=1e-7, rtol=0)


def test_clients_train_with_the_prior_of_the_configuration():
    work = SimpleNamespace(sets=four_sets(), workspace=SimpleNamespace(device="cpu"), memory={})
    FedUL(test_prior=(0.5, 0.3, 0.2)).before_round(work)
    assert torch.equal(work.memory["matrix"], golden(test_prior=(0.5, 0.3, 0.2)))


def test_full_rank_priors_can_be_inverted():
    """The surrogate task determines the classifier, as p = normalize(D_pi Pi^+ D_pibar^-1 g)."""
    pi, shares = (
        torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
        torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64),
    )
    g = uefl_kernels.log_transition_probs(LOGITS, golden(test_prior=tuple(pi.tolist()))).exp()
    torch.testing.assert_close(g.sum(1), torch.ones(3, dtype=torch.float64))
    p = (pi[:, None] * torch.linalg.pinv(PRIORS) / shares) @ g.T
    torch.testing.assert_close((p / p.sum(0)).T, LOGITS.softmax(1), atol=1e-6, rtol=0)


def test_the_order_of_the_sets_does_not_matter():
    matrix, order = golden(), torch.tensor([2, 0, 3, 1])
    permuted = uefl_kernels.transition_nll(LOGITS, order.argsort()[TARGETS], matrix[order])
    torch.testing.assert_close(permuted, uefl_kernels.transition_nll(LOGITS, TARGETS, matrix))


def test_sets_of_one_class_give_logit_adjusted_cross_entropy():
    sets = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    data = SetData(
        torch.zeros(10, 1, 8, 8, dtype=torch.uint8),
        sets,
        torch.eye(3, dtype=torch.float64),
        None,
        None,
        split(3, 0, 0.1),
    )
    loss = uefl_kernels.transition_nll(LOGITS, TARGETS.clamp(max=2), log_transition(data))
    adjusted = LOGITS + torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    torch.testing.assert_close(
        loss,
        torch.nn.functional.cross_entropy(adjusted, TARGETS.clamp(max=2), reduction="none"),
        atol=1e-6,
        rtol=0,
    )


# --- learning ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ARMS)
def test_every_arm_learns_what_can_be_learned(name):
    # one per set, or of a tenth of the images
    few_steps = name in ("fedllp", "fedllp-vat", "fedavg-labeled-10")
    rounds = 4 if name == "fedllp-vat" else 8  # its step costs three steps of the others
    algorithm, records, _ = trained(name, rounds=[rounds], local_epochs=8 if few_steps else 1)
    assert len(records) == 2 * rounds
    for r in records:
        assert all(math.isfinite(v) for v in r.values() if isinstance(v, float))
        assert r["validation_accuracy"] is not None
        assert (r["server_loss"] is not None) == (name in ("fedul-m1", "fedul-m2", "supervised"))
        assert (r["train_loss"] is None) == (name == "supervised")
    # A third comes by chance. The accuracy of fedllp-vat goes up and down from round to round.
    if name == "fedllp-vat":
        assert max(accuracy([r for r in records if r["round"] == i]) for i in range(rounds)) > 0.7
    else:
        assert accuracy(records) > 0.8
    assert algorithm.finished
    assert not algorithm.rejected


@pytest.mark.parametrize("loss", ["nll", "legacy_double_softmax"])
def test_the_surrogate_loss_reaches_its_floor(loss):
    legacy = loss != "nll"
    fed = federation(clients=1, images=120, noise=0.05)
    _, records, _ = trained("fedul", fed, loss=loss, rounds=[12])
    data = fed.clients[0].load()
    floor = smallest_surrogate_loss(data, legacy=legacy)
    assert floor < math.log(4)
    assert abs(records[-1]["train_loss"] - floor) < (0.02 if legacy else 0.05)


def test_the_supervised_losses_reach_theirs():
    proper = trained("supervised", rounds=[12], server_epochs=4)[1][-1]["server_loss"]
    published = trained("supervised", rounds=[12], server_epochs=4, loss="legacy_double_softmax")[1][-1][
        "server_loss"
    ]
    assert proper < 0.1
    assert abs(published - (math.log(math.e + 2) - 1)) < 0.01  # with ten classes: 1.4612


@pytest.mark.data
@pytest.mark.slow
def test_the_published_losses_reach_their_floors_on_mnist(data_root):
    keys = ["loss=legacy_double_softmax", "clients=1", "augment=none", "validation=0"]

    def run(name, *more):
        cfg = config.load("fedul-narrow", [f'arms=["{name}"]', *keys, *more])
        fed = build(cfg.data, kind="sets", seed=0, data_root=data_root)
        return finish(tiny.arm(cfg, fed)[0])[-1], fed.clients[0].load()

    last, data = run("fedul", "overlap=true", "legacy_column_norm=true", "labeled=0", "rounds=[5]")
    floor = smallest_surrogate_loss(data, legacy=True)
    assert 2.05 < floor < 2.2  # ten sets: chance is log 10 = 2.303
    assert abs(last["train_loss"] - floor) < 0.02
    last, _ = run("supervised", "train_per_client=100", "test_per_client=100", "rounds=[10]")
    assert abs(last["server_loss"] - (math.log(math.e + 9) - 1)) < 0.01


def test_the_same_seed_gives_the_same_bits():
    one, other = trained("fedul-m2")[1], trained("fedul-m2")[1]
    assert one == other
    assert trained("fedul-m2", seed=1)[1] != one


# --- M1 and M2 --------------------------------------------------------------------------------------------


def test_h_0_is_fedul_and_h_1_the_supervised_model_exactly():
    for h, name in ((0.0, "fedul"), (1.0, "supervised")):
        blend, other = trained("fedul-m2", h=h)[0], trained(name)[0]
        assert torch.equal(values(blend), values(other))
        assert torch.equal(buffers(blend), buffers(other))
    assert not torch.equal(values(trained("fedul-m2", h=0.5)[0]), values(other))


def test_the_first_average_is_the_same_in_all_three():
    outcomes = {name: trained(name, rounds=[1])[1][0] for name in ("fedul", "fedul-m1", "fedul-m2")}
    assert len({r["aggregate_accuracy"] for r in outcomes.values()}) == 1
    assert len({r["train_loss"] for r in outcomes.values()}) == 1
    assert outcomes["fedul"]["aggregate_accuracy"] == outcomes["fedul"]["validation_accuracy"]


def test_f_prime_differs_unless_it_is_synchronized():
    own, synchronized = arm(configured("fedul-m2"))[0], arm(configured("fedul-m2", resync=True))[0]
    for algorithm in (own, synchronized):
        algorithm.turn()
        algorithm.turn()
    assert float(state(own).tensors["expert.moment.step"]) == 4  # 30 images in batches of 16, two rounds
    assert torch.equal(state(synchronized).tensors["expert.values"], values(synchronized))
    assert "expert.moment.step" not in state(synchronized).tensors
    assert not torch.equal(state(own).tensors["expert.values"], values(own))
    alone = arm(configured("supervised"))[0]
    alone.turn()
    alone.turn()
    assert torch.equal(state(own).tensors["expert.values"], values(alone))


def test_h_rises_to_its_value_or_falls_from_it():
    shares = {kind: [] for kind in ("constant", "rise", "fall")}
    for kind, found in shares.items():
        one = arm(configured("fedul-m2", h=0.6, h_schedule=kind, rounds=[3]))[0]
        for _ in range(3):
            found.append(one.members[0].algorithm.share(turn_of(one)))
            one.turn()
    assert shares == {
        "constant": [0.6] * 3,
        "rise": pytest.approx([0.2, 0.4, 0.6]),
        "fall": pytest.approx([0.6, 0.4, 0.2]),
    }
    one_round = {kind: trained("fedul-m2", h_schedule=kind, rounds=[1])[0] for kind in shares}
    assert torch.equal(values(one_round["constant"]), values(one_round["rise"]))
    assert torch.equal(values(one_round["constant"]), values(one_round["fall"]))


def test_recalibrated_statistics_come_from_labeled_images():
    """The statistics are means over two batches of 15 images, without the last single image."""
    fed, keys = federation(), {"batch_size": 15, "rounds": [1]}
    fed = replace(fed, server=replace(fed.server, labeled=split(31, 98, 0.2)))
    algorithm, _, workspace = trained("fedul-m2", fed, recalibrate=True, **keys)
    plain = trained("fedul-m2", fed, **keys)[0]
    assert torch.equal(values(algorithm), values(plain))
    assert not torch.equal(buffers(algorithm), buffers(plain))
    workspace.load(Message({name: state(algorithm).tensors[name] for name in ("values", "buffers")}))
    inputs, norm = [], next(m for m in workspace.net.modules() if isinstance(m, torch.nn.BatchNorm2d))
    with norm.register_forward_pre_hook(lambda _, x: inputs.append(x[0])), torch.no_grad():
        for images in fed.server.labeled.images[:30].split(15):
            workspace.net.eval()(workspace.normalize(images))
    mean = torch.stack([x.mean((0, 2, 3)) for x in inputs]).mean(0)
    var = torch.stack([x.var((0, 2, 3)) for x in inputs]).mean(0)
    torch.testing.assert_close(norm.running_mean, mean, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(norm.running_var, var, atol=1e-5, rtol=1e-4)


def test_synchronized_f_prime_starts_from_the_recalibrated_model():
    algorithm = trained("fedul-m2", recalibrate=True, resync=True, rounds=[2])[0]
    assert torch.equal(state(algorithm).tensors["expert.buffers"], buffers(algorithm))


def test_optimizer_of_f_prime_keeps_its_state():
    cfg, fed = configured("supervised", rounds=[2]), federation()
    algorithm, workspace, _ = arm(cfg, fed)
    start = Message({name: state(algorithm).tensors[name].clone() for name in ("values", "buffers")})
    finish(algorithm)
    workspace.load(start)
    workspace.flat.share_gradient(False)
    optimizer, labeled = (
        torch.optim.Adam(workspace.net.parameters(), lr=cfg.training.lr, fused=True),
        fed.server.labeled,
    )
    workspace.net.train()
    for round in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(derive(0, "train", round, "server"))
            order = torch.randperm(30)
        for batch in order.split(16):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                workspace.net(workspace.normalize(labeled.images[batch])), labeled.labels[batch]
            ).backward()
            optimizer.step()
    assert torch.equal(workspace.flat.values.detach(), values(algorithm))
    assert torch.equal(workspace.flat.buffers, buffers(algorithm))


def test_saved_model_can_be_the_best_on_validation():
    algorithm, records, _ = trained("fedul", rounds=[5], lr=3e-2, select="validation")
    best = max(r["validation_accuracy"] for r in records)
    own = state(algorithm)
    assert algorithm.teacher.accuracy(own.tensors) == best


def test_of_equally_good_models_the_first_is_saved():
    """The report names its round."""
    algorithm, measured = arm(configured("fedul", select="validation"))[0], []

    def accuracy(tensors):
        measured.append(tensors["values"].clone())
        return (0.25, 0.5, 0.5)[len(measured) - 1]

    algorithm.teacher = SimpleNamespace(accuracy=accuracy)
    finish(algorithm)
    assert torch.equal(values(algorithm), measured[1])


# --- averages ---------------------------------------------------------------------------------------------


def averaged(algorithm, replies):
    one, own = algorithm.members[0].algorithm, state(algorithm)
    sums = one.averages(own)
    for reply in replies:
        one.add(own, sums, reply)
    one.aggregate(own, sums)


def test_clients_have_equal_weights_or_their_image_counts():
    for weights, expected in (("uniform", 2.0), ("examples", 2.5)):
        algorithm = arm(configured("fedul", client_weights=weights))[0]
        like = {name: state(algorithm).tensors[name] for name in ("values", "buffers")}
        sent = (("client-0", 1.0, 10), ("client-1", 3.0, 30))
        averaged(
            algorithm,
            [
                Reply(name, n, {k: torch.full_like(v, value) for k, v in like.items()})
                for name, value, n in sent
            ],
        )
        assert float(values(algorithm)[0]) == float(buffers(algorithm)[0]) == expected


def test_the_global_step_scales_parameters_only():
    ends = {}
    for step in (1.0, 0.5, 2.0):
        algorithm = arm(configured("fedul", global_step=step))[0]
        before = values(algorithm).clone()
        like = {name: state(algorithm).tensors[name].clone() for name in ("values", "buffers")}
        averaged(algorithm, [Reply("client-0", 1, {name: tensor + 1 for name, tensor in like.items()})])
        torch.testing.assert_close(values(algorithm), before + step)
        torch.testing.assert_close(buffers(algorithm), like["buffers"] + 1)
        ends[step] = values(algorithm)
    assert torch.equal(ends[1.0], before + 1)


def test_average_of_identical_models_is_the_same_model():
    algorithm = arm(configured("fedul"))[0]
    before = values(algorithm).clone()
    like = {name: state(algorithm).tensors[name] for name in ("values", "buffers")}
    averaged(algorithm, [Reply(client, 7, like) for client in ("client-0", "client-1")])
    assert torch.equal(values(algorithm), before)


def test_a_diverged_client_is_rejected_by_name():
    def breaks(reply: Reply) -> None:
        if "values" in reply.tensors:
            reply.tensors["values"] = reply.tensors["values"] * torch.nan

    algorithm = arm(configured("fedul", quorum=0.5), wrap=lies(breaks, "client-1"))[0]
    algorithm.turn()
    assert len(algorithm.rejected) == 1
    assert bool(torch.isfinite(values(algorithm)).all())
