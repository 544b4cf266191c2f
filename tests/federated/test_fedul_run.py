"""Runs on unlabeled sets are tested through their folder.

Interruptions change nothing, and a lack of data is reported before anything is written.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import load_file

from uefl import config
from uefl.data import build
from uefl.errors import UserError
from uefl.models import saved
from uefl.progress import watch
from uefl.report.compare import spread_table
from uefl.report.run_folder import read_run

from .data.test_own_sets import write
from .whole_run import Watcher, go_on, killed, outcome, train

KEYS = [
    'arms=["fedul-m2", "fedul", "fedllp-vat"]',
    "clients=2",
    "train_per_client=120",
    "test_per_client=30",
    "sets=4",
    "labeled=60",
    "validation=50",
    "width=2",
    "rounds=[3]",
    "batch_size=32",
    "threads=1",
    "select=validation",
]


def start(out: Path, *keys: str, observer: Watcher | None = None):
    return train(config.load("fedul-demo", [*KEYS, *keys]), out, observer)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out, observer = tmp_path_factory.mktemp("runs") / "whole", Watcher()
    start(out, observer=observer)
    return out, observer


def test_the_folder_of_a_finished_run(finished):
    out, observer = finished
    assert {f"model-{arm}.safetensors" for arm in ("fedul", "fedul-m2", "fedllp-vat")} <= {
        path.name for path in out.iterdir()
    }
    assert observer.rounds == [(arm, r) for arm in ("fedul-m2", "fedul", "fedllp-vat") for r in range(3)]
    assert re.match("2 clients: 240 unlabeled .*1 x 28 x 28 .*8 sets", observer.notices[0])
    assert re.search("client 'client-0': 4 sets .*10 classes", observer.notices[1])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 3 * 2
    for arm, values in json.loads((out / "summary.json").read_text())["arms"].items():
        mine = [r for r in lines if r["arm"] == arm]
        best = max(mine, key=lambda r: r["validation_accuracy"])["round"]  # the first one in a tie
        assert values["selected"]["round"] == best
        assert values["selected"]["accuracy"] == pytest.approx(
            sum(r["accuracy"] for r in mine if r["round"] == best) / 2
        )
    report = (out / "report.md").read_text()
    assert "2 clients, scheme unlabeled" in report
    assert "codewords" not in report


def test_the_saved_model_is_the_selected_one(finished):
    out, _ = finished
    model = saved.load(out / "model-fedul-m2.safetensors")
    validation = build(config.load("fedul-demo", KEYS).data, kind="sets", seed=0).server.validation
    hits = (model.predict(validation.images).argmax(1) == validation.labels).double().mean()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    best = max(r["validation_accuracy"] for r in lines if r["arm"] == "fedul-m2")
    # the model predicts in float32, the run may measure in bfloat16
    assert float(hits) == pytest.approx(best, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("calls", [0, 3, 6, 13, 22])
def test_a_run_interrupted_anywhere_resumes_bit_for_bit(finished, tmp_path, calls):
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", observer=Watcher(stop_after=calls))
    go_on(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(finished[0])


@pytest.mark.slow
def test_kill_9_loses_at_most_a_round(finished, tmp_path):
    killed(__name__, tmp_path / "run", "fedul-m2", 2, "client-1")
    go_on(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(finished[0])
    for path in tmp_path.joinpath("run").glob("model-*.safetensors"):
        assert {k: v.tolist() for k, v in load_file(path).items()} == {
            k: v.tolist() for k, v in load_file(finished[0] / path.name).items()
        }


def test_own_sets_through_the_command(tmp_path):
    keys = {"width": 2, "rounds": [2], "batch_size": 8, "precision": "fp32"}
    arms = {"fedul": {}, "m1": {"algorithm": "fedul", "server": "finetune"}}
    cfg = config.load("own-sets", [f"source={write(tmp_path / 'sets')}"], arms=arms, **keys)
    train(cfg, tmp_path / "run")
    arms = json.loads((tmp_path / "run" / "summary.json").read_text())["arms"]
    assert set(arms["fedul"]["clients"]) == {"berlin", "madrid"}
    path = tmp_path / "run" / "config.toml"
    # the folder determines the clients and sets
    assert not [key for key in ("clients", "sets") if f"\n{key} = " in path.read_text()]
    assert config.load_whole(path) == cfg
    (tmp_path / "sets").rename(tmp_path / "elsewhere")  # a finished run is usable without its data
    assert set(read_run(tmp_path / "run").arms) == {"fedul", "m1"}
    assert saved.load(tmp_path / "run" / "model-m1.safetensors").classes == ("cat", "dog")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(UserError, match=r"'.*sets' .*digits"):
        go_on(tmp_path / "run")


@pytest.mark.usefixtures("drawn")
def test_without_test_images_a_run_measures_no_accuracy(tmp_path):
    keys = [f"source={write(tmp_path / 'sets', server=())}", "width=2", "rounds=[2]", "batch_size=8"]
    observer, out = Console(file=io.StringIO(), width=200), tmp_path / "run"
    with watch(observer) as lines:
        train(config.load("own-sets", keys), out, lines)
    said = observer.file.getvalue()
    assert "fedul round 2/2  entropy 0." in said
    assert "accuracy" not in said
    arms = json.loads((out / "summary.json").read_text())["arms"]
    assert arms["fedul"]["accuracy"] is None
    assert arms["fedul"]["accuracy_last4"] == {"mean": None, "sd": None}
    assert arms["fedul"]["entropy"] > 0
    report = (out / "report.md").read_text()
    assert "| arm | entropy |" in report
    assert "test images" in report
    assert (out / "plots" / "arms.png").stat().st_size > 1000
    assert spread_table([read_run(out)]).rows == [["fedul", "1", "-", "-"], ["fedpl", "1", "-", "-"]]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["arms.fedul.server=finetune"], "arm 'fedul' .*data.labeled"),
        (["arms=['fedavg-labeled']"], "arm 'fedavg-labeled' .*labels"),
        (["select=validation"], "run.select = 'validation'"),
        (["priors=estimated"], "estimated .*labeled"),
    ],
)
def test_missing_input_is_an_error_before_writing(tmp_path, keys, message):
    cfg = config.load("own-sets", [f"source={write(tmp_path / 'sets', server=('test',))}", *keys])
    with pytest.raises(UserError, match=message):
        train(cfg, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_sets_that_allow_no_step_are_refused(tmp_path):
    root = write(tmp_path / "sets")
    for path in list((root / "labeled").glob("*/*"))[1:]:
        path.unlink()
    for name in ("cat", "dog"):
        if not any((root / "labeled" / name).iterdir()):
            (root / "labeled" / name).rmdir()
    images = np.zeros((2, 12, 12), np.uint8)
    np.savez(root / "clients" / "madrid.npz", images=images, set=np.array([9, 10]))
    for arm, message in (("supervised", r"server .*\b1 labeled"), ("fedllp", "client 'madrid' .*sets")):
        cfg = config.load("own-sets", [f"source={root}", f"arms=['{arm}']"])
        with pytest.raises(UserError, match=message):
            train(cfg, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("sets", [10, 40])
def test_the_preset_of_the_baselines_trains_them_all(tmp_path, sets):
    """Train on digits instead of the preset's data, for one round."""
    small = {"clients": 2, "train_per_client": 300, "test_per_client": 20, "validation": 20}
    keys = {"width": 1, "rounds": [1], "threads": 1}
    cfg = config.load("fedul-baselines", ["source=digits"], sets=sets, **small, **keys)
    summary = train(cfg, tmp_path / "run")
    labeled = {"fedavg-labeled", "fedavg-labeled-10"}
    assert set(summary["arms"]) == {"fedul", "fedpl", "fedllp", "fedllp-vat"} | labeled
    assert all(0 <= arm["accuracy"] <= 1 for arm in summary["arms"].values())
