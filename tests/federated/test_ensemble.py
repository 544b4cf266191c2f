"""Deep ensembles as the uncertainty of a run: members train separately and decide together."""

import dataclasses
import json
import math
import re

import pytest
import torch

from tests.federated.engine_wrappers import recorded, tampered
from tests.federated.tiny import again, arm, federation, finish, settings, visible
from tests.federated.whole_run import Watcher, go_on, interrupted, outcome, start
from uefl import config
from uefl.algorithms.uefl.quantizer import Quantizer
from uefl.data import build
from uefl.engines.base import Message
from uefl.errors import UserError
from uefl.models import saved
from uefl.report.write import write_report
from uefl.seeds import derive
from uefl_kernels.metrics import entropy

KEYS = {"uncertainty": "ensemble", "members": 3, "passes": 20}
NAMES = ("silo-0", "silo-1", "silo-2")


KINDS = {
    "fedavg": ("fedavg", {}),
    "one-codebook": ("uefl", {"extend": "none", "codebook_after": 1}),
    "uefl": ("uefl", {"gamma": 1e6}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_members_train_as_separate_runs_bit_for_bit(kind):
    name, keys = KINDS[kind]
    algorithm, _, _ = arm(settings(name, **KEYS, **keys))
    finish(algorithm)
    starts = set()
    for i, member in enumerate(m.state for m in algorithm.members):
        seed = derive(0, "member", i) if i else 0
        alone, _, _ = arm(settings(name, **keys).with_run(seed=seed))
        starts.add(float(alone.members[0].state.tensors["values"].sum()))
        finish(alone)
        assert member.tensors.keys() == alone.members[0].state.tensors.keys()
        assert all(
            torch.equal(tensor, alone.members[0].state.tensors[name])
            for name, tensor in member.tensors.items()
        )
    assert len(starts) == 3


def test_metrics_are_of_the_mean_prediction_of_the_members():
    algorithm, workspace, _ = arm(settings(**KEYS))
    algorithm.turn()
    members = [
        ({n: t.clone() for n, t in own.tensors.items()}, visible(algorithm, "silo-2", i))
        for i, own in enumerate(m.state for m in algorithm.members)
    ]
    record = algorithm.turn()[2]
    client = federation().clients[2].load()

    def probs(images):
        each = []
        for tensors, codebook in members:
            workspace.load(Message(tensors))
            workspace.net.eval()
            with torch.no_grad():
                quantized = Quantizer()(workspace.net.tokens(workspace.normalize(images)), codebook)
                each.append(workspace.net.classify(quantized.values).softmax(-1))
        return torch.stack(each)

    test = probs(client.test.images)
    assert record["accuracy"] == pytest.approx(
        float((test.mean(0).argmax(1) == client.test.labels).double().mean())
    )
    assert record["entropy"] == pytest.approx(float(entropy(test.mean(0)).mean()), rel=1e-5)
    assert record["entropy_deterministic"] == pytest.approx(float(entropy(test[0]).mean()), rel=1e-5)
    assert record["mutual_info"] == pytest.approx(
        float((entropy(test.mean(0)) - entropy(test).mean(0)).mean()), abs=1e-5
    )
    assert record["holdout_entropy"] == pytest.approx(
        float(entropy(probs(client.holdout.images).mean(0)).mean()), rel=1e-5
    )


@pytest.mark.slow
def test_all_members_extend_the_ensembles_uncertain_clients():
    algorithm, _, notices = arm(settings(**KEYS, gamma=0.2, rounds=[4, 1], local_epochs=3))
    records = [algorithm.turn() for _ in range(5)][-1]
    held = {r["client"]: r["holdout_entropy"] for r in records}
    unsure = [name for name in NAMES if held[name] > 1.2 * min(held.values())]
    assert unsure == ["silo-2"]  # the client that is mostly noise
    assert {r["threshold"] for r in records} == {
        own.plain["threshold"] for own in (m.state for m in algorithm.members)
    }
    assert algorithm.members[0].state.plain["threshold"] == pytest.approx(1.2 * min(held.values()))
    assert [own.plain["uncertain"] for own in (m.state for m in algorithm.members)] == [unsure] * 3
    assert len(notices) == 1  # not one record per member
    last = [algorithm.turn() for _ in range(2)][-1]
    assert [(r["codewords"], r["extended"]) for r in last] == [(4, False), (4, False), (8, True)]
    pieces = [visible(algorithm, "silo-2", i)[4:] for i in range(3)]
    assert not torch.equal(pieces[0], pieces[1])  # codewords of the member's own features
    assert algorithm.finished


def test_certain_ensemble_ends_early():
    algorithm, _, _ = arm(settings(**KEYS, gamma=1e6, stop_when_certain=True))
    assert len(finish(algorithm)) == 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"ext_share": "group", "codebook_after": 1}], ids=["private", "group"])
def test_extended_ensemble_equals_a_longer_run(keys):
    cfg = settings(**KEYS, rounds=[1, 1], **keys)
    assert again(cfg) == finish(arm(cfg)[0])


def test_an_invalid_member_rejects_the_update_of_all_members():
    sent = []

    def meddle(reply):
        if reply.client == "silo-1":
            sent.append(reply.tensors["1.values"])
            reply.tensors["1.values"] = torch.full_like(reply.tensors["1.values"], float("nan"))
        elif reply.tensors:
            reply.tensors["0.values"] = torch.full_like(reply.tensors["0.values"], 1 / 32)

    algorithm, _, notices = arm(settings("fedavg", **KEYS, quorum=0.6), wrap=tampered(meddle))
    algorithm.turn()
    (notice,) = notices
    assert re.match("round 1: rejected silo-1: member 1: values .*finite", notice)
    assert len(algorithm.rejected) == 1
    assert bool((algorithm.members[0].state.tensors["values"] == 1 / 32).all())
    assert all(
        bool(torch.isfinite(own.tensors["values"]).all()) for own in (m.state for m in algorithm.members)
    )


@pytest.mark.parametrize(
    ("meddle", "said"),
    [
        (lambda reply: reply.tensors.update({"7.values": torch.ones(1)}), r"7\.values"),
        (lambda reply: reply.training.update(train_loss=math.nan), r"member 0: .*loss .*\bnan"),
    ],
    ids=["member", "loss"],
)
def test_invalid_reply_of_an_ensemble_is_rejected(meddle, said):
    def meddled(reply):
        if reply.client == "silo-1" and reply.tensors:
            meddle(reply)

    algorithm, _, notices = arm(settings("fedavg", **KEYS, quorum=0.6), wrap=tampered(meddled))
    algorithm.turn()
    (notice,) = notices
    assert re.match(f"round 1: rejected silo-1: .*{said}", notice)


def test_one_request_carries_all_members_without_a_copy():
    asked = []

    def record(messages):
        asked.append(messages["silo-0"])

    algorithm, _, _ = arm(settings(**KEYS), wrap=recorded(record))
    before = [own.tensors["values"] for own in (m.state for m in algorithm.members)]
    algorithm.turn()
    (request,) = asked
    assert [request.tensors[f"{i}.values"] is values for i, values in enumerate(before)] == [True] * 3


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("uefl", {"passes": 7}, "key 'run.passes': .*default 20, .*ensemble"),
        ("uefl", {"members": 1}, r"key 'run.members': .*\b2; .*\b1$"),
        ("uefl", {"uncertainty": "mc_dropout", "members": 3}, "key 'run.members': .*default 5"),
        ("fedul", {"encoder": "cnn5x5", "rounds": [1]}, "key 'run.uncertainty': .*unlabeled"),
    ],
    ids=["passes", "one", "dropout", "sets"],
)
def test_incompatible_options_of_an_ensemble_are_refused(name, keys, message):
    with pytest.raises(UserError, match=message):
        config.load({"run": {"uncertainty": "ensemble"}, "arms": {name: {}}}, **keys)


RUN = ("uncertainty=ensemble", "members=3", "passes=20", "arms=uefl", "rounds=[1, 1]")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("ensemble") / "whole"
    start(out, *RUN)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, 4, 8, 11])
def test_an_interrupted_run_resumes_bit_for_bit(finished, tmp_path, calls):
    go_on(interrupted(tmp_path / "run", *RUN, after=calls))
    assert outcome(tmp_path / "run") == outcome(finished)


def test_the_saved_model_is_the_ensemble_that_was_measured(finished):
    cfg = config.load_whole(finished / "config.toml")
    test = build(cfg.data, kind="labeled", seed=0).clients[1].load().test
    model = saved.load(finished)
    assert len(model.members) == 3
    probs = model.predict(test.images, "silo-1")
    measured = json.loads((finished / "summary.json").read_text())["arms"]["uefl"]["clients"]["silo-1"]
    # the saved model predicts in float32, the run may measure in bfloat16
    assert float((probs.argmax(1) == test.labels).double().mean()) == pytest.approx(
        measured["accuracy"], abs=0.1
    )
    assert float(entropy(probs).mean()) == pytest.approx(measured["entropy"], rel=0.02)
    each = [
        dataclasses.replace(model, members=(member,)).predict(test.images, "silo-1")
        for member in model.members
    ]
    torch.testing.assert_close(probs, torch.stack(each).mean(0))
    assert len({one.numpy().tobytes() for one in each}) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_the_report_defines_the_entropy(finished):
    write_report(finished)
    text = (finished / "report.md").read_text()
    assert "3 members" in text
    assert "passes" not in text
    assert "First member" in text


def test_members_of_another_number_are_refused_on_resume(tmp_path):
    path = interrupted(tmp_path / "run", *RUN, after=4) / "config.toml"
    path.write_text(path.read_text().replace("members = 3", "members = 2"))
    with pytest.raises(UserError, match=r"config\.toml .*changed"):
        go_on(tmp_path / "run", Watcher())
