"""Whole runs through their folder: its files, and refusals before anything is written."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import uefl
from uefl import config, folder, run
from uefl.client.workspace import uses_bf16
from uefl.config.config import tomllib
from uefl.data import build
from uefl.errors import RunError, UserError
from uefl.models import saved
from uefl_kernels import backend

from .whole_run import KEYS, Watcher, go_on, interrupted, outcome, start, train


def test_the_folder_of_a_finished_run(finished):
    out, observer, summary = finished
    names = {path.name for path in out.iterdir()}
    texts = {"config.toml", "manifest.json", "metrics.jsonl", "summary.json", "checkpoint.json", "report.md"}
    models = {"model-fedavg.safetensors", "model-uefl.safetensors"}
    assert names >= texts | models | {"plots", "run.lock"}
    assert not [name for name in names if name.endswith((".tmp", ".new"))]
    assert summary == json.loads((out / "summary.json").read_text())
    precision = "bf16" if uses_bf16("auto", torch.device("cpu")) else "fp32"
    assert config.load_whole(out / "config.toml") == config.load("demo", KEYS).with_run(precision=precision)
    assert observer.rounds == [(arm, r) for arm in ("fedavg", "uefl") for r in range(3)]
    assert observer.calls[0] == ("start", ["fedavg", "uefl"], 3, 3)


def test_metrics_have_one_line_per_arm_round_and_client(finished):
    lines = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
    assert [(r["arm"], r["round"], r["client"]) for r in lines] == [
        (a, n, f"silo-{k}") for a in ("fedavg", "uefl") for n in (1, 2, 3) for k in range(3)
    ]
    for r in lines:
        assert 0 <= r["accuracy"] <= 1
        assert 0 <= r["entropy"] <= 2.31
        assert ("perplexity" in r) == (r["arm"] != "fedavg")


def test_summary_is_of_the_last_round(finished):
    out, _, summary = finished
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for arm, outcome_ in summary["arms"].items():
        by_round = [[r["accuracy"] for r in lines if r["arm"] == arm and r["round"] == n] for n in (1, 2, 3)]
        means = [sum(v) / 3 for v in by_round]
        assert outcome_["accuracy"] == pytest.approx(means[-1])
        assert outcome_["accuracy_last4"]["mean"] == pytest.approx(sum(means) / 3)
        assert outcome_["rounds"] == 3
        assert set(outcome_["clients"]) == {"silo-0", "silo-1", "silo-2"}
        assert {"accuracy", "entropy"} <= set(outcome_["clients"]["silo-0"])


def test_the_saved_model_carries_every_client_s_codebook(finished):
    out, _, summary = finished
    model = load_file(out / "model-uefl.safetensors")
    for client, values in summary["arms"]["uefl"]["clients"].items():
        assert len(model[f"codebook.{client}"]) == values["codewords"]
    assert model["head.fc2.weight"].shape == (10, 16)
    assert not [name for name in load_file(out / "model-fedavg.safetensors") if name.startswith("codebook")]


@pytest.mark.slow
def test_equal_seeds_give_equal_bits_and_other_seeds_do_not(finished, tmp_path):
    start(tmp_path / "again")
    start(tmp_path / "other", "seed=1")
    assert outcome(tmp_path / "again") == outcome(finished[0])
    for model in finished[0].glob("model-*.safetensors"):
        assert model.read_bytes() == (tmp_path / "again" / model.name).read_bytes()
    assert outcome(tmp_path / "other")[1] != outcome(finished[0])[1]


def test_a_folder_in_use_is_not_changed(finished, tmp_path):
    out = finished[0]
    with pytest.raises(UserError, match=r"\bfinished .*--out.*report"):
        start(out)
    begun = interrupted(tmp_path / "begun")
    with pytest.raises(UserError, match=r"unfinished .*--out.*--resume"):
        start(begun)
    with folder.lock(begun), pytest.raises(UserError, match=r"\bprocess;"):
        start(begun)
    with pytest.raises(UserError, match=r"/proc/foo .*--out"):
        start(Path("/proc/foo"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"other .*empty.*--out"):
        start(other)
    assert [p.name for p in other.iterdir()] == ["notes.txt"]


def test_own_silos_leave_the_number_of_clients_out(make_npz, tmp_path, monkeypatch):
    monkeypatch.chdir(make_npz().parent)
    keys = ["source=data.npz", "image_size=8", "width=2", "hidden=8", "arms=fedavg", "rounds=[2]"]
    keys += ["local_epochs=1", "threads=1"]
    with pytest.raises(KeyboardInterrupt):
        train(config.load("own-silos", keys), tmp_path / "new", Watcher(stop_after=3))
    data = tomllib.loads((tmp_path / "new" / "config.toml").read_text())["data"]
    assert "clients" not in data
    assert data["source"] == str(tmp_path / "data.npz")  # found again from any folder
    monkeypatch.chdir("/")
    go_on(tmp_path / "new")
    assert (tmp_path / "new" / "summary.json").exists()


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_a_missing_backend_is_refused_before_writing(tmp_path, name):
    if torch.cuda.is_available():
        pytest.skip("the backend is not absent here")
    with backend(name), pytest.raises(UserError, match=f"backend '{name}' .* vq"):
        start(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_files_can_be_read_by_others(finished):
    modes = {path.name: path.stat().st_mode & 0o777 for path in finished[0].iterdir() if path.is_file()}
    assert len(set(modes.values())) == 1, modes


def test_two_threads_repeat_themselves_too(tmp_path):
    for name in ("a", "b"):
        start(tmp_path / name, "threads=2", "arms=uefl", "rounds=[1]")
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


def test_more_threads_than_cores_are_noted(tmp_path, monkeypatch):
    for cores, noted in ((1, True), (2, False)):
        monkeypatch.setattr(run.os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        observer = Watcher()
        start(tmp_path / str(cores), "threads=2", "arms=fedavg", "rounds=[1]", observer=observer)
        found = [notice for notice in observer.notices if "threads" in notice]
        assert len(found) == noted
        assert all(re.search("2 threads .*1 core .*threads = 1$", notice) for notice in found)


def test_the_number_of_threads_is_set(tmp_path):
    torch.set_num_threads(2)
    start(tmp_path / "run", "arms=fedavg", "rounds=[1]")
    made_with = json.loads((tmp_path / "run" / "checkpoint.json").read_text())["state"]["made_with"]
    assert (made_with["threads"], torch.get_num_threads()) == (1, 2)


@pytest.mark.parametrize(
    ("key", "message"),
    [("codewords=2000", r"\b2000 .*codewords"), ("normalize=imagenet", r"\b3 channels, .*\b1\b")],
)
def test_keys_that_do_not_fit_the_data_write_nothing(tmp_path, key, message):
    with pytest.raises(UserError, match=message):
        start(tmp_path / "run", key)
    assert not (tmp_path / "run").exists()


def test_the_saved_model_predicts_as_the_run_measured(finished):
    out, _, summary = finished
    test = build(config.load("demo", KEYS).data, kind="labeled", seed=0).clients[1].load().test
    for arm, client in (("fedavg", None), ("uefl", "silo-1")):
        model = saved.load(out / f"model-{arm}.safetensors")
        hits = (model.predict(test.images, client).argmax(1) == test.labels).double().mean()
        # dropout off, float32
        assert float(hits) == pytest.approx(summary["arms"][arm]["clients"]["silo-1"]["accuracy"], abs=0.15)
        assert model.classes == tuple("0123456789")
    # a new client, with the codebook that fits best
    assert model.predict(test.images).shape == (len(test.images), 10)


@pytest.mark.parametrize("content", [b"", b"nonsense", None], ids=["empty", "garbage", "absent"])
def test_a_file_that_is_no_model(tmp_path, content):
    if content is not None:
        (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(
        UserError, match=r"m\.safetensors .*read" if content is not None else r"m\.safetensors .*model-<arm>"
    ):
        saved.load(tmp_path / "m.safetensors")


def test_a_model_of_another_arm_is_refused(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    shutil.copy(tmp_path / "run" / "model-uefl.safetensors", tmp_path / "run" / "model-fedavg.safetensors")
    with pytest.raises(UserError, match=r"model-fedavg\.safetensors .*'fedavg'"):
        uefl.load(tmp_path / "run").model("fedavg")


def test_a_model_of_another_format(tmp_path):
    from uefl.checkpoint import save_tensors

    save_tensors(tmp_path / "m.safetensors", {"x": torch.zeros(1)}, {"format": "other"})
    with pytest.raises(UserError, match=r"m\.safetensors .*version"):
        saved.load(tmp_path / "m.safetensors")


def test_a_diverged_run_ends_with_an_error(tmp_path):
    with pytest.raises(RunError, match="quorum"):
        start(tmp_path / "run", "lr=1e30")
    assert not (tmp_path / "run" / "summary.json").exists()


def test_devices(tmp_path):
    cfg = config.load("demo", KEYS)
    with pytest.raises(UserError, match="auto, cpu, cuda"):
        train(cfg, tmp_path / "a", device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="CUDA"):
            train(cfg, tmp_path / "a", device="cuda")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("capped", "rounds"), [(0, 0), (1, 2)])
def test_an_arm_without_a_limit_has_no_total(tmp_path, capped, rounds):
    observer, keys = Watcher(error=RuntimeError, stop_after=0), ("passes=20", f"max_iterations={capped}")
    with pytest.raises(RuntimeError):
        start(tmp_path / "run", "arms=uefl-published", *keys, observer=observer)
    assert observer.calls[0] == ("start", ["uefl-published"], rounds, 3)


@pytest.mark.parametrize("name", ["fedper", "fedbn", "fedcr", "uefl-published"])
def test_clients_that_predict_alone_have_no_best_model(tmp_path, name):
    with pytest.raises(UserError, match=r"run\.select = 'holdout' .*'last'"):
        start(tmp_path / "run", f'arms=["{name}"]', "select=holdout", "passes=20")
    assert not (tmp_path / "run").exists()
