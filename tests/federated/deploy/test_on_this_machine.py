"""Runs over Flower on this machine, with real processes: the numbers of the local engine, and nothing left behind."""

import json
import signal

import pytest

pytest.importorskip("flwr")

from tests.federated.deploy.runs import UEFL, children, config, end, gone, rounds, start, uefl, wait_for

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
augment = "rotate"
[data.partition]
scheme = "unlabeled"
split = "iid"
sets = 4
[model]
encoder = "cnn5x5"
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
    cfg = config(tmp_path, f"[arms.fedavg]\n{UEFL}[arms.fedper]\n")
    if kind == "sets":
        cfg.write_text(SETS)
    for engine in ("local", "flower"):
        code, _, err = uefl("train", cfg, "--engine", engine, "--out", engine, "--device", "cpu", cwd=tmp_path)
        assert code == 0, err
    one, other = (tmp_path / engine for engine in ("local", "flower"))
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    assert {p.name for p in one.iterdir() if "events" not in p.name} == {p.name for p in other.iterdir() if "events" not in p.name}
    for name in ("manifest.json", "config.toml", *(path.name for path in one.glob("model-*.safetensors"))):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["Ctrl-C", "SIGTERM", "kill -9"])
def test_an_interrupted_run_leaves_no_process_and_goes_on(tmp_path, how):
    cfg = config(tmp_path, UEFL)
    assert uefl("train", cfg, "--out", "local", "--device", "cpu", cwd=tmp_path)[0] == 0
    run = start("train", cfg, "--engine", "flower", "--out", "run", "--device", "cpu", cwd=tmp_path)
    wait_for(lambda: rounds(tmp_path / "run"))
    begun = children(run.pid)
    assert len(begun) == 4
    run.send_signal(how)
    code, _, err = end(run, 60)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[how]
    assert gone(list(begun))
    if how != signal.SIGKILL:
        assert "go on with: uefl train --resume run --engine flower" in err
    code, _, err = uefl("train", "--resume", "run", "--engine", "flower", "--device", "cpu", cwd=tmp_path)
    assert code == 0, err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (tmp_path / "local" / "metrics.jsonl").read_bytes()


def test_a_mistake_in_the_data_is_a_line_and_nothing_is_left(tmp_path):
    code, _, err = uefl("train", config(tmp_path, clients=9000), "--engine", "flower", "--out", "run", cwd=tmp_path)
    assert code == 2
    assert err.startswith("error: ")
    assert not (tmp_path / "run").exists()
    assert json.dumps(err).count("\\n") == 1
