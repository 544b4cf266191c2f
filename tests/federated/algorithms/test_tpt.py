"""The terminal phase: FedAvg without dropout, which ends some time after the training error is gone."""

import re

import pytest
import torch

from tests.federated.engine_wrappers import lies
from tests.federated.interrupted import killed_and_resumed, run_of, saved_accuracy
from tests.federated.tiny import arm, federation, finish, settings, values, without
from uefl.algorithms.tpt import TPT
from uefl.client.client import Clients
from uefl.collapse import neural_collapse
from uefl.errors import RunError, UserError

NEVER = {"optimizer": "sgd", "lr": 1e-9}

PHASE = ("nc", "train_error", "start_accuracy")
"""metrics of the terminal phase"""


def test_before_its_phase_it_equals_fedavg_without_dropout():
    own, average = arm(settings("tpt", **NEVER))[0], arm(settings("fedavg", dropout=0.0, **NEVER))[0]
    assert without(finish(own), *PHASE) == without(finish(average), *PHASE)
    assert torch.equal(values(own), values(average))


@pytest.mark.parametrize(("extra", "rounds"), [(0.0, [2]), (1.0, [2, 1])], ids=str)
def test_extra_sets_the_number_of_rounds(extra, rounds):
    """With ``extra`` iterations after the phase begins, the arm is FedAvg with this number of rounds."""
    own = arm(settings("tpt", extra=extra, threshold=1e-9, rounds=[2, 1, 1]))[0]
    average = arm(settings("fedavg", dropout=0.0, rounds=rounds))[0]
    records = finish(own)
    assert without(records, *PHASE) == without(finish(average), *PHASE)
    assert torch.equal(values(own), values(average))
    began = {r["client"]: r["accuracy"] for r in records if r["round"] == 1}
    assert {r["client"]: r["start_accuracy"] for r in records if r["round"] == sum(rounds) - 1} == began


def test_the_phase_begins_with_the_training_accuracy():
    one, _, notices = arm(
        settings("tpt", rounds=[1], max_iterations=40, threshold=1.0, batch_size=16),
        federation(noise=(0.1, 0.1, 0.1)),
    )
    records = finish(one, 200)
    start = one.members[0].state.plain["start"]
    assert any(re.search(rf"iteration {start}, .*accuracy 1\.0000", line) for line in notices)
    assert {r["iteration"] for r in records} == set(range(2 * start))
    wrong = [[r["train_error"] for r in records if r["iteration"] == i] for i in range(2 * start)]
    assert max(wrong[start - 1]) == 0
    assert all(max(each) > 0 for each in wrong[: start - 1])


def test_a_phase_that_is_not_reached_is_noted():
    one, _, notices = arm(settings("tpt", **NEVER))
    records = finish(one)
    assert any(re.search(r"phase .*accuracy 0\.", line) for line in notices)
    assert all(r["start_accuracy"] is None for r in records if r["iteration"] == 1 and "nc1" in r)


def test_metrics_cover_all_training_images_and_each_client():
    fed = federation(sizes=(48, 32, 40))
    one, workspace, _ = arm(settings("tpt"), fed)
    records = [r for r in finish(one) if r["round"] == 2]
    workspace.flat.set(*(one.members[0].state.tensors[name] for name in ("values", "buffers")))
    net, data = (
        workspace.net.eval(),
        [Clients(fed.clients, workspace.device).data(client.name).train for client in fed.clients],
    )
    layer = net.head.fc2
    with torch.no_grad():
        features = [net.head.prefix(net.tokens(workspace.normalize(split.images))) for split in data]
        weights = (layer.weight, layer.bias)
        alone = [neural_collapse(f, split.labels, *weights) for f, split in zip(features, data, strict=True)]
        together = neural_collapse(torch.cat(features), torch.cat([split.labels for split in data]), *weights)
        right = [
            float((layer(f).argmax(1) == split.labels).double().mean())
            for f, split in zip(features, data, strict=True)
        ]
    assert len(records) == 3
    for record, own, accuracy in zip(records, alone, right, strict=True):
        assert [record[name] for name in together._fields] == pytest.approx(together, rel=1e-4, abs=1e-6)
        assert [record[f"{name}_silo"] for name in own._fields] == pytest.approx(own, rel=1e-4, abs=1e-6)
        assert record["train_error"] == pytest.approx(1 - accuracy)


def test_every_dropout_is_off():
    net = arm(settings("tpt", logit_dropout=True))[1].net
    assert {m.p for m in net.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}


def test_a_client_that_cannot_reply_ends_the_run():
    one = arm(settings("tpt"), wrap=lies(lambda reply: reply.tensors.pop("sums", None)))[0]
    with pytest.raises(RunError, match=r"silo-1.*training.*sums\b"):
        finish(one)


def test_a_network_without_a_linear_layer_is_refused():
    with pytest.raises(UserError, match=r"arm 'arm': .*linear"):
        TPT().check(None, "arm", torch.nn.Conv2d(1, 3, 3))


class DropsInItsForward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(64, 3)

    def forward(self, images):
        return self.last(torch.nn.functional.dropout(images.flatten(1), 0.5, self.training))


def test_functional_dropout_is_refused():
    with pytest.raises(UserError, match=r"arm 'arm': .*F\.dropout.*nn\.Dropout"):
        TPT().check(federation(), "arm", DropsInItsForward())


def test_a_saved_model_predicts_as_it_was_measured(tmp_path):
    run = run_of(tmp_path, {"tpt": {}})
    saved, measured = saved_accuracy(run, "tpt")
    assert saved == measured
    last = run.metrics[run.metrics["round"] == 2]
    assert last.nc1.notna().all()
    assert "| nc1 |" in (run.path / "report.md").read_text()


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    """Kill the run after the first iteration, in and after each exchange that measures training images."""
    killed_and_resumed(tmp_path, {"tpt": {"threshold": 1e-9, "extra": 1.0}}, (8, 10, 12))
