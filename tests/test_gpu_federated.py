"""The federated runs of a GPU machine, rehearsed on the CPU."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

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
    pieces = "demo,resume,agree,mnist-9"
    assert gpu_federated.main(["--device", "cpu", "--only", pieces, "--out", str(tmp_path)]) == 0
    facts = facts_of(tmp_path)
    assert facts["demo"]["demo"]["rounds_per_minute"] > 0
    assert facts["resume"]["same_bits"] == [
        "metrics.jsonl",
        "model-fedavg.safetensors",
        "model-uefl.safetensors",
    ]
    differences = facts["agree"]["largest_differences"]
    assert set(differences) == {"alone", "at once", "bfloat16"}
    assert set(differences["bfloat16"]) == set(gpu_federated.TOLERANCES)
    assert "published, once" in facts["mnist-9"]["table"]


def metrics_of(folder, *losses):
    lines = [
        json.dumps({"arm": "fedavg", "round": i, "client": "silo-0", "train_loss": loss})
        for i, loss in enumerate(losses)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_differences_of_two_runs_are_named(tmp_path):
    one, other, name = tmp_path / "one", tmp_path / "other", "model-a.safetensors"
    metrics_of(one, 1.0, 2.0, 3.0)
    metrics_of(other, 1.0, 2.5, 3.5)
    weights = {"w": torch.tensor([1.0, -4.0]), "b": torch.zeros(2)}
    save_file(weights, one / name)
    save_file(weights | {"w": torch.tensor([1.0, -3.5])}, other / name)
    found = gpu_federated._differences(one, other, ["metrics.jsonl", name])
    assert found["metrics.jsonl"] == "line 2 (arm fedavg, round 1, client silo-0): train_loss 2.0 and 2.5"
    assert re.match(r"1 of 2 tensors, w by up to 0\.5 .* 4$", found[name])
    assert gpu_federated._differences(one, one, ["metrics.jsonl", name]) == {}
    metrics_of(other, 1.0, 2.0)
    save_file(weights, other / name, {"other": "text"})
    found = gpu_federated._differences(one, other, ["metrics.jsonl", name])
    assert re.match("3 and 2 lines", found["metrics.jsonl"])
    assert "description" in found[name]
    (other / name).unlink()
    assert gpu_federated._differences(one, other, [name]) == {name: "missing"}


@pytest.mark.parametrize("repeats", [True, False])
def test_other_bits_after_a_resume_are_explained(tmp_path, monkeypatch, repeats):
    """The run is trained once more, which tells a wrong resume from a run that never repeats."""
    runs = iter([1.0, 1.5, 1.0 if repeats else 1.7])

    def trained(command):
        folder = Path(command[command.index("--out" if "--out" in command else "--resume") + 1])
        metrics_of(folder, 0.5, next(runs))
        return subprocess.CompletedProcess(command, 0, "", "UserWarning: cumsum is not deterministic\n")

    monkeypatch.setattr(gpu_federated, "_run", trained)
    monkeypatch.setattr(gpu_federated.subprocess, "Popen", lambda *args, **keys: None)
    monkeypatch.setattr(gpu_federated, "_kill_after", lambda *args, **keys: True)
    with pytest.raises(RuntimeError) as error:
        gpu_federated.resume("cuda", tmp_path)
    assert ("before" in str(error.value)) != repeats
    for words in ("resumed", "train_loss", "1.0", "1.5", "cumsum"):
        assert words in str(error.value)
