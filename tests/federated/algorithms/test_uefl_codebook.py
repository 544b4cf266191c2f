"""Initialization, learning, search and extension of codewords: the effect of each option."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from tests.federated.engine_wrappers import recorded, tampered
from tests.federated.tiny import (
    again,
    arm,
    federation,
    finish,
    message_to,
    settings,
    state,
    turns,
    visible,
    workspace_of,
)
from uefl import config
from uefl.algorithms.uefl import quantizer
from uefl.algorithms.uefl.quantizer import Quantizer
from uefl.config.config import tomllib
from uefl.engines.base import Message
from uefl.errors import UserError

NAMES = ("silo-0", "silo-1", "silo-2")
OPTIONS = [
    {"criterion": "loss"},
    {"extension": "residual"},
    {"extension": "residual", "ext_share": "group"},
    {"personal": True},
    {"personal": True, "codebook_after": 1},
    {"personal": [["silo-0", "silo-2"], ["silo-1"]], "reinit": True},
    {"codebook_after": 2},
    {"reinit": True},
    {"segment_codebooks": True},
    {"segment_codebooks": True, "extension": "residual", "ema_decay": 0.5},
    {"codebook_lr": 30.0},
    {"ema_decay": 0.9},
    {"ema_decay": 0.9, "ext_share": "group", "reinit": True, "revive_below": 0.5},
    {"revive_below": 0.5},
    {"search": "cosine"},
    {"estimator": "rotation"},
    {"keep": "better", "new_codewords": "normal"},
    {"keep": "better", "ema_decay": 0.9},
    {"lr_schedule": "cosine"},
]


@functools.cache
def without_options(extend):
    return finish(arm(settings(rounds=[2, 2], extend=extend))[0])


@pytest.mark.slow
@pytest.mark.parametrize("keys", OPTIONS, ids=lambda keys: "-".join(keys))
def test_every_option_changes_the_run_and_resumes_bit_for_bit(keys):
    extend = "uncertain" if keys == {"criterion": "loss"} else "all"
    cfg = settings(rounds=[2, 2], extend=extend, **keys)
    records = finish(arm(cfg)[0])
    assert records == again(cfg)
    # the loss may select the same clients as the entropy
    assert records != without_options(extend) or keys == {"criterion": "loss"}
    assert max(r["codewords"] for r in records) > min(r["codewords"] for r in records)


# --- learning ---------------------------------------------------------------------------------------------


def test_codewords_learn_where_features_are():
    """The shared codebook moves towards the features, both by gradient and by moving averages."""
    for keys in ({"codebook_lr": 30.0}, {"ema_decay": 0.9}):
        algorithm, workspace, _ = arm(settings(extend="none", rounds=[4], local_epochs=3, **keys))
        before = visible(algorithm, "silo-0").clone()
        turns(algorithm, 4)
        tokens = features(workspace, algorithm, "silo-0")
        start, end = (
            quantization_error(tokens, codebook) for codebook in (before, visible(algorithm, "silo-0"))
        )
        assert end < 0.5 * start


def test_an_extension_lowers_the_quantization_error():
    for keys in ({}, {"extension": "residual"}, {"segment_codebooks": True}, {"ema_decay": 0.9}):
        algorithm, workspace, _ = arm(settings(extend="all", rounds=[2, 1], lr=1e-6, **keys))
        turns(algorithm, 4)
        tokens, codebook = features(workspace, algorithm, "silo-1"), visible(algorithm, "silo-1")
        quantize = algorithm.members[0].algorithm.quantizer
        errors = [
            float((tokens - quantize(tokens, part).values).square().mean())
            for part in (codebook[..., :4, :], codebook)
        ]
        assert errors[1] < 0.5 * errors[0]


def features(workspace, algorithm, client):
    """Return ``[N, H', W', D]``, the features of a client's training images under the current model."""
    workspace.net.eval()
    own = state(algorithm).tensors
    workspace.flat.set(own["values"], own["buffers"])
    data = next(s for s in federation().clients if s.name == client).load()
    with torch.no_grad():
        return workspace.net.tokens(workspace.normalize(data.train.images))


def quantization_error(tokens, codebook):
    return float((tokens - Quantizer()(tokens, codebook).values).square().mean())


def test_codebook_lr_is_a_multiple_of_the_networks_lr():
    """The first step of Adam moves every element with a gradient by the learning rate."""
    moves = {}
    for factor in (1.0, 30.0):
        algorithm, _, _ = arm(
            settings(extend="none", rounds=[1], local_steps=1, lr=1e-3, codebook_lr=factor, usage_aware=False)
        )
        before = {name: tensor.clone() for name, tensor in state(algorithm).tensors.items()}
        algorithm.turn()
        after = state(algorithm).tensors
        moves[factor] = [float((after[name] - before[name]).abs().max()) for name in ("part.0", "values")]
    assert moves[1.0][0] == pytest.approx(1e-3, rel=0.01)
    assert moves[30.0][0] == pytest.approx(3e-2, rel=0.01)
    assert moves[30.0][1] == moves[1.0][1]


def test_moving_averages_equal_the_definition():
    moving, codebook = quantizer.moving_start(torch.eye(2)), torch.eye(2)
    tokens = torch.tensor([[[[3.0, 0.0], [5.0, 1.0]]]])
    out = Quantizer(decay=0.75)(tokens, codebook, with_sums=True)
    moving = quantizer.moved(moving, out, 0.75)
    assert moving.tolist() == [[0.75 + 0.25 * 8.0, 0.25, 0.75 + 0.25 * 2], [0.0, 0.75, 0.75]]
    found = quantizer.codewords(moving, codebook)
    torch.testing.assert_close(found, torch.tensor([[2.75 / 1.25, 0.25 / 1.25], [0.0, 1.0]]))
    unused = torch.zeros(2, 3)
    assert torch.equal(quantizer.codewords(unused, codebook), codebook)
    # only the commitment
    assert float(out.loss) == pytest.approx(0.25 * float((tokens - out.values).square().mean()))


def test_the_server_averages_sums_and_counts_of_moving_averages():
    def meddle(reply):
        if "moving" in reply.tensors:
            first = reply.client == "silo-0"
            sums, counts = (1.0 * 30, 30.0) if first else (4.0 * 10, 10.0)  # codewords 1 and 4
            moving = reply.tensors["moving"] = torch.full_like(reply.tensors["moving"], sums)
            moving[:, -1] = counts

    fed = federation(sizes=(20, 20), noise=(0.1, 0.1))
    algorithm, _, _ = arm(settings(extend="none", ema_decay=0.9), fed, wrap=tampered(meddle))
    algorithm.turn()
    torch.testing.assert_close(visible(algorithm, "silo-0"), torch.full((4, 4), (30 + 40) / 40))


def test_dead_codewords_move_next_to_the_most_used_ones():
    codebook = torch.arange(12.0).view(4, 3) + 1
    new = quantizer.revived(codebook, torch.tensor([0, 90, 9, 1]), 0.1)
    assert torch.equal(new[1:3], codebook[1:3])
    assert float((new[0] - codebook[1]).abs().max()) < 0.05 * float(codebook[1].abs().max())
    assert not torch.equal(new[0], codebook[1])
    assert float((new[3] - codebook[2]).abs().max()) < 0.05 * float(codebook[2].abs().max())
    one_used = quantizer.revived(codebook, torch.tensor([0, 90, 1, 1]), 0.1)
    assert float((one_used - codebook[1]).abs().max()) < 0.05 * float(codebook[1].abs().max())
    assert torch.equal(quantizer.revived(codebook, torch.tensor([5, 5, 5, 5]), 0.1), codebook)
    of_segments = quantizer.revived(
        torch.stack([codebook, codebook]), torch.tensor([[5, 5, 5, 5], [0, 90, 9, 1]]), 0.1
    )
    assert torch.equal(of_segments[0], codebook)
    assert not torch.equal(of_segments[1], codebook)


def test_averages_of_a_revived_codeword_start_again():
    one = arm(settings(extend="none", ema_decay=0.9, revive_below=0.5))[0]
    one.turn()
    tensors = state(one).tensors
    codebook, averages = tensors["part.0"].clone(), 2 * tensors["moving.0"]
    tensors["moving.0"] = averages.clone()
    one.members[0].algorithm.revive(state(one), 0, torch.tensor([0, 5, 5, 5]))
    assert not torch.equal(tensors["part.0"][0], codebook[0])
    assert torch.equal(tensors["part.0"][1:], codebook[1:])
    # as after one segment that equals the codeword
    assert torch.equal(tensors["moving.0"][0], torch.cat([tensors["part.0"][0], torch.ones(1)]))
    assert torch.equal(tensors["moving.0"][1:], averages[1:])


def test_revival_puts_more_codewords_to_use():
    used = {}
    for below in (0.0, 0.1):
        algorithm, _, _ = arm(
            settings(extend="none", codewords=16, rounds=[6], revive_below=below, codebook_lr=10.0)
        )
        used[below] = sum(r["perplexity_full"] for r in finish(algorithm)[-3:])
    assert used[0.1] > 1.2 * used[0.0]


def test_a_cosine_schedule_decays_lr_to_nearly_zero():
    constant, cosine = (
        settings(lr_schedule=kind, rounds=[3, 1], lr=0.2).training for kind in ("constant", "cosine")
    )
    assert [constant.lr_in(round) for round in range(4)] == [0.2] * 4
    assert [cosine.lr_in(round) for round in range(4)] == pytest.approx(
        [0.2, 0.2 * 0.853553, 0.1, 0.2 * 0.146447], rel=1e-5
    )
    assert cosine.lr_in(4) == cosine.lr_in(3)
    moves = []
    for kind in ("constant", "cosine"):  # Adam's first step is the learning rate itself
        algorithm, _, _ = arm(
            settings("fedavg", lr_schedule=kind, rounds=[2], local_steps=1, lr=1e-3),
            federation(sizes=(48,), noise=(0.1,)),
        )
        for _ in range(2):
            before = state(algorithm).tensors["values"].clone()
            algorithm.turn()
            moves.append(float((state(algorithm).tensors["values"] - before).abs().max()))
    assert moves == pytest.approx([1e-3, 1e-3, 1e-3, 0.5e-3], rel=0.01)


# --- searching --------------------------------------------------------------------------------------------


def test_cosine_search_chooses_the_smallest_angle():
    codebook = torch.tensor([[1.0, 0.0], [10.0, 10.0]])
    tokens = torch.tensor([[[[1.0, 0.9]]]])
    assert Quantizer()(tokens, codebook).values.flatten().tolist() == [1.0, 0.0]
    assert Quantizer(search="cosine")(tokens, codebook).values.flatten().tolist() == [10.0, 10.0]


def test_segments_with_own_codebooks_use_own_codewords():
    codebook = torch.tensor([[[0.0], [1.0]], [[10.0], [11.0]]])
    out = Quantizer(segment_codebooks=True)(torch.tensor([[[[0.8, 0.9]]], [[[0.1, 12.0]]]]), codebook)
    assert out.values.flatten(1).tolist() == [[1.0, 10.0], [0.0, 11.0]]
    assert out.codes.tolist() == [[1, 2], [0, 3]]
    assert out.counts.tolist() == [[1, 1], [1, 1]]


def test_usage_lists_shared_codewords_before_extensions():
    """Each segment has two shared and two new codewords."""
    algorithm = workspace_of(settings(segment_codebooks=True, segments=2)).algorithm
    # 0, 1 are shared of the first segment, 4, 5 of the second
    codes = torch.tensor([[0, 4], [1, 5], [2, 6], [2, 7]])
    work = SimpleNamespace(private={}, message=Message({"codebook": torch.zeros(2, 4, 8)}))
    record = algorithm.measure(work, [{"codes": codes}], last=True)
    assert record["usage"] == [1, 1, 1, 1, 2, 1, 0, 1]


def test_residual_stages_quantize_residuals_with_one_gradient():
    codebook = torch.tensor([[0.0], [10.0], [1.0], [-1.0]])
    tokens = torch.tensor([[[[8.8]]]], requires_grad=True)
    out = Quantizer(commitment=0.0, stage=2)(tokens, codebook)
    assert float(out.values.detach()) == 9.0
    assert out.codes.tolist() == [[1, 3]]
    assert out.counts.tolist() == [0, 1, 0, 1]
    out.values.sum().backward()
    assert float(tokens.grad) == 1.0


# --- making -----------------------------------------------------------------------------------------------


def test_codebook_after_starts_quantizing_with_a_joint_codebook():
    asked = []
    algorithm, _, _ = arm(
        settings(extend="none", codebook_after=2, rounds=[2, 1]), wrap=recorded(asked.append)
    )
    records = finish(algorithm)
    kinds = [
        {("codebook" in m.tensors, "new_codewords" in m.options) for m in messages.values()}
        for messages in asked
    ]
    assert kinds == [{(False, False)}] * 2 + [{(False, True)}] + [{(True, False)}] * 3
    assert [r.get("perplexity") is None for r in records] == [True] * 3 + [False] * 6
    assert [r["codewords"] for r in records] == [4] * 9


def test_centers_of_clients_are_weighted_by_their_masses():
    def tamper(reply):
        """Give silo k the center k with the mass k + 1."""
        if "mass" in reply.tensors:
            reply.tensors["part"].fill_(int(reply.client[-1]))
            reply.tensors["mass"].fill_(int(reply.client[-1]) + 1)

    cfg = settings(extend="none", codewords=1, codebook_after=1, rounds=[2], lr=1e-12)
    algorithm, _, _ = arm(cfg, wrap=tampered(tamper))
    turns(algorithm, 2)
    codebook = visible(algorithm, "silo-0")
    torch.testing.assert_close(codebook, torch.full_like(codebook, (0 * 1 + 1 * 2 + 2 * 3) / 6))


@pytest.mark.parametrize(("extension", "has"), [("residual", {True}), ("append", {False})])
def test_a_residual_group_extension_is_made_of_residuals(extension, has):
    asked = []
    finish(
        arm(
            settings(extend="all", ext_share="group", extension=extension, rounds=[1, 1]),
            wrap=recorded(asked.append),
        )[0]
    )
    found = [m for messages in asked for m in messages.values() if "ask" in m.options]
    assert {"codebook" in m.tensors for m in found} == has


def test_codebook_after_the_first_iteration_is_rejected():
    cfg, fed = settings(codebook_after=3, rounds=[2, 2]), federation()
    algorithm, workspace, _ = arm(cfg, fed)
    with pytest.raises(UserError, match=r"^key 'arms.arm.codebook_after': .*\b2 rounds.*\b3$"):
        algorithm.members[0].algorithm.check(fed, "arm", workspace.net)


def test_a_rebuilt_codebook_is_shared_and_keeps_extensions():
    algorithm, _, _ = arm(settings(extend="all", reinit=True, rounds=[1, 1, 1], lr=1e-12))
    start = visible(algorithm, "silo-0").clone()
    turns(algorithm, 2)
    # the first iteration has its initial codewords
    torch.testing.assert_close(visible(algorithm, "silo-0"), start, atol=1e-6, rtol=0)
    turns(algorithm, 2)
    before = [visible(algorithm, name).clone() for name in NAMES]
    algorithm.turn()
    after = [visible(algorithm, name) for name in NAMES]
    assert all(torch.equal(after[0][:4], codebook[:4]) for codebook in after)
    for old, new in zip(before, after, strict=True):
        assert not torch.equal(old[:4], new[:4])
        torch.testing.assert_close(old[4:], new[4:8], atol=1e-6, rtol=0)  # lr 1e-12: training moved nothing


@pytest.mark.parametrize("after", [0, 1])
def test_personal_codebooks_are_never_averaged(after):
    algorithm, _, _ = arm(settings(extend="none", personal=True, rounds=[2, 1], codebook_after=after))
    assert (len({tuple(visible(algorithm, name).flatten().tolist()) for name in NAMES})) == 1
    finish(algorithm)
    codebooks = [visible(algorithm, name) for name in NAMES]
    assert [len(codebook) for codebook in codebooks] == [4] * 3
    assert len({tuple(codebook.flatten().tolist()) for codebook in codebooks}) == 3


@pytest.mark.parametrize("after", [0, 1])
def test_groups_share_one_codebook_per_domain(after):
    keys = {"extend": "none", "rounds": [2, 1], "codebook_after": after}
    algorithm, _, _ = arm(settings(personal=[["silo-0", "silo-2"], ["silo-1"]], **keys))
    finish(algorithm)
    first, second, third = (visible(algorithm, name) for name in NAMES)
    assert len(first) == len(second) == 4
    assert torch.equal(first, third)
    assert not torch.equal(first, second)


def test_one_group_equals_shared_and_single_groups_personal():
    for same, groups in (({}, [[*NAMES]]), ({"personal": True}, [[name] for name in NAMES])):
        assert finish(arm(settings(personal=groups))[0]) == finish(arm(settings(**same))[0])


def test_groups_are_in_the_file_of_a_run():
    cfg = settings(personal=[["silo-0", "silo-2"], ["silo-1"]])
    assert cfg.arms["arm"].parameters.personal == (("silo-0", "silo-2"), ("silo-1",))
    assert config.from_table(tomllib.loads(cfg.to_toml())) == cfg


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([["silo-0", "silo-1"]], r"'silo-2': .*\b0\b"),
        ([[*NAMES], ["silo-1"]], r"'silo-1': .*\b2\b"),
        ([[*NAMES], ["silo-9"]], "'silo-9': .*client"),
    ],
)
def test_groups_have_every_client_once(groups, said):
    workspace = workspace_of(settings(personal=groups))
    with pytest.raises(UserError, match=rf"^key 'arms.arm.personal': .*{said}"):
        workspace.algorithm.check(federation(), "arm", workspace.net)


# --- deciding ---------------------------------------------------------------------------------------------


def test_extension_by_loss_compares_holdout_cross_entropy():
    algorithm, _, notices = arm(settings(criterion="loss", rounds=[2, 1], gamma=0.1))
    records = turns(algorithm, 3)[-1]
    loss = {r["client"]: r["holdout_nll"] for r in records}
    assert state(algorithm).plain["threshold"] == pytest.approx(1.1 * min(loss.values()))
    assert state(algorithm).plain["uncertain"] == [
        name for name in NAMES if loss[name] > 1.1 * min(loss.values())
    ]
    assert "loss" in notices[-1]


def test_a_client_keeps_an_extension_that_lowers_its_loss():
    """Compare with the losses of the same model on the holdout, with and without the extension."""
    keys = {"extend": "all", "keep": "better", "new_codewords": "normal", "rounds": [4, 2]}
    algorithm, workspace, _ = arm(settings(**keys))
    turns(algorithm, 6)
    gains, net = {}, workspace.net.eval()
    for client in federation().clients:
        split, codebook = client.load().holdout, visible(algorithm, client.name)
        workspace.load(message_to(algorithm, client.name, train=False))
        without, gained = (
            workspace.algorithm.infer(net, workspace.normalize(split.images), {"codebook": seen}).detach()
            for seen in (codebook[:4], codebook)
        )
        of = [float(F.cross_entropy(logits.double(), split.labels)) for logits in (without, gained)]
        gains[client.name] = of[0] - of[1]
    found = {record["client"]: record["extension_gain"] for record in algorithm.turn()}
    assert found == pytest.approx(gains, abs=1e-6)
    left = {name: len(visible(algorithm, name)) for name in NAMES}
    assert left == {name: 8 if gain > 0 else 4 for name, gain in found.items()}
    assert set(left.values()) == {4, 8}


@pytest.mark.parametrize("keys", [{}, {"ext_share": "group"}, {"ema_decay": 0.9}], ids=str)
def test_a_removed_extension_leaves_the_others(keys):
    algorithm, _, _ = arm(settings(extend="all", rounds=[1, 1], **keys))
    finish(algorithm)
    before = [visible(algorithm, name).clone() for name in NAMES]
    algorithm.algorithm.remove(state(algorithm), NAMES[0])
    for name, codebook, left in zip(NAMES, before, (4, 8, 8), strict=True):
        assert torch.equal(visible(algorithm, name), codebook[:left])


def test_a_holdout_too_small_for_its_threshold_is_noted_once():
    said = "standard error"
    for gamma, times in ((1e-6, 1), (1e3, 0)):
        algorithm, _, notices = arm(settings(gamma=gamma, rounds=[1, 1, 1]))
        records = finish(algorithm)
        assert sum(said in line for line in notices) == times
    first = [r for r in records if r["round"] == 0]
    assert all(0 < r["holdout_entropy_se"] < r["holdout_entropy"] for r in first)


def test_moving_averages_have_no_learning_rate():
    with pytest.raises(UserError, match=r"^key 'arms.arm': codebook_lr\b.*gradient"):
        settings(ema_decay=0.9, codebook_lr=2.0)
