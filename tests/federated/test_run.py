"""Whole runs through their folder: what is written, and that interruptions change nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from uefl import config, run
from uefl.config.config import tomllib
from uefl.data import build
from uefl.errors import RunError, UserError
from uefl.models import saved
from uefl_kernels import backend

KEYS = [
    'arms=["fedavg", "uefl"]',
    "clients=3", "angles=[0, -50, 120]", "train_per_client=48", "test_per_client=20", "holdout=0.25", "width=4", "hidden=16",
    "codewords=8", "rounds=[2, 1]", "local_epochs=1", "batch_size=16", "passes=3", "threads=1", "gamma=0.0",
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("undrawn")


class Watcher:
    """Collects what a run says; raises where told to."""

    def __init__(self, stop_after: int = 10**9, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.rounds, self.notices, self.calls, self.stop_after, self.error = [], [], [], stop_after, error

    def start(self, arms, rounds, clients):
        self.calls.append(("start", arms, rounds, clients))

    def arm(self, name, done_rounds):
        self.calls.append(("arm", name, done_rounds))

    def client(self, arm, round, client):
        self.calls.append(("client", arm, round, client))
        if len([c for c in self.calls if c[0] == "client"]) > self.stop_after:
            raise self.error

    def round(self, arm, round, records):
        self.rounds.append((arm, round))

    def notice(self, message):
        self.notices.append(message)


def start(out: Path, *keys: str, observer: Watcher | None = None):
    cfg = config.load("demo", [*KEYS, *keys])
    return run.train(cfg, preset="demo", out=out, device="cpu", data_root=None, observer=observer or Watcher())


def go_on(out: Path, observer: Watcher | None = None):
    return run.resume(out, device="cpu", data_root=None, observer=observer or Watcher())


def outcome(out: Path):
    """All of a finished run that must repeat itself bit for bit."""
    summary = json.loads((out / "summary.json").read_text())
    for arm in summary["arms"].values():
        assert arm.pop("seconds") > 0
    models = {f.name: {k: v.tolist() for k, v in load_file(f).items()} for f in sorted(out.glob("model-*.safetensors"))}
    return summary, (out / "metrics.jsonl").read_text(), models


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out, observer = tmp_path_factory.mktemp("runs") / "whole", Watcher()
    summary = start(out, observer=observer)
    return out, observer, summary


def test_the_folder_of_a_finished_run(finished):
    out, observer, summary = finished
    names = {path.name for path in out.iterdir()}
    assert {"config.toml", "manifest.json", "metrics.jsonl", "summary.json", "checkpoint.json", "report.md", "plots", "run.lock"} <= names
    assert {"model-fedavg.safetensors", "model-uefl.safetensors"} <= names
    assert not [name for name in names if name.endswith((".tmp", ".new"))]
    assert summary == json.loads((out / "summary.json").read_text())
    assert config.load_whole(out / "config.toml") == config.load("demo", KEYS)
    assert observer.rounds == [(arm, r) for arm in ("fedavg", "uefl") for r in range(3)]
    assert observer.calls[0] == ("start", ["fedavg", "uefl"], 3, 3)


def test_metrics_have_one_line_per_arm_round_and_client(finished):
    lines = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
    assert [(r["arm"], r["round"], r["client"]) for r in lines] == [
        (a, n, f"silo-{k}") for a in ("fedavg", "uefl") for n in range(3) for k in range(3)
    ]
    for r in lines:
        assert 0 <= r["accuracy"] <= 1
        assert 0 <= r["entropy"] <= 2.31
        assert ("perplexity" in r) == (r["arm"] != "fedavg")


def test_the_summary_is_the_last_round_s(finished):
    out, _, summary = finished
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for arm, outcome_ in summary["arms"].items():
        by_round = [[r["accuracy"] for r in lines if r["arm"] == arm and r["round"] == n] for n in range(3)]
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


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(finished, tmp_path):
    start(tmp_path / "again")
    start(tmp_path / "other", "seed=1")
    assert outcome(tmp_path / "again") == outcome(finished[0])
    for model in finished[0].glob("model-*.safetensors"):
        assert model.read_bytes() == (tmp_path / "again" / model.name).read_bytes()
    assert outcome(tmp_path / "other")[1] != outcome(finished[0])[1]


@pytest.mark.parametrize("calls", [0, 1, 4, 8, 14, 19, 24])
def test_a_run_interrupted_anywhere_resumes_bit_for_bit(finished, tmp_path, calls):
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", observer=Watcher(stop_after=calls))
    observer = Watcher()
    go_on(tmp_path / "run", observer)
    assert outcome(tmp_path / "run") == outcome(finished[0])
    lost = len([c for c in observer.calls if c[0] == "client"]) - (30 - calls)
    assert lost <= 3  # at most the one exchange that was under way


_CHILD = """
import os, signal, sys
from pathlib import Path
from {module} import Watcher, start
class Killer(Watcher):
    def client(self, *under_way):
        if under_way == {when}:
            os.kill(os.getpid(), signal.SIGKILL)
start(Path(sys.argv[1]), observer=Killer())
"""


def killed(module: str, out: Path, *when: object) -> None:
    """A run of the tests of that module, in a process that ends itself when that client of that round has its turn."""
    code = _CHILD.format(module=module, when=when)
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_kill_9_loses_at_most_a_round(finished, tmp_path):
    killed(__name__, tmp_path / "run", "uefl", 1, "silo-1")
    assert not (tmp_path / "run" / "summary.json").exists()
    observer = Watcher()
    go_on(tmp_path / "run", observer)
    assert outcome(tmp_path / "run") == outcome(finished[0])
    assert ("arm", "fedavg", 3) not in observer.calls  # the arm that had ended was not run again


def test_resuming_a_finished_run_returns_its_summary_and_writes_nothing(finished):
    out, _, summary = finished
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.name != "run.lock"}
    assert go_on(out) == summary
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.name != "run.lock"} == before


def test_a_folder_in_use_is_left_alone(finished, tmp_path):
    out = finished[0]
    with pytest.raises(UserError, match=r"holds a finished run already; choose another folder with --out, or see .*: uefl report"):
        start(out)
    begun = interrupted(tmp_path / "begun")
    with pytest.raises(UserError, match="holds a run that has not finished; choose another folder with --out, or uefl train --resume"):
        start(begun)
    with run._lock(begun), pytest.raises(UserError, match="is in use by another process"):
        start(begun)
    with pytest.raises(UserError, match=r"/proc/foo cannot be made \(.*\); choose another folder with --out"):
        start(Path("/proc/foo"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="in use by something that is no run"):
        start(other)
    assert [p.name for p in other.iterdir()] == ["notes.txt"]


def test_the_configuration_of_own_silos_names_no_number_of_clients(make_npz, tmp_path, monkeypatch):
    monkeypatch.chdir(make_npz().parent)
    keys = ["source=data.npz", "image_size=8", "width=2", "hidden=8", "arms=fedavg", "rounds=[2]", "local_epochs=1", "threads=1"]
    cfg = config.load("own-silos", keys)
    with pytest.raises(KeyboardInterrupt):
        run.train(cfg, preset="own-silos", out=tmp_path / "new", device="cpu", data_root=None, observer=Watcher(stop_after=3))
    data = tomllib.loads((tmp_path / "new" / "config.toml").read_text())["data"]
    assert "clients" not in data
    assert data["source"] == str(tmp_path / "data.npz")  # found again from any folder
    monkeypatch.chdir("/")
    go_on(tmp_path / "new")
    assert (tmp_path / "new" / "summary.json").exists()


def test_two_processes_do_not_share_a_folder(finished):
    out = finished[0]
    with run._lock(out), pytest.raises(UserError, match="in use by another process"):
        go_on(out)


def test_resuming_what_is_no_run(tmp_path):
    with pytest.raises(UserError, match=r"holds no run \(no config.toml\); start one with: uefl train PRESET --out "):
        go_on(tmp_path / "free")
    (tmp_path / "other").touch()
    with pytest.raises(UserError, match=r"holds no run \(no config.toml\); expected a run folder, as `uefl train` writes it$"):
        go_on(tmp_path)


def test_a_checkpoint_of_another_version_is_refused_and_kept(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", observer=Watcher(stop_after=8))
    index = tmp_path / "run" / "checkpoint.json"
    index.write_text(index.read_text().replace('"schema": 2', '"schema": 7'))
    kept = index.read_text()
    with pytest.raises(UserError, match="schema 7"):
        go_on(tmp_path / "run")
    assert index.read_text() == kept


def test_the_published_algorithm_through_its_folder_and_an_interruption(tmp_path):
    keys = (
        "arms=uefl-published",
        "legacy_holdout=true",
        "holdout=0.1",
        "max_iterations=2",
        "reference=mean",
        "codewords=8",
        "stop_when_certain=false",
    )
    start(tmp_path / "whole", *keys)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", *keys, observer=Watcher(stop_after=10))
    go_on(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_a_backend_that_is_absent_is_said_before_anything_is_written(tmp_path, name):
    if torch.cuda.is_available():
        pytest.skip("the backend is not absent here")
    with backend(name), pytest.raises(UserError, match=f"backend '{name}' cannot run vq here"):
        start(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_files_can_be_read_by_others(finished):
    modes = {path.name: path.stat().st_mode & 0o777 for path in finished[0].iterdir() if path.is_file()}
    assert len(set(modes.values())) == 1, modes


def interrupted(out: Path, *keys: str, after: int = 8) -> Path:
    with pytest.raises(KeyboardInterrupt):
        start(out, *keys, observer=Watcher(stop_after=after))
    return out


@pytest.mark.parametrize("damage", ["gone", "short", "garbage"])
def test_metrics_that_are_not_those_of_the_checkpoint_are_an_error(tmp_path, damage):
    metrics = interrupted(tmp_path / "run") / "metrics.jsonl"
    text = metrics.read_text()
    if damage == "gone":
        metrics.unlink()
    else:
        metrics.write_text(text[:-200] if damage == "short" else "?" * len(text))
    with pytest.raises(UserError, match=r"metrics.jsonl is (shorter|damaged)"):
        go_on(tmp_path / "run")


def test_a_configuration_that_is_cut_off_does_not_fall_back_to_defaults(tmp_path):
    path = interrupted(tmp_path / "run") / "config.toml"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:9]))
    with pytest.raises(UserError, match=r"lacks the (section|key)"):
        go_on(tmp_path / "run")


def test_a_configuration_that_was_changed_is_refused(tmp_path):
    path = interrupted(tmp_path / "run") / "config.toml"
    path.write_text(path.read_text().replace("gamma = 0.0", "gamma = 0.5"))
    with pytest.raises(UserError, match=r"config\.toml has been changed"):
        go_on(tmp_path / "run")


def test_other_images_are_refused(tmp_path, monkeypatch):
    interrupted(tmp_path / "run")
    monkeypatch.setattr(run, "build", lambda *given, **more: replace(build(*given, **more), digest="another"))
    with pytest.raises(UserError, match="the clients have other images"):
        go_on(tmp_path / "run")


def test_another_torch_is_said_and_the_threads_are_those_of_the_checkpoint(tmp_path, monkeypatch):
    interrupted(tmp_path / "run")
    torch.set_num_threads(2)
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    observer = Watcher()
    go_on(tmp_path / "run", observer)
    assert torch.get_num_threads() == 1
    assert [n for n in observer.notices if n.startswith("not bit for bit")] == [
        f"not bit for bit as without the interruption: torch {_TORCH} -> 9.9.9"
    ]


_TORCH = torch.__version__


def test_two_threads_repeat_themselves_too(tmp_path):
    for name in ("a", "b"):
        start(tmp_path / name, "threads=2", "arms=uefl", "rounds=[1]")
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


def test_more_threads_than_cores_are_noted(tmp_path, monkeypatch):
    for cores, said in ((1, ["note: 2 threads on 1 core slow each other down; set threads = 1"]), (2, [])):
        monkeypatch.setattr(run.os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        observer = Watcher()
        start(tmp_path / str(cores), "threads=2", "arms=fedavg", "rounds=[1]", observer=observer)
        assert [notice for notice in observer.notices if "threads" in notice] == said


def test_the_number_of_threads_is_set(tmp_path):
    torch.set_num_threads(2)
    start(tmp_path / "run", "arms=fedavg", "rounds=[1]")
    assert torch.get_num_threads() == 1


def test_a_report_that_was_not_written_is_written_on_resume(tmp_path):
    start(tmp_path / "run", "arms=fedavg", "rounds=[1]")
    (tmp_path / "run" / "report.md").unlink()
    go_on(tmp_path / "run")
    assert (tmp_path / "run" / "report.md").exists()


def test_too_few_feature_vectors_are_found_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match="too few for 2000 codewords; lower codewords"):
        start(tmp_path / "run", "codewords=2000")
    assert not (tmp_path / "run").exists()


def test_imagenet_normalisation_of_grey_images(tmp_path):
    with pytest.raises(UserError, match="images of 3 channels, these have 1"):
        start(tmp_path / "run", "normalize=imagenet")
    assert not (tmp_path / "run").exists()


def test_the_saved_model_predicts_as_the_run_measured(finished):
    out, _, summary = finished
    test = build(config.load("demo", KEYS).data, kind="labeled", seed=0).silos[1].load().test
    for arm, client in (("fedavg", None), ("uefl", "silo-1")):
        model = saved.load(out / f"model-{arm}.safetensors")
        hits = (model.predict(test.images, client).argmax(1) == test.labels).double().mean()
        assert float(hits) == pytest.approx(summary["arms"][arm]["clients"]["silo-1"]["accuracy"], abs=0.15)  # dropout off, float32
        assert model.classes == tuple("0123456789")
    with pytest.raises(UserError, match="client None has no part of its own"):
        model.predict(test.images)


@pytest.mark.parametrize("content", [b"", b"nonsense", None], ids=["empty", "garbage", "absent"])
def test_a_file_that_is_no_model(tmp_path, content):
    if content is not None:
        (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="cannot be read"):
        saved.load(tmp_path / "m.safetensors")


def test_a_model_of_another_format(tmp_path):
    from uefl.checkpoint import save_tensors

    save_tensors(tmp_path / "m.safetensors", {"x": torch.zeros(1)}, {"format": "other"})
    with pytest.raises(UserError, match="is no model of this version"):
        saved.load(tmp_path / "m.safetensors")


def test_a_diverged_run_ends_with_an_error(tmp_path):
    with pytest.raises(RunError, match="quorum"):
        start(tmp_path / "run", "lr=1e30")
    assert not (tmp_path / "run" / "summary.json").exists()


def test_devices(tmp_path):
    cfg = config.load("demo", KEYS)
    with pytest.raises(UserError, match="not one of auto, cpu, cuda"):
        run.train(cfg, preset="demo", out=tmp_path / "a", device="tpu", data_root=None, observer=Watcher())
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            run.train(cfg, preset="demo", out=tmp_path / "a", device="cuda", data_root=None, observer=Watcher())
    assert not (tmp_path / "a").exists()


def test_nothing_in_the_packages_unpickles():
    root = Path(__file__).parents[2]
    for package in ("uefl", "uefl_kernels"):
        for path in (root / package).rglob("*.py"):
            text = path.read_text()
            assert not any(word in text for word in ("import pickle", "torch.load(", "torch.save(", "allow_pickle=True", "joblib")), path
    assert len(list((root / "uefl").rglob("*.py"))) > 20
