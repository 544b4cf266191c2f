import re

import pytest
import torch

from tests.federated.engine_wrappers import recorded, tampered
from tests.federated.tiny import again, arm, federation, finish, settings, state, turn_of, turns, visible
from uefl.algorithms.uefl.clustering import kmeans
from uefl.algorithms.uefl.codebook_algorithm import counts_per_batch
from uefl.algorithms.uefl.extension import above, drawn, unsure
from uefl.algorithms.uefl.quantizer import Quantizer
from uefl.engines.base import Message
from uefl.errors import UserError


def test_all_clients_get_the_same_averaged_codebook():
    algorithm, _, _ = arm(settings(rounds=[3]))
    before = visible(algorithm, "silo-0").clone()
    turns(algorithm, 3)
    codebooks = [visible(algorithm, f"silo-{k}") for k in range(3)]
    assert all(torch.equal(codebooks[0], codebook) for codebook in codebooks)
    assert not torch.equal(before, codebooks[0])


def test_dropout_passes_differ_between_measurements_of_a_model():
    records = finish(arm(settings(dropout=0.5, rounds=[2]))[0])
    assert all(r["entropy"] != r["entropy_deterministic"] for r in records)


def test_a_line_shows_the_distance_to_the_threshold():
    entropy = {"a": 0.5, "b": 0.9, "c": 0.502, "d": 0.50001}
    assert above(0.5, entropy, ["b", "c", "d"]) == "b (1.80 x least), c (1.004 x least), d (1.00002 x least)"
    assert above(0.0, {"a": 0.0, "b": 0.1}, ["b"]) == "b"
    assert above(0.5, entropy, []) == ""


def test_the_largest_standard_error_decides_the_chance_note():
    records = [{"client": "a", "holdout_entropy_se": 0.1}, {"client": "b", "holdout_entropy_se": 0.3}]
    entropy = {"a": 1.0, "b": 1.5}
    assert unsure(1.3, entropy, records) is None
    assert re.search(r"\bb\b.* 0\.300 nats, .*threshold .*0\.200\b", unsure(1.2, entropy, records))


def test_only_clients_above_the_threshold_are_extended():
    algorithm, _, notices = arm(settings(rounds=[4, 1], local_epochs=3, gamma=0.2))
    turns(algorithm, 4)
    shared = visible(algorithm, "silo-0").clone()
    records = algorithm.turn()
    entropy = {r["client"]: r["holdout_entropy"] for r in records}
    expected = [k for k, e in entropy.items() if e > 1.2 * min(entropy.values())]
    assert state(algorithm).plain["uncertain"] == expected == ["silo-2"]  # the client that is mostly noise
    assert state(algorithm).plain["threshold"] == pytest.approx(1.2 * min(entropy.values()))
    assert "silo-2" in notices[-1]
    turn = turn_of(algorithm, algorithm.context.clients)
    sent = [
        algorithm.members[0].algorithm.broadcast(state(algorithm), name, turn)
        for name in ("silo-0", "silo-2")
    ]
    assert torch.equal(sent[0].tensors["codebook"], shared)
    assert "new_codewords" not in sent[0].options
    assert sent[1].options["new_at"] == 4
    last = turns(algorithm, 2)[1]
    assert [(r["client"], r["codewords"], r["extended"]) for r in last] == [
        ("silo-0", 4, False),
        ("silo-1", 4, False),
        ("silo-2", 8, True),
    ]


def test_new_codewords_are_centers_of_the_clients_features():
    seen = {}

    algorithm, workspace, _ = arm(settings(rounds=[1, 1], lr=1e-12), wrap=recorded(seen.update))
    turns(algorithm, 2)
    before = Message({name: state(algorithm).tensors[name].clone() for name in ("values", "buffers")})
    (client,) = state(algorithm).plain["uncertain"][:1]
    algorithm.turn()
    options = seen[client].options
    workspace.load(before)
    workspace.net.eval()
    data = next(s for s in federation().clients if s.name == client).load()
    with torch.no_grad():
        features = workspace.net.tokens(workspace.normalize(data.train.images)).reshape(-1, 4)
    expected, _ = kmeans(features, 4, options["kmeans_seed"])
    # lr 1e-12: training moved nothing
    torch.testing.assert_close(visible(algorithm, client)[4:], expected, atol=1e-6, rtol=1e-5)


def test_extensions_accumulate_and_older_ones_stay_visible():
    algorithm, _, _ = arm(settings(rounds=[1, 1, 1], lr=1e-12))
    turns(algorithm, 4)
    name = next(n for n in state(algorithm).plain["uncertain"] if len(visible(algorithm, n)) == 8)
    older = visible(algorithm, name).clone()
    turns(algorithm, 1)
    assert len(visible(algorithm, name)) == 12
    # lr 1e-12: training moved nothing
    torch.testing.assert_close(visible(algorithm, name)[:8], older, atol=1e-6, rtol=0)


@pytest.mark.parametrize("reference", ["min", "mean"])
def test_threshold_reference(reference):
    algorithm, _, _ = arm(settings(reference=reference, gamma=0.25))
    records = [r for turn in turns(algorithm, 3) for r in turn][-3:]
    values = [r["holdout_entropy"] for r in records]
    assert state(algorithm).plain["threshold"] == pytest.approx(
        1.25 * (min(values) if reference == "min" else sum(values) / 3)
    )


@pytest.mark.parametrize(("rule", "same"), [("fixed", True), ("current", False)])
def test_the_threshold_is_fixed_after_the_first_iteration(rule, same):
    algorithm, _, _ = arm(settings(threshold=rule, rounds=[1, 1, 1]))
    turns(algorithm, 2)
    first = state(algorithm).plain["threshold"]
    turns(algorithm, 2)
    assert (state(algorithm).plain["threshold"] == first) is same


def test_the_run_ends_when_no_client_is_uncertain():
    algorithm, _, _ = arm(settings(gamma=1e6, stop_when_certain=True))
    assert len(finish(algorithm)) == 2 * 3  # the first iteration's two rounds


@pytest.mark.parametrize("name", ["uefl", "uefl-published"])
def test_a_threshold_that_no_client_can_exceed_is_noted(name):
    for gamma, said in ((1e6, True), (0.0, False)):
        algorithm, _, notices = arm(settings(name, gamma=gamma, rounds=[1], max_iterations=1))
        finish(algorithm)
        assert ("ln 3 = 1.099" in notices[-1]) is said


def test_it_continues_without_extension_for_equal_steps():
    records = finish(arm(settings(gamma=1e6))[0])
    assert len(records) == 3 * 3
    assert all(r["codewords"] == 4 for r in records)


def test_the_cap_on_iterations_repeats_the_last_number_of_rounds():
    assert settings(rounds=[2, 1], max_iterations=4).training.iterations() == [2, 1, 1, 1]
    assert settings(rounds=[2, 1, 3], max_iterations=1).training.iterations() == [2]


@pytest.mark.parametrize("share", ["none", "group"])
def test_new_codewords_may_start_from_noise(share):
    codebooks = {}
    for start in ("kmeans", "normal"):
        algorithm, _, _ = arm(
            settings(extend="all", rounds=[1, 1, 1], lr=1e-12, new_codewords=start, ext_share=share)
        )
        records = finish(algorithm)
        assert [(r["codewords"], r["extended"]) for r in records] == [(4, False)] * 3 + [(8, True)] * 3 + [
            (12, True)
        ] * 3
        codebooks[start] = visible(algorithm, "silo-0")
    assert torch.equal(codebooks["kmeans"][:4], codebooks["normal"][:4])
    drawn_ones = codebooks["normal"][4:]
    assert (drawn_ones < 0).float().mean() > 0.2  # where features, which come after a ReLU, have none
    assert torch.unique(codebooks["normal"], dim=0).shape == (12, 4)
    private = not torch.equal(codebooks["normal"], visible(algorithm, "silo-1"))
    assert private is (share == "none")


def test_a_codebook_may_double_with_each_extension():
    cfg = settings(extend="all", rounds=[1, 1, 1], growth="double")
    algorithm, _, _ = arm(cfg)
    records = finish(algorithm)
    assert [r["codewords"] for r in records] == [4] * 3 + [8] * 3 + [16] * 3
    assert [state(algorithm).tensors[f"part.{i}"].shape[0] for i in range(7)] == [4] * 4 + [8] * 3
    assert all(len(r["usage"]) == r["codewords"] for r in records)
    assert again(cfg) == records


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"growth": "double", "extension": "residual"}, "extension"),
        ({"growth": "double", "ext_share": "group"}, "ext_share"),
        ({"usage_aware": "equal", "ema_decay": 0.9}, "ema_decay"),
    ],
)
def test_keys_that_exclude_each_other_are_refused(keys, named):
    with pytest.raises(UserError, match=named):
        settings(**keys)


def test_a_client_too_small_for_extension_is_rejected_early():
    keys = {"extend": "all", "codewords": 64, "max_iterations": 4}
    for growth in ("add", "double"):
        _, workspace, _ = arm(settings(growth=growth, **keys))
        if growth == "add":
            workspace.algorithm.check(federation(), "arm", workspace.net)
    with pytest.raises(UserError, match=r"silo-0.*256"):
        workspace.algorithm.check(federation(), "arm", workspace.net)


def test_group_sharing_gives_one_part_to_the_extended_clients():
    algorithm, _, _ = arm(settings(ext_share="group", gamma=0.0, rounds=[1, 2]))
    turns(algorithm, 2)
    group = list(state(algorithm).plain["uncertain"])
    assert len(group) == 2
    turns(algorithm, 2)
    assert state(algorithm).plain["part_clients"][1] == group
    assert torch.equal(visible(algorithm, group[0]), visible(algorithm, group[1]))
    assert len(visible(algorithm, group[0])) == 8


def test_a_private_part_belongs_to_one_client():
    algorithm, _, _ = arm(settings(gamma=0.0))
    finish(algorithm)
    codebooks = [visible(algorithm, name)[4:] for name in ("silo-0", "silo-1", "silo-2")]
    grown = [codebook for codebook in codebooks if len(codebook)]
    assert len(grown) == 2
    assert not torch.equal(*grown)


def test_group_centers_are_weighted_by_cluster_size():
    def meddle(reply):
        if "part" in reply.tensors:  # one client's clusters weigh next to nothing
            light = reply.client == "silo-0"
            reply.tensors["part"] = torch.full((1, 4), 100.0 if light else 1.0)
            reply.tensors["mass"] = torch.full((1,), 1e-6 if light else 96.0)

    algorithm, _, _ = arm(settings(codewords=1), wrap=tampered(meddle))
    turn = turn_of(algorithm, algorithm.context.clients)
    part = algorithm.members[0].algorithm.pooled_kmeans(
        state(algorithm), ["silo-0", "silo-1"], "extend", turn
    )
    assert float((part - 1.0).abs().max()) < 0.01


def test_the_commitment_weight_pulls_features_to_their_codewords():
    """The codewords cannot move, so the features must move to them."""
    distance = {}
    for weight in (0.0, 0.25):
        algorithm, workspace, _ = arm(
            settings(extend="none", commitment=weight, codebook_lr=1e-12, rounds=[4], local_epochs=3)
        )
        turns(algorithm, 4)
        own = state(algorithm).tensors
        workspace.flat.set(own["values"], own["buffers"])
        workspace.net.eval()
        images = federation().clients[0].load().train.images
        with torch.no_grad():
            tokens = workspace.net.tokens(workspace.normalize(images))
        distance[weight] = float(
            (tokens - Quantizer()(tokens, visible(algorithm, "silo-0")).values).square().mean()
        )
    assert distance[0.25] < 0.7 * distance[0.0]


@pytest.mark.parametrize("keys", [{}, {"optimizer": "sgd", "participation": 0.5}], ids=["adam", "sgd"])
def test_without_quantizer_it_is_fedavg_bit_for_bit(keys):
    """The codebook is created after the last round, for the last measurement only."""
    own = arm(settings(extend="none", rounds=[3], codebook_after=3, **keys))[0]
    average = arm(settings("fedavg", rounds=[3], **keys))[0]
    measures = ("accuracy", "nll", "entropy", "holdout_entropy", "train_loss", "train_accuracy")
    mine, theirs = (
        [{key: r.get(key) for key in ("round", "client", *measures)} for r in finish(one) if r["round"] < 2]
        for one in (own, average)
    )
    assert mine == theirs
    for name in ("values", "buffers"):
        assert torch.equal(state(own).tensors[name], state(average).tensors[name])


@pytest.mark.parametrize(
    ("by_use", "expected"),
    [
        (True, [(3 * 1 + 1 * 2) / 4, 2.0, 1.0]),
        ("equal", [(1 + 2) / 2, 2.0, 1.0]),
        (False, [(10 * 1 + 30 * 2) / 40] * 3),
    ],
    ids=["use", "users", "examples"],
)
def test_codewords_are_averaged_by_use_users_or_examples(by_use, expected):
    def meddle(reply):
        if "codebook" in reply.tensors:
            first = reply.client == "silo-0"
            reply.tensors["codebook"] = torch.full_like(reply.tensors["codebook"], 1.0 if first else 2.0)
            reply.tensors["usage"] = torch.tensor([3, 0, 7, 0] if first else [1, 9, 0, 9])

    fed = federation(sizes=(10, 30), noise=(0.1, 0.1))
    algorithm, _, _ = arm(settings(extend="none", usage_aware=by_use), fed, wrap=tampered(meddle))
    algorithm.turn()
    assert visible(algorithm, "silo-0")[:3, 0].tolist() == pytest.approx(expected)


def test_perplexity_is_measured_on_batches_of_100_images():
    indices = torch.cat([torch.zeros(100, 2), torch.ones(100, 2), torch.arange(2).repeat(30, 1)]).long()
    assert counts_per_batch(indices, 3).tolist() == [[200, 0, 0], [0, 200, 0], [30, 30, 0]]


def test_rejected_extension_is_requested_again():
    rejected = []

    def meddle(reply):
        if "codebook" in reply.tensors and len(reply.tensors["codebook"]) == 8 and not rejected:
            rejected.append(reply.client)
            reply.tensors["codebook"] = torch.full_like(reply.tensors["codebook"], float("nan"))

    algorithm, _, _ = arm(settings(quorum=0.5, rounds=[1, 3]), wrap=tampered(meddle))
    turns(algorithm, 3)
    (name,) = rejected
    first, second, _ = turns(algorithm, 3)
    of = {r["round"]: r for records in (first, second) for r in records if r["client"] == name}
    assert [(of[n]["codewords"], of[n]["extended"]) for n in (1, 2)] == [(4, False), (8, True)]


def test_the_arm_without_extension_never_grows():
    records = finish(arm(settings(extend="none", gamma=0.0))[0])
    assert {r["codewords"] for r in records} == {4}


def test_extending_all_grows_every_codebook_each_iteration():
    algorithm, _, notices = arm(settings(extend="all", rounds=[1, 1, 1], gamma=1e6, stop_when_certain=True))
    records = finish(algorithm)
    assert [(r["codewords"], r["extended"]) for r in records] == [(4, False)] * 3 + [(8, True)] * 3 + [
        (12, True)
    ] * 3
    assert notices == []


def test_random_extension_draws_the_number_of_uncertain_clients():
    chosen = set()
    for seed in range(3):
        algorithm, _, notices = arm(
            settings(
                extend="random", rounds=[2, 1], local_epochs=2, seed=seed, uncertainty="ensemble", members=2
            ),
            federation((48,) * 3),
        )
        turns(algorithm, 3)
        first, second = (list(state.plain["pending"]) for state in (m.state for m in algorithm.members))
        assert first == second
        assert len(first) == len(state(algorithm).plain["uncertain"]) >= 1
        chosen.add(tuple(first))
        assert (re.search(rf"place: {', '.join(first)}", notices[-1]) is not None) is (
            first != state(algorithm).plain["uncertain"]
        )
        turns(algorithm, 2)
        assert [len(visible(algorithm, f"silo-{k}")) for k in range(3)] == [
            4 + 4 * (f"silo-{k}" in first) for k in range(3)
        ]
    assert len(chosen) > 1


def test_clients_are_drawn_again_in_every_iteration():
    clients = [f"silo-{k}" for k in range(5)]
    found = [drawn(clients, 2, seed=0, iteration=i) for i in range(8)]
    assert all(pair == sorted(set(pair)) and len(pair) == 2 for pair in found)
    assert len(set(map(tuple, found))) > 1


@pytest.mark.parametrize("extend", ["random", "all"])
def test_resumed_run_extends_the_same_clients(extend):
    cfg = settings(extend=extend, rounds=[1, 1, 1])
    assert again(cfg) == finish(arm(cfg)[0])


def test_a_client_with_a_rejected_reply_keeps_its_codebook():
    def meddle(reply):
        if reply.client == "silo-1" and "codebook" in reply.tensors:
            reply.tensors["codebook"] = torch.full_like(reply.tensors["codebook"], float("inf"))

    algorithm, _, _ = arm(settings(quorum=0.5, gamma=0.0), wrap=tampered(meddle))
    finish(algorithm)
    assert len(algorithm.rejected) == 3
    assert all(
        bool(torch.isfinite(codewords).all())
        for codewords in (visible(algorithm, f"silo-{i}") for i in range(3))
    )


def test_usage_is_reported_in_the_last_round_and_adds_up():
    records = finish(arm(settings())[0])
    with_usage = [r for r in records if "usage" in r]
    assert {r["round"] for r in with_usage} == {1, 2}
    for r in with_usage:
        assert len(r["usage"]) == r["codewords"]
        assert sum(r["usage"]) == 12 * 1 * 4  # test images x tokens x segments
        assert 1 <= r["perplexity"] <= r["codewords"]
