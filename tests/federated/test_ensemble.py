"""Deep ensembles as the uncertainty of a run: members apart, decisions together."""

import dataclasses
import json

import pytest
import torch

from tests.federated.test_fedavg import Meddler
from tests.federated.test_run import Watcher, go_on, interrupted, outcome, start
from tests.federated.tiny import arm, federation, finish, settings
from uefl import config
from uefl.data.build import build_silos
from uefl.errors import UserError
from uefl.metrics import entropy
from uefl.models import saved
from uefl.seeds import derive

KEYS = {"uncertainty": "ensemble", "members": 3, "passes": 20}
NAMES = ("silo-0", "silo-1", "silo-2")


def apart(keys, i):
    """The run that member i should be."""
    cfg = settings(**{k: v for k, v in keys.items() if k not in KEYS})
    return dataclasses.replace(cfg, seed=derive(cfg.seed, "member", i) if i else cfg.seed)


@pytest.mark.parametrize("name", ["fedavg", "fedavg-vq", "uefl"])
def test_members_train_as_runs_of_their_own_bit_for_bit(name):
    keys = KEYS | {"gamma": 1e6, "codebook_init": "kmeans"}
    algorithm, _, _ = arm(name, settings(**keys))
    finish(algorithm)
    starts = set()
    for i, member in enumerate(algorithm.members):
        alone, _, _ = arm(name, apart(keys, i))
        starts.add(float(alone.values.sum()))
        finish(alone)
        assert torch.equal(member.values, alone.values)
        assert torch.equal(member.statistics, alone.statistics)
        assert len(member.codebooks()) == (0 if name == "fedavg" else 3)
        assert all(torch.equal(book, alone.codebooks()[client]) for client, book in member.codebooks().items())
    assert len(starts) == 3


def test_what_is_measured_is_the_mean_of_the_members():
    algorithm, device, _ = arm("uefl", settings(**KEYS))
    algorithm.turn()
    members = [(m.values.clone(), m.statistics.clone(), m.visible("silo-2").clone()) for m in algorithm.members]
    record = algorithm.turn()[2]
    silo = federation().silos[2]
    device.net.eval()

    def probs(images):
        each = []
        for values, statistics, codebook in members:
            device.flat.set(values, statistics)
            with torch.no_grad():
                each.append(device.net(device.normalize(images), codebook, 0.0)[0].softmax(-1))
        return torch.stack(each)

    test = probs(silo.test.images)
    assert record["accuracy"] == pytest.approx(float((test.mean(0).argmax(1) == silo.test.labels).double().mean()))
    assert record["entropy"] == pytest.approx(float(entropy(test.mean(0)).mean()), rel=1e-5)
    assert record["entropy_deterministic"] == pytest.approx(float(entropy(test[0]).mean()), rel=1e-5)
    assert record["mutual_info"] == pytest.approx(float((entropy(test.mean(0)) - entropy(test).mean(0)).mean()), abs=1e-5)
    assert record["holdout_entropy"] == pytest.approx(float(entropy(probs(silo.holdout.images).mean(0)).mean()), rel=1e-5)


def test_all_members_extend_the_clients_that_the_ensemble_is_unsure_of():
    algorithm, _, notices = arm("uefl", settings(**KEYS, gamma=0.2, rounds=[4, 1], local_epochs=3))
    records = [algorithm.turn() for _ in range(5)][-1]
    held = {r["client"]: r["holdout_entropy"] for r in records}
    unsure = [name for name in NAMES if held[name] > 1.2 * min(held.values())]
    assert unsure == ["silo-2"]  # the silo that is mostly noise
    assert {r["threshold"] for r in records} == {member.threshold for member in algorithm.members}
    assert algorithm.members[0].threshold == pytest.approx(1.2 * min(held.values()))
    assert [member.uncertain for member in algorithm.members] == [unsure] * 3
    assert len(notices) == 1  # not one per member
    last = [algorithm.turn() for _ in range(2)][-1]
    assert [(r["codewords"], r["extended"]) for r in last] == [(4, False), (4, False), (8, True)]
    blocks = [member.visible("silo-2")[4:] for member in algorithm.members]
    assert not torch.equal(blocks[0], blocks[1])  # codewords of the member's own features
    assert algorithm.finished


def test_an_ensemble_that_is_sure_ends_early():
    algorithm, _, _ = arm("uefl", settings(**KEYS, gamma=1e6, stop_when_certain=True))
    assert len(finish(algorithm)) == 2 * 3


@pytest.mark.parametrize("keys", [{}, {"ext_share": "group", "codebook_init": "kmeans"}], ids=["private", "group"])
def test_an_ensemble_goes_on_as_if_it_had_not_stopped(keys):
    cfg = settings(**KEYS, rounds=[1, 1], **keys)
    whole, _, _ = arm("uefl", cfg)
    expected = finish(whole)
    records, (algorithm, _, _) = [], arm("uefl", cfg)
    while not algorithm.finished:  # a new process after every turn
        tensors, plain = algorithm.state()
        tensors, plain = {k: v.clone() for k, v in tensors.items()}, json.loads(json.dumps(plain))
        algorithm, _, _ = arm("uefl", cfg)
        algorithm.restore(tensors, plain)
        records += algorithm.turn()
    assert records == expected
    for one, other in zip(algorithm.networks(), whole.networks(), strict=True):
        assert torch.equal(one.values, other.values)
        assert all(torch.equal(book, other.codebooks[client]) for client, book in one.codebooks.items())


def test_an_update_of_which_one_member_is_unsound_is_left_out_of_all():
    sent = []

    def meddle(reply):
        if reply.client == "silo-1":
            sent.append(reply.tensors["1.values"])
            reply.tensors["1.values"] = torch.full_like(reply.tensors["1.values"], float("nan"))
        elif reply.tensors:
            reply.tensors["0.values"] = torch.full_like(reply.tensors["0.values"], 3.0)
        return reply

    algorithm, _, notices = arm("fedavg", settings(**KEYS, quorum=0.6), wrap=lambda e: Meddler(e, meddle))
    algorithm.turn()
    assert notices == ["round 1: left out silo-1: member 1: values is not finite"]
    assert algorithm.rejected == 1
    assert bool((algorithm.members[0].values == 3.0).all())
    assert all(bool(torch.isfinite(member.values).all()) for member in algorithm.members)


def test_one_request_carries_all_members_without_a_copy():
    asked = []

    class Spy(Meddler):
        def round(self, requests, deadline=None):
            asked.append(requests["silo-0"])
            return self.inner.round(requests, deadline)

    algorithm, _, _ = arm("uefl", settings(**KEYS), wrap=lambda e: Spy(e, None))
    before = [member.values for member in algorithm.members]
    algorithm.turn()
    (request,) = asked
    assert [request.tensors[f"{i}.values"] is values for i, values in enumerate(before)] == [True] * 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mode": "legacy", "arms": ["uefl"]}, "key 'uncertainty': expected its default .*, so leave it out: legacy mode does not use it"),
        ({"passes": 7}, "key 'passes': expected its default 20, so leave it out: an ensemble has members, not passes"),
        ({"members": 1}, "key 'members': expected 2 or more; got 1"),
        (
            {"uncertainty": "mc_dropout", "members": 3},
            "key 'members': expected its default 5, so leave it out: it is for uncertainty = 'ensemble'",
        ),
        (
            {"arms": ["fedul"], "rounds": [2], "encoder": "cnn5x5"},
            "key 'uncertainty': expected its default .*, so leave it out: it is for arms on silos",
        ),
    ],
    ids=["legacy", "passes", "one", "dropout", "sets"],
)
def test_what_does_not_go_with_an_ensemble_is_refused(keys, message):
    with pytest.raises(UserError, match=message):
        config.from_table({"uncertainty": "ensemble", "rotations": []} | keys)


RUN = ("uncertainty=ensemble", "members=2", "passes=20", 'arms=["uefl"]', "rounds=[1, 1]")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("ensemble") / "whole"
    start(out, *RUN)
    return out


@pytest.mark.parametrize("calls", [1, 4, 8, 11])
def test_an_interrupted_run_resumes_bit_for_bit(finished, tmp_path, calls):
    go_on(interrupted(tmp_path / "run", *RUN, after=calls))
    assert outcome(tmp_path / "run") == outcome(finished)


def test_the_saved_model_is_the_ensemble_that_was_measured(finished):
    test = build_silos(config.load(str(finished / "config.toml"))).silos[1].test
    model = saved.load(finished)
    assert len(model.members) == 2
    probs = model.predict(test.images, "silo-1")
    measured = json.loads((finished / "summary.json").read_text())["arms"]["uefl"]["clients"]["silo-1"]
    assert float((probs.argmax(1) == test.labels).double().mean()) == pytest.approx(measured["accuracy"], abs=0.1)  # float32 here
    assert float(entropy(probs).mean()) == pytest.approx(measured["entropy"], rel=0.02)
    each = [dataclasses.replace(model, members=(member,)).predict(test.images, "silo-1") for member in model.members]
    torch.testing.assert_close(probs, torch.stack(each).mean(0))
    assert not torch.equal(*each)


def test_the_report_says_what_the_entropy_is_of(finished):
    text = (finished / "report.md").read_text()
    assert "2 members" in text
    assert "passes" not in text
    assert "first member" in text


def test_members_of_another_number_are_refused_on_resume(tmp_path):
    path = interrupted(tmp_path / "run", *RUN, after=4) / "config.toml"
    path.write_text(path.read_text().replace("members = 2", "members = 3"))
    with pytest.raises(UserError, match=r"config\.toml has been changed"):
        go_on(tmp_path / "run", Watcher())
