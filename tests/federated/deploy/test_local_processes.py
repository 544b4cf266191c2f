"""Runs over Flower with real processes of this machine have the numbers of the local engine.

They leave nothing behind.
"""

import os
import signal

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")

from tests.federated.deploy.chaos.cluster import UEFL, measured, until
from tests.federated.deploy.runs import children, config, end, gone, start, uefl
from uefl import resume, train
from uefl.cli import app
from uefl.folder import read_silos

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


SETS = """
[run]
precision = "fp32"
threads = 1
[data]
clients = 2
train_per_client = 120
test_per_client = 20
labeled = 40
validation = 20
augment = "photo"
[data.partition]
scheme = "unlabeled"
split = "iid"
sets = 4
[model]
encoder = "cnn5x5"
frozen_batch_norm = true
width = 4
[training]
rounds = [2]
local_epochs = 1
batch_size = 16
lr = 5e-3
[arms.fedul]
[arms.fedul-m1]
algorithm = "fedul"
server = "finetune"
[arms.fedllp-vat]
"""


@pytest.mark.parametrize("kind", ["labeled", "sets"])
def test_the_same_numbers_as_in_one_process(tmp_path, kind):
    """This test uses Python, and a test below the command line."""
    cfg = config(tmp_path, f"[arms.fedavg]\n{UEFL}[arms.fedper]\n", clients=2)
    if kind == "sets":
        cfg.write_text(SETS)
    for engine in ("local", "flower"):
        train(cfg, engine=engine, out=tmp_path / engine, device="cpu")
    assert not children(os.getpid())
    one, other = (tmp_path / engine for engine in ("local", "flower"))
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    here, there = ({p.name for p in folder.iterdir() if "events" not in p.name} for folder in (one, other))
    assert there == here | {"silos.json"}
    assert {of["precision"] for of in read_silos(other).values()} == {"fp32"}
    for name in ("manifest.json", "config.toml", *(path.name for path in one.glob("model-*.safetensors"))):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run = train(config(folder, UEFL, clients=2), out=folder / "run", device="cpu")
    return (run.path / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    "how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["Ctrl-C", "SIGTERM", "kill -9"]
)
def test_interrupted_run_leaves_no_process_and_resumes(tmp_path, how, undisturbed):
    """The run resumes over Flower after the hardest end, and in this process after the other ends."""
    cfg = config(tmp_path, UEFL, clients=2)
    to_flower = ("--engine", "flower", "--device", "cpu")
    run = start("train", cfg, *to_flower, "--out", "run", cwd=tmp_path, background=how == signal.SIGKILL)
    until("a round", lambda: measured(tmp_path / "run"))
    begun = children(run.pid)
    assert len(begun) == 3
    run.send_signal(how)
    code, _, err = end(run, 60)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[how]
    assert gone(list(begun))
    if how == signal.SIGKILL:
        code, _, err = uefl("train", "--resume", "run", *to_flower, cwd=tmp_path)
        assert code == 0, err
    else:
        assert "uefl train --resume run --engine flower" in err
        resume(tmp_path / "run", device="cpu")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == undisturbed


def test_a_mistake_in_the_data_is_a_line_and_nothing_is_left(tmp_path):
    result = CliRunner().invoke(
        app,
        ["train", str(config(tmp_path, clients=9000)), "--engine", "flower", "--out", str(tmp_path / "run")],
    )
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
    assert not children(os.getpid())
