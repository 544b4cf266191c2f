"""The federated runs of a GPU machine, rehearsed on the CPU."""

import json

import pytest

from benchmarks import gpu_federated


def facts_of(folder):
    return json.loads((folder / "federated.json").read_text())


def test_part_that_fails_stops_no_other(tmp_path, monkeypatch):
    def fails(device, folder):
        raise RuntimeError("no memory")

    monkeypatch.setattr(
        gpu_federated, "PARTS", {"first": fails, "second": lambda device, folder: {"rounds": 3}}
    )
    assert gpu_federated.main(["--device", "cpu", "--only", "first,second", "--out", str(tmp_path)]) == 1
    facts = facts_of(tmp_path)
    assert (facts["first"]["ok"], facts["first"]["error"]) == (False, "RuntimeError: no memory")
    assert (facts["second"]["ok"], facts["second"]["rounds"]) == (True, 3)


def test_unknown_part_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_federated.main(["--device", "cpu", "--only", "resme", "--out", str(tmp_path)])
    assert "resme" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_metrics_that_differ_are_an_error(tmp_path, monkeypatch):
    """A round that is as small as possible.

    At the size of a rehearsal, the test is among the slow ones.
    """
    monkeypatch.setattr(gpu_federated, "TOLERANCES", {"nll": -1.0})
    model = {"dropout": 0.0, "width": 2, "hidden": 4}
    monkeypatch.setattr(
        gpu_federated, "_ROUND", {"training": {"rounds": [1], "local_steps": 1}, "model": model}
    )
    few = {"clients": 2, "partition": {"angles": []}, "train_per_client": 16, "test_per_client": 10}
    monkeypatch.setattr(gpu_federated, "_REHEARSAL", {"data": few})
    monkeypatch.setattr("uefl.report.write.write_plots", lambda run: [])
    assert gpu_federated.main(["--device", "cpu", "--only", "agree", "--out", str(tmp_path)]) == 1
    assert "nll" in facts_of(tmp_path)["agree"]["error"]


@pytest.mark.slow
def test_runs_are_rehearsed(tmp_path):
    parts = "demo,resume,agree,mnist-9"
    assert gpu_federated.main(["--device", "cpu", "--only", parts, "--out", str(tmp_path)]) == 0
    facts = facts_of(tmp_path)
    assert facts["demo"]["demo"]["rounds_per_minute"] > 0
    assert facts["resume"]["same_bits"] == [
        "metrics.jsonl",
        "model-fedavg.safetensors",
        "model-uefl.safetensors",
    ]
    assert set(facts["agree"]["largest_differences"]) == set(gpu_federated.TOLERANCES)
    assert "published, once" in facts["mnist-9"]["table"]
