"""The verdict of a report: who is ahead and whether that may be chance, when and where the run was made."""

import json
import math
import re

import numpy as np
import pytest
import torch

from uefl.api import Run, train
from uefl.report.content import content, verdict
from uefl.report.plots import _draw_arms
from uefl.report.run_folder import read_run
from uefl.report.write import write_report

from . import sample_runs


def folder(path, first, second, images=None):
    """Return the folder of a run of two arms with the same accuracy in all rounds."""
    lines = sample_runs.records(("fedavg", "uefl"))
    for line in lines:
        line["accuracy"] = first if line["arm"] == "fedavg" else second
    sample_runs.write(path, lines)
    if images:
        manifest = json.loads((path / "manifest.json").read_text())
        names = dict.fromkeys(line["client"] for line in lines)
        split = {"images_of_class": [images] + [0] * (len(manifest["classes"]) - 1)}
        manifest["silos"] = {name: {"train": split, "holdout": split, "test": split} for name in names}
        (path / "manifest.json").write_text(json.dumps(manifest))
    return read_run(path)


@pytest.mark.parametrize(("second", "word"), [(0.82, "within"), (0.9, "beyond")])
def test_verdict_names_chance_or_a_difference(tmp_path, second, word):
    run = folder(tmp_path, 0.8, second, 100)
    (text,) = verdict(run)
    images = 100 * len(run.measured_clients)
    half = 1.96 * math.sqrt((0.8 * 0.2 + second * (1 - second)) / images)
    assert re.match(rf"`uefl` .*\b4 rounds: {second:.3f}; `fedavg` .*\b0\.800\.", text)
    assert re.search(rf"{images} test images, .*\b{half:.3f} .*\b{second - 0.8:.3f}, .*{word}", text)
    assert content(run, []).sections[0].elements[0] == text


def test_one_arm_has_no_verdict(tmp_path):
    assert verdict(read_run(sample_runs.write(tmp_path, sample_runs.records(("fedavg",))))) == []


def test_the_images_of_each_class_are_counted(tmp_path):
    run = folder(tmp_path, 0.8, 0.9, 30)
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<td>60</td>") == len(run.measured_clients)


def test_losses_are_drawn(tmp_path):
    lines = sample_runs.records(("fedavg", "uefl"))
    for line in lines:
        line["train_loss"] = None if line["round"] == 0 else 1 / line["round"]
    run = read_run(sample_runs.write(tmp_path, lines))
    figure = _draw_arms(run, {"train_loss": "training loss"})
    curve = figure.axes[0].lines[0].get_ydata()
    assert math.isnan(curve[0])
    assert figure.axes[0].get_ylim()[1] > 1.0
    assert curve[1:].tolist() == pytest.approx([1 / r for r in range(1, len(curve))])


def test_run_records_time_machine_and_versions(finished):
    out, *_ = finished
    made, summary = (json.loads((out / name).read_text()) for name in ("made.json", "summary.json"))
    page, names = (out / "report.html").read_text(), ("begun", "host", "version", "precision")
    for value in (*(made[name] for name in names), torch.__version__, "1 thread,"):
        assert value in page
    assert all(arm["cpu_seconds"] > 0 for arm in summary["arms"].values())
    assert "CPU s" in page


def test_notes_on_the_data_are_in_the_report(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(24) % 2
    clients = {
        name: ((rng.normal(size=(24, 3)), labels), (rng.normal(size=(8, 3)), np.arange(8) % tests))
        for name, tests in (("a", 2), ("b", 3))
    }
    keys = {"model": {"encoder": "mlp", "width": 4, "hidden": 4}, "training": {"rounds": [1]}}
    run = train(
        keys | {"run": {"passes": 2, "threads": 1}}, out=tmp_path / "run", clients=clients, arms=["fedavg"]
    )
    page = (tmp_path / "run" / "report.md").read_text()
    assert re.search(r"\bnote: .*\btest\b.*class '2'", page)
    made = tmp_path / "run" / "made.json"
    made.write_text(json.dumps(json.loads(made.read_text()) | {"notes": [1]}))
    assert read_run(run.path).made["notes"] == []


def test_rounds_in_python_count_as_in_the_summary(finished):
    run = Run(finished[0])
    for arm, outcome in run.summary.items():
        rows = run.metrics[run.metrics.arm == arm]
        assert sorted(rows["round"].unique()) == list(range(1, outcome["rounds"] + 1))
        best = rows[rows["round"] == outcome["best"]["round"]]
        assert best.accuracy.mean() == pytest.approx(outcome["best"]["accuracy"])
