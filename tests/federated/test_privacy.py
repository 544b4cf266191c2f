"""Differential privacy of clients agrees with plain formulas and published numbers.

Impossible requests are refused.
"""

import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

from tests.federated import tiny_sets
from tests.federated.engine_wrappers import tampered
from tests.federated.tiny import again, arm, federation, finish, settings, updates, values, workspace_of
from uefl import config
from uefl.aggregation import WeightedMean
from uefl.algorithms.base import Algorithm, registry
from uefl.deploy.setting import Setting
from uefl.engines.base import Reply
from uefl.errors import UserError
from uefl.privacy import NoisyMean, PoissonParticipants, Privacy, check, clip_factor, gaussian
from uefl.progress import PlainProgress

opacus = pytest.importorskip("opacus", reason="the extra 'privacy' is not installed")

PRIVATE = {"privacy": "central", "norm_layer": "group", "normalize": "centered"}
LITTLE = {"clip_norm": 1e-3}
"""so little noise that the smallest of runs does not diverge"""
SECRET = b"secret" * 5
FIVE = {"sizes": (48,) * 5, "noise": (0.1,) * 5}
ON_SETS = ("fedul", "fedpl", "fedllp", "fedllp-vat", "fedavg-labeled")
PURE = ("fedavg", "fedbn", "fedavg-wide", "fedprox", "vhl", *ON_SETS)
"""algorithms that noise must go with; it may go with others"""


def private(key=SECRET, fed=None, wrap=lambda e: e, algorithm="fedavg", **keys):
    cfg = settings(algorithm, **(PRIVATE | keys))
    return arm(cfg, fed or federation(), wrap, privacy=Privacy(cfg.run, key))[0]


def privacy(**keys):
    return Privacy(settings("fedavg", **(PRIVATE | keys)).run, SECRET)


OLD = updates(1, 1.0, seed=9)[0]


class MeansOnly:
    """An algorithm with some tensors to average."""

    def __init__(self, averages):
        self.context, self._averages = SimpleNamespace(clients=tuple("abc")), averages

    def averages(self, state):
        return self._averages


def summed(mechanism, sent):
    algorithm = MeansOnly({name: WeightedMean(old) for name, old in OLD.items()})
    means = mechanism.averages(algorithm, None)
    for one in sent:
        mechanism.add(algorithm, None, means, Reply("a", tensors=one))
    return means


def flat(tensors):
    return np.concatenate([t.double().numpy().ravel() for t in tensors.values()])


# --- the mechanism ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-3, 0.3, 1.0, 1e4, 1e30])
def test_changes_are_clipped_by_their_joint_norm_and_summed(scale):
    sent, expected = updates(5, scale), np.zeros(19)
    for one in sent:
        change = flat(one) - flat(OLD)
        expected += change * min(1, 2.5 / np.linalg.norm(change))
    found = flat({name: mean.sum for name, mean in summed(privacy(clip_norm=2.5), sent).items()})
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, 1e30])
def test_no_client_moves_the_sum_by_more_than_the_norm(scale):
    mechanism = privacy(clip_norm=0.7)
    sent = updates(5, 1.0)
    without = flat({name: mean.sum for name, mean in summed(mechanism, sent).items()})
    for liar in (
        *updates(3, scale, seed=1),
        {name: torch.full_like(old, scale) for name, old in OLD.items()},
    ):
        moved = np.linalg.norm(
            flat({name: mean.sum for name, mean in summed(mechanism, [*sent, liar]).items()}) - without
        )
        assert moved <= 0.7 * (1 + 1e-12)
        assert moved > 0.699 or scale == 1e-3


def test_short_update_is_unchanged():
    x, old = torch.tensor([3.0, 4.0]), torch.zeros(2)
    assert clip_factor({"a": (x, old)}, 5.0) == 1.0
    assert clip_factor({"a": (x, old)}, 2.5) == 0.5
    assert clip_factor({"a": (x, old), "b": (torch.tensor([12.0]), torch.zeros(1))}, 6.5) == 0.5
    assert clip_factor({"a": (x, x)}, 1.0) == 1.0


def test_noise_is_normal_and_derived_from_key_place_and_update():
    hides = torch.zeros(100_000, dtype=torch.float64)
    one = gaussian(b"key", hides, 2.0, "arm", 3)
    assert kstest(one.numpy() / 2, "norm").pvalue > 0.01
    assert torch.equal(one, gaussian(b"key", hides, 2.0, "arm", 3))
    for other in (
        gaussian(b"kez", hides, 2.0, "arm", 3),
        gaussian(b"key", hides, 2.0, "arm", 4),
        gaussian(b"key", hides + 1e-300, 2.0, "arm", 3),
        # the difference of one draw at two scales would reveal the hidden update
        gaussian(b"key", hides, 4.0, "arm", 3),
    ):
        assert abs(float(np.corrcoef(one.numpy(), other.numpy())[0, 1])) < 0.02


def test_every_round_has_noise_of_its_own():
    drawn = []
    for round in range(2):
        mean = NoisyMean(torch.zeros(9), 3.0)
        privacy().finish({"values": mean}, "arm", round)
        drawn.append(mean.sum)
    assert not torch.equal(*drawn)


@pytest.mark.parametrize(("multiplier", "clip"), [(1.0, 1.0), (3.0, 0.5)])
def test_a_round_s_noise_has_its_deviation(multiplier, clip):
    keys = {"clip_norm": clip, "noise_multiplier": multiplier, "width": 8, "hidden": 64}
    one, other = private(**keys), private(key=b"another", **keys)
    for each in (one, other):
        each.turn()
    apart = (values(one) - values(other)).double().numpy()
    deviation = math.sqrt(2) * multiplier * clip / 3
    assert apart.std() == pytest.approx(deviation, rel=0.03)
    assert kstest(apart / deviation, "norm").pvalue > 0.01


def test_a_round_adds_the_sum_over_the_expected_number(monkeypatch):
    sent = []

    def keep(reply):
        sent.append(reply.tensors["values"].clone())

    monkeypatch.setattr(
        "uefl.privacy.gaussian", lambda key, hides, deviation, *place: torch.full_like(hides, deviation)
    )
    one = private(wrap=tampered(keep), clip_norm=0.2, noise_multiplier=0.5)
    old = values(one).double()
    one.turn()
    cut = [(x.double() - old) * min(1, 0.2 / float((x.double() - old).norm())) for x in sent]
    assert len(cut) == 3
    torch.testing.assert_close(values(one), (old + (sum(cut) + 0.1) / 3).float(), rtol=0, atol=1e-7)


def test_clients_weigh_equally_and_the_denominator_is_fixed(monkeypatch):
    monkeypatch.setattr(
        "uefl.privacy.gaussian", lambda key, hides, deviation, *place: torch.zeros_like(hides)
    )

    def meddle(reply):
        up = torch.zeros_like(old)
        up[0] = math.nan if reply.client == "silo-1" else 7.0
        reply.tensors = reply.tensors | {"values": old + up}
        reply.examples = 24 if reply.client == "silo-2" else 1

    one = private(wrap=tampered(meddle), quorum=0.5, clip_norm=0.25)
    old = values(one).clone()
    one.turn()
    assert float((values(one) - old)[0]) == pytest.approx(2 * 0.25 / 3)
    assert [line["client"] for line in one.rejected] == ["silo-1"]


def test_each_client_participates_independently():
    names = tuple(f"silo-{i}" for i in range(50))
    coins = PoissonParticipants(names, 0.3, SECRET, "arm")
    drawn = np.array([[name in coins.of(round) for name in names] for round in range(200)])
    assert drawn.mean() == pytest.approx(0.3, abs=0.02)
    assert drawn.sum(1).std() == pytest.approx(math.sqrt(50 * 0.3 * 0.7), rel=0.15)
    assert np.abs(np.corrcoef(drawn.T) - np.eye(50)).max() < 0.35
    assert coins.of(3) != PoissonParticipants(names, 0.3, b"another", "arm").of(3)
    assert coins.of(3) != PoissonParticipants(names, 0.3, SECRET, "other").of(3)
    assert PoissonParticipants(names, 1.0, SECRET, "arm").of(3) == names


def test_a_round_without_clients_has_noise_too():
    one = private(participation=1e-6, noise_multiplier=5.0)
    assert one.participants.of(0) == ()
    old = values(one).clone()
    one.turn()
    assert float((values(one) - old).std()) == pytest.approx(5.0 / 3e-6, rel=0.1)


def test_with_local_noise_the_server_gets_only_noisy_updates():
    sent = {}

    def keep(reply):
        sent[reply.client] = (reply.tensors["values"].clone(), reply.examples)

    keys = {"noise_multiplier": 2.0, "clip_norm": 0.5, "width": 8, "hidden": 64}
    one = private(wrap=tampered(keep), **(keys | {"privacy": "local"}))
    old = values(one).clone()
    one.turn()
    for update, examples in sent.values():
        assert examples == 1
        noise = (update - old).double().numpy()
        assert noise.std() == pytest.approx(1.0, rel=0.03)
    torch.testing.assert_close(values(one), torch.stack([update for update, _ in sent.values()]).mean(0))


# --- the accountant ---------------------------------------------------------------------------------------


def test_the_accountant_gives_published_numbers():
    """McMahan et al. 2018, table 1, has 4.634 at delta 1e-9, by a slightly looser conversion."""
    of_paper = privacy(participation=5000 / 763_430, noise_multiplier=1.0, delta=1e-9)
    assert 0.9 * 4.634 < of_paper.epsilon(5000) <= 4.634
    assert privacy(participation=0.01, noise_multiplier=4.0).epsilon(10_000) == pytest.approx(
        1.0355, abs=1e-3
    )
    # Abadi et al. 2016 report 1.26 for these


@pytest.mark.parametrize(("multiplier", "rounds"), [(1.0, 1), (5.0, 20), (2.0, 300), (40.0, 10)])
def test_without_sampling_it_is_close_above_the_exact_epsilon(multiplier, rounds):
    """The exact epsilon of the Gaussian mechanism is from Balle and Wang 2018, theorem 8."""
    sigma, spent = multiplier / math.sqrt(rounds), privacy(noise_multiplier=multiplier).epsilon(rounds)

    def delta(epsilon):
        return norm.cdf(1 / (2 * sigma) - epsilon * sigma) - math.exp(epsilon) * norm.cdf(
            -1 / (2 * sigma) - epsilon * sigma
        )

    assert delta(spent) <= 1e-5 < delta(0.85 * spent)


def test_epsilon_grows_with_rounds_and_falls_with_noise():
    for keys in ({}, {"participation": 0.2}, {"privacy": "local"}):
        spent = [privacy(**keys).epsilon(rounds) for rounds in range(6)]
        assert spent[0] == 0
        assert sorted(set(spent)) == spent
    assert (
        privacy(participation=0.1).epsilon(10)
        < privacy(participation=0.5).epsilon(10)
        < privacy().epsilon(10)
    )
    assert privacy(noise_multiplier=2.0).epsilon(10) < privacy(noise_multiplier=1.5).epsilon(10)


def test_local_noise_protects_a_replaced_update():
    assert privacy(privacy="local", noise_multiplier=4.0).epsilon(7) == privacy(noise_multiplier=2.0).epsilon(
        7
    )
    one = private(privacy="local", participation=0.5, fed=federation(**FIVE), rounds=[4], **LITTLE)
    asked = [one.participants.of(round) for round in range(4)]
    most = max(sum(f"silo-{i}" in names for names in asked) for i in range(5))
    records = finish(one)
    assert records[-1]["epsilon"] == one.privacy.epsilon(most)
    assert most < 4


def test_every_record_has_the_epsilon_so_far():
    one = private(**LITTLE)
    spent = {r["round"]: r["epsilon"] for r in finish(one)}
    assert spent == {round: one.privacy.epsilon(round + 1) for round in range(3)}


def test_an_arm_ends_before_it_spends_too_much():
    one = private(rounds=[2, 5], max_epsilon=privacy().epsilon(4) + 1e-6, **LITTLE)
    assert max(r["round"] for r in finish(one)) == 3
    assert one.finished
    exact = private(rounds=[2, 2], max_epsilon=privacy().epsilon(2) + 1e-6, **LITTLE)
    assert max(r["round"] for r in finish(exact)) == 1


# --- refusals --------------------------------------------------------------------------------------------


def for_check(name="fedavg", **keys):
    on_sets = registry()[name].kind == "sets"
    cfg = (tiny_sets.settings if on_sets else settings)(name, **(PRIVATE | keys))
    return cfg, workspace_of(cfg, tiny_sets.federation() if on_sets else None)


@pytest.mark.parametrize("name", registry())
def test_only_algorithms_that_send_just_a_model_are_private(name):
    """For each accepted algorithm, the test checks two turns: its clients send the model and keep nothing."""
    cfg, workspace = for_check(name)
    refused = ""
    try:
        check(cfg, "arm", workspace)
    except UserError as error:
        refused = str(error)
    if refused:
        assert name not in PURE
        assert re.search(r"key 'run.privacy': arm 'arm' \(.*\) .*clients", refused)
        return
    assert not workspace.flat.buffers.numel()
    sent, make = [], arm if registry()[name].kind == "labeled" else tiny_sets.arm
    one = make(cfg, wrap=tampered(lambda reply: sent.append({*reply.tensors, *reply.private})))[0]
    one.turn(), one.turn()
    assert {"values", "buffers"} in sent
    assert all(names <= {"values", "buffers"} for names in sent)


def test_batch_norm_is_refused():
    cfg, workspace = for_check(norm_layer="batch")
    with pytest.raises(UserError, match="norm_layer = 'group'"):
        check(cfg, "arm", workspace)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"normalize": "standard"}, r"key 'data\.normalize': .*privacy = 'central' .*'centered'"),
        ({"uncertainty": "ensemble", "members": 2}, r"key 'run\.privacy': .*'none' .*ensemble"),
        ({"aggregation": "median"}, r"key 'run\.aggregation'.*noise"),
        ({"privacy": "local", "max_update_norm": 3.0}, r"key 'run\.max_update_norm'"),
        ({"privacy": "none", "noise_multiplier": 2.0}, r"key 'run\.noise_multiplier'.*privacy"),
    ],
)
def test_incompatible_keys_are_refused(keys, line):
    with pytest.raises(UserError, match=line):
        settings("fedavg", **(PRIVATE | keys))


def test_a_budget_below_a_round_and_no_library_are_refused(monkeypatch):
    cfg, workspace = for_check(max_epsilon=0.1)
    with pytest.raises(UserError, match=r"key 'run\.max_epsilon': .*\b4\.73"):
        check(cfg, "arm", workspace)
    monkeypatch.setitem(sys.modules, "opacus", None)
    cfg, workspace = for_check()
    with pytest.raises(UserError, match=r"'\.\[privacy\]'"):
        check(cfg, "arm", workspace)


def test_algorithm_with_undeclared_averages_is_detected():
    class Other:
        old = torch.zeros(1)

    with pytest.raises(TypeError, match="only_the_model = False"):
        privacy().averages(MeansOnly({"a": Other()}), None)


@pytest.mark.parametrize("mode", ["central", "local"])
def test_undeclared_client_tensor_is_detected(mode):
    class Keeper(Algorithm):
        def before_round(self, work):
            work.private["seen"] = torch.zeros(1)

    cfg = settings("fedavg", **(PRIVATE | LITTLE | {"privacy": mode}))
    one, *_ = arm(cfg, federation(), algorithm=Keeper(), privacy=Privacy(cfg.run, SECRET))
    with pytest.raises(TypeError, match=r"Keeper: work\.private .*'seen', .*only_the_model = False"):
        finish(one)


# --- the network ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", ["cnn", "cnn5x5"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_group_norm_replaces_every_batch_norm(encoder, precision):
    workspace = workspace_of(
        settings("fedavg", {"run": {"precision": precision}}, norm_layer="group", encoder=encoder, width=8)
    )
    kinds = {type(piece).__name__ for piece in workspace.net.modules()}
    assert "GroupNorm" in kinds
    assert not kinds & {"BatchNorm1d", "BatchNorm2d"}
    with workspace.amp():
        logits = workspace.net.train()(torch.randn(4, 1, 8, 8))
    logits.float().sum().backward()
    assert bool(torch.isfinite(workspace.flat.values.grad).all())


def test_group_norm_is_not_for_pretrained_or_given_networks():
    for keys in ({"encoder": "resnet18", "pretrained": True}, {"encoder": "given"}):
        base = {"data": {"clients": 3}, "arms": {"fedavg": {}}}
        with pytest.raises(UserError, match=r"key 'model\.norm_layer'"):
            config.load(base, norm_layer="group", **keys)


# --- runs -------------------------------------------------------------------------------------------------


def with_privacy(cfg, fed=None):
    return arm(cfg, fed, privacy=Privacy(cfg.run, SECRET))


@pytest.mark.parametrize("keys", [{}, {"participation": 0.6}, {"privacy": "local"}])
def test_a_run_that_is_resumed_is_the_uninterrupted_one(keys, monkeypatch):
    monkeypatch.setattr("uefl.client.client.secrets.token_bytes", lambda size: b"k" * size)
    cfg, fed = settings("fedavg", **(PRIVATE | LITTLE | {"rounds": [2]} | keys)), federation()
    assert again(cfg, fed, with_privacy) == finish(with_privacy(cfg, fed)[0])


def test_on_unlabeled_sets():
    cfg = tiny_sets.settings("fedul", **PRIVATE, **LITTLE)
    records = finish(tiny_sets.arm(cfg, privacy=Privacy(cfg.run, SECRET))[0])
    assert records[-1]["epsilon"] > 0


def test_no_silo_gets_the_mean_of_the_pixels_of_others():
    fed = federation()
    assert Setting.of(settings("fedavg"), fed, 1).mean == (0.3,)
    hidden = Setting.of(settings("fedavg", **PRIVATE), fed, 1)
    assert (hidden.mean, hidden.std) == ((0.0,), (1.0,))


def test_the_progress_line_has_epsilon():
    lines = []
    shown = PlainProgress(lines.append)
    shown.round("fedavg", 0, [{"accuracy": 0.5, "entropy": 1.0, "epsilon": 3.25}])
    shown.round("fedavg", 0, [{"accuracy": 0.5, "entropy": 1.0}])
    assert lines == [
        "fedavg round 1  accuracy 0.500  entropy 1.000  epsilon 3.250",
        "fedavg round 1  accuracy 0.500  entropy 1.000",
    ]
