"""UEFL as published behaves as the published code, with each of its mistakes."""

from dataclasses import replace

import pytest
import torch

from tests.federated.engine_wrappers import recorded, tampered
from tests.federated.tiny import arm, federation, finish, settings, state, turn_of, turns, values
from uefl.algorithms.uefl.clustering import kmeans
from uefl.engines.base import Message
from uefl.errors import UserError

NAMES = ("silo-0", "silo-1", "silo-2")


def legacy(**keys):
    published = {"reference": "mean", "gamma": 0.02, "max_iterations": 3, "logit_dropout": True}
    return settings("uefl-published", **{"rounds": [2, 2]} | published | keys)


def own(algorithm, name):
    return state(algorithm).tensors[f"own.{name}"]


def test_all_dropout_passes_are_the_same():
    records = finish(arm(legacy())[0])
    assert all(r["entropy"] == pytest.approx(r["entropy_deterministic"], rel=1e-5) for r in records)


def test_codewords_are_not_averaged_and_clients_drift_apart():
    algorithm, _, _ = arm(legacy())
    common = state(algorithm).tensors["main"].clone()
    assert all(torch.equal(own(algorithm, n), common) for n in NAMES)
    algorithm.turn()
    first = {n: own(algorithm, n)[0].clone() for n in NAMES}
    assert not torch.equal(first["silo-0"], first["silo-1"])
    assert not torch.equal(first["silo-1"], first["silo-2"])
    assert not torch.equal(first["silo-0"], common[0])
    # the spare is not visible, so not trained
    assert all(torch.equal(own(algorithm, n)[1], common[1]) for n in NAMES)


def test_a_new_iteration_starts_from_the_last_clients_copy():
    seen = []

    def record(messages):
        seen.append({n: r.tensors["codebook"].clone() for n, r in messages.items()})

    algorithm, _, _ = arm(legacy(gamma=1e9, stop_when_certain=False), wrap=recorded(record))
    turns(algorithm, 3)
    last = own(algorithm, "silo-2")[0].clone()
    assert not torch.equal(last, own(algorithm, "silo-0")[0])
    algorithm.turn()
    assert all(torch.equal(seen[-1][n], last) for n in NAMES)


def test_k_means_overwrites_the_shared_part_of_certain_clients():
    algorithm, workspace, _ = arm(legacy(rounds=[4, 1], local_epochs=3))
    turns(algorithm, 5)
    workspace.context = replace(
        workspace.context, training=workspace.context.training.model_copy(update={"lr": 1e-12})
    )  # the centers stay where they are
    certain = [n for n in NAMES if n not in state(algorithm).plain["uncertain"]]
    assert certain
    assert state(algorithm).plain["uncertain"]
    before = Message({name: state(algorithm).tensors[name].clone() for name in ("values", "buffers")})
    shared_before = state(algorithm).tensors["main"][0].clone()
    algorithm.turn()
    workspace.load(before)
    workspace.net.eval()
    for name in NAMES:
        data = next(s for s in federation(test_is_holdout=True).clients if s.name == name).load()
        with torch.no_grad():
            features = workspace.net.tokens(workspace.normalize(data.train.images)).reshape(-1, 4)
        centers, _ = kmeans(features, 4, 0)
        part = 0 if name in certain else 1
        torch.testing.assert_close(own(algorithm, name)[part], centers, atol=1e-6, rtol=1e-5)
        if name not in certain:
            torch.testing.assert_close(own(algorithm, name)[0], shared_before, atol=1e-6, rtol=1e-5)


def test_a_client_uses_at_most_two_parts():
    algorithm, _, _ = arm(legacy(gamma=0.0, reference="min", rounds=[1, 1, 1], max_iterations=3))
    records = finish(algorithm)
    assert {r["codewords"] for r in records} <= {4, 8}
    assert max(state(algorithm).plain["own_part"].values()) == 3
    # shared and spare, one more spare after each of two extensions
    assert len(state(algorithm).tensors["main"]) == 2 + 2
    assert all(
        len(parts) == len(state(algorithm).tensors["main"]) for parts in (own(algorithm, n) for n in NAMES)
    )


def test_an_older_extension_is_no_longer_seen():
    algorithm, _, _ = arm(legacy(gamma=0.0, reference="min", rounds=[1, 1, 1]))
    turns(algorithm, 4)
    name = next(n for n in state(algorithm).plain["uncertain"] if state(algorithm).plain["own_part"][n] == 2)
    turns(algorithm, 1)
    turn = turn_of(algorithm, algorithm.context.clients, measure=True)
    seen = algorithm.members[0].algorithm.visible(state(algorithm), name, turn)
    assert torch.equal(seen[4:], own(algorithm, name)[2])
    assert not any(torch.equal(seen[4:], own(algorithm, name)[b]) for b in (0, 1))


def test_clients_weigh_the_same_whatever_their_size():
    def meddle(reply):
        if "values" in reply.tensors:
            reply.tensors["values"] = torch.full_like(reply.tensors["values"], float(reply.client[-1]))

    algorithm, _, _ = arm(
        legacy(), fed=federation(sizes=(9, 30, 48), test_is_holdout=True), wrap=tampered(meddle)
    )
    algorithm.turn()
    torch.testing.assert_close(values(algorithm), torch.full_like(values(algorithm), 1.0))


def test_the_threshold_is_the_mean_on_the_test_split_set_once():
    algorithm, _, _ = arm(legacy(gamma=0.5))
    records = turns(algorithm, 3)[-1]
    assert state(algorithm).plain["threshold"] == pytest.approx(
        1.5 * sum(r["entropy_deterministic"] for r in records) / 3
    )
    first = state(algorithm).plain["threshold"]
    algorithm.finished = False
    turns(algorithm, 3)
    assert state(algorithm).plain["threshold"] == first


def test_the_run_ends_when_every_client_is_certain():
    algorithm, _, _ = arm(legacy(gamma=1e6, stop_when_certain=True))
    assert len(finish(algorithm)) == 2 * 3


def test_k_means_runs_only_in_the_first_round_of_an_iteration():
    asked = []

    def record(messages):
        asked.append({"new_codewords" in r.options for r in messages.values()})

    finish(arm(legacy(max_iterations=2), wrap=recorded(record))[0])
    assert asked == [{False}] * 3 + [{True}] + [{False}] * 2


def test_there_is_no_cap_on_iterations_unless_one_is_set():
    algorithm, _, _ = arm(legacy(max_iterations=0, rounds=[2, 1]))
    assert [algorithm.members[0].algorithm.rounds(i) for i in (0, 1, 2, 1000)] == [2, 1, 1, 1]
    capped, _, _ = arm(legacy(max_iterations=3, rounds=[2, 1]))
    assert [capped.members[0].algorithm.rounds(i) for i in (0, 1, 2, 3)] == [2, 1, 1, None]


def test_an_arm_without_an_end_is_refused():
    _, workspace, _ = arm(legacy(max_iterations=0, stop_when_certain=False))
    with pytest.raises(UserError, match=r"arms\.one\.stop_when_certain'.*max_iterations"):
        workspace.algorithm.check(federation(), "one", workspace.net)
