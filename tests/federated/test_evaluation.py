"""A share of the clients measures the model of a round.

The tests check the participants, the records of the others, and that no data are lost.
"""

import json

import pytest
import torch

import uefl
from tests.federated.engine_wrappers import RecordingEngine, TamperingEngine
from uefl.client import evaluation
from uefl.errors import RunError
from uefl.server.participants import Participants

from . import tiny
from .interrupted import KEYS, run_twice

KEYS_OF_MANY = {"evaluation": 0.3, "participation": 0.5}


def many(algorithm="fedavg", clients=6, **keys):
    cfg = tiny.settings(algorithm, clients=clients, rounds=[3], **KEYS_OF_MANY, **keys)
    return cfg, tiny.federation((24,) * clients, (0.1,) * clients, unseen=1)


def test_the_seed_draws_the_clients_that_measure():
    asked = []

    def record(messages):
        asked.append({name: messages[name].options for name in messages})

    cfg, federation = many()
    one = tiny.arm(cfg, federation, lambda e: RecordingEngine(e, record))[0]
    records = tiny.finish(one)
    for turn, options in enumerate(asked):
        measuring = {name for name, of in options.items() if of["evaluate"]}
        known = measuring - {"unseen-0"}
        assert len(known) == (2 if turn else 0)  # 0.3 of 6, rounded up
        assert known == (
            set(Participants(one.context.clients, 0.3, 0, "evaluators").of(turn)) if turn else set()
        )
        assert {name for name in options if not options[name]["evaluate"]} <= {
            name for name in options if options[name]["train"]
        }
        assert {
            r["client"] for r in records if r["round"] == turn - 1 and r["accuracy"] is not None
        } == measuring
    assert tiny.finish(tiny.arm(cfg, federation)[0]) == records
    assert tiny.again(cfg, federation) == records


def test_every_training_and_every_byte_is_recorded_once():
    cfg, federation = many()
    whole = tiny.finish(
        tiny.arm(tiny.settings("fedavg", clients=6, rounds=[3], participation=0.5), federation)[0]
    )
    records = tiny.finish(tiny.arm(cfg, federation)[0])
    trained = {(r["round"], r["client"]): r["train_loss"] for r in records if r["train_loss"] is not None}
    assert trained == {
        (r["round"], r["client"]): r["train_loss"] for r in whole if r["train_loss"] is not None
    }
    assert sum(r["bytes_received"] for r in records) == sum(r["bytes_received"] for r in whole)
    model = max(r["bytes_sent"] for r in whole if r["train_loss"] is None)
    only_measured = [r for r in records if r["train_loss"] is None]
    assert all(r["bytes_sent"] in (0, model) for r in only_measured)
    assert [r["client"] for r in records if r["round"] == 0] == sorted(
        r["client"] for r in records if r["round"] == 0
    )


def test_quorum_counts_the_clients_that_measure():
    cfg, federation = many(quorum=1.0)
    lost = []

    def lose(reply):
        """Lose one of two measurements, which the unseen client does not replace."""
        if reply.metrics and not reply.client.startswith("unseen") and not lost:
            lost.append(reply.client)
            reply.error, reply.metrics = "lost", {}
        return reply

    with pytest.raises(RunError, match=r"\b1 .*\b2 .*quorum .*\b2\b"):
        tiny.finish(tiny.arm(cfg, federation, lambda engine: TamperingEngine(engine, lose))[0])


def test_decisions_use_the_clients_that_measure():
    cfg = tiny.settings("uefl", rounds=[2, 2], evaluation=0.5, gamma=0.0)
    one = tiny.arm(cfg, tiny.federation((24,) * 6, (0.1, 0.1, 0.1, 0.9, 0.9, 0.9)))[0]
    records = tiny.finish(one)
    decided = [r for r in records if "deciding_entropy" in r]
    assert len([r for r in decided if r["round"] == 1]) == 3
    uncertain = {r["client"] for r in decided if r["round"] == 1 and r["deciding_entropy"] > r["threshold"]}
    assert {r["client"] for r in records if r.get("extended")} == uncertain


@pytest.mark.slow
def test_reports_cover_measured_clients_also_after_resume(tmp_path):
    data = KEYS["data"] | {"clients": 5, "train_per_client": 24}
    run = run_twice(
        tmp_path, {"uefl": {}, "fedper": {}}, data=data, evaluation=0.4, participation=0.6, seed=1
    )
    assert len([r for r in run.summary["uefl"]["clients"].values() if r["accuracy"] is not None]) == 2
    text = (run.path / "report.md").read_text()
    assert "nan" not in text
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert run.summary["uefl"]["bytes_sent"] == sum(r["bytes_sent"] for r in lines if r["arm"] == "uefl")
    # an unfinished run keeps rounds with fewer records than the first round
    (run.path / "summary.json").unlink()
    assert uefl.load(run.path).summary["fedper"]["rounds"] == run.summary["fedper"]["rounds"]


def test_predictions_are_counted_by_class_and_confidence():
    """Check the counts by hand.

    The second and the last of four images are predicted wrong.
    """
    probs = torch.tensor([[0.9, 0.05, 0.05], [0.2, 0.7, 0.1], [0.09, 0.82, 0.09], [0.62, 0.3, 0.08]])
    counts = evaluation._counts(probs, torch.tensor([0, 0, 1, 2]))
    assert counts["confusion"] == [1, 1, 0, 0, 1, 0, 1, 0, 0]  # a row for each class
    reliability = torch.tensor(counts["reliability"]).view(15, 2)
    assert reliability[[9, 10, 12, 13]].tolist() == [[1, 0], [1, 0], [1, 1], [1, 1]]
    assert reliability.sum(0).tolist() == [4, 2]
    confidence = [0.0] * 9 + [0.62, 0.7, 0.0, 0.82, 0.9, 0.0]
    assert counts["confidence"] == pytest.approx(confidence, rel=1e-6)


def test_confusion_of_many_classes_is_not_computed(monkeypatch):
    """With 15,000 classes the matrix would have 1.8 GB."""
    lengths, original = [], torch.bincount
    monkeypatch.setattr(
        torch,
        "bincount",
        lambda *rest, **keys: lengths.append(keys.get("minlength", 0)) or original(*rest, **keys),
    )
    counts = evaluation._counts(torch.eye(1000)[:4], torch.arange(4))
    assert "confusion" not in counts
    assert max(lengths) < 1000
