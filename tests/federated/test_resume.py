"""Runs that continue in their folder: interruptions change nothing, and mismatched folders are refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

import uefl
from uefl import folder, run
from uefl.data import build
from uefl.errors import UserError
from uefl.report.run_folder import read_run

from .command_line import cli
from .whole_run import Watcher, go_on, interrupted, killed, outcome, start


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory):
    return interrupted(tmp_path_factory.mktemp("stopped") / "run")


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """Return a copy of an interrupted run that only this test uses."""
    return shutil.copytree(stopped_once, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("calls", [0, 1, 4, 8, 14, 19, 24])
def test_a_run_interrupted_anywhere_resumes_bit_for_bit(finished, tmp_path, calls):
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", observer=Watcher(stop_after=calls))
    observer = Watcher()
    go_on(tmp_path / "run", observer)
    assert outcome(tmp_path / "run") == outcome(finished[0])
    lost = len([c for c in observer.calls if c[0] == "client"]) - (30 - calls)
    assert lost <= 3  # at most the one exchange that was under way


@pytest.mark.parametrize("key", ["precision=bf16", "select=holdout"])
def test_resumed_run_of_a_key_has_the_same_bits(tmp_path, key):
    """No copy of a parameter in bfloat16 outlives its step, and the best model is in the checkpoint."""
    keys = 'arms=["fedavg"]', key
    start(tmp_path / "whole", *keys)
    go_on(interrupted(tmp_path / "run", *keys, after=7))
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_run_keeps_its_precision_on_another_cpu(finished, stopped, monkeypatch):
    here = torch.cpu._is_avx512_bf16_supported()
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: not here)
    observer = Watcher()
    go_on(stopped, observer)
    assert outcome(stopped) == outcome(finished[0])
    assert not [notice for notice in observer.notices if "->" in notice]


@pytest.mark.slow
def test_kill_9_loses_at_most_a_round(finished, tmp_path):
    killed(__name__, tmp_path / "run", "uefl", 1, "silo-1")
    assert not (tmp_path / "run" / "summary.json").exists()
    observer = Watcher()
    go_on(tmp_path / "run", observer)
    assert outcome(tmp_path / "run") == outcome(finished[0])
    assert ("arm", "fedavg", 3) not in observer.calls  # the arm that had ended was not run again
    (done,) = [call[2] for call in observer.calls if call[0] == "arm"]
    assert observer.rounds[0] == ("uefl", done)  # counted from 0: the round after the last measured one


def test_resuming_a_finished_run_only_returns_its_summary(finished):
    out, _, summary = finished
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.name != "run.lock"}
    assert go_on(out) == summary
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.name != "run.lock"} == before


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "1"], ids=["torn", "deep", "number"])
@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "manifest.json"])
def test_a_damaged_file_of_a_finished_run_is_named(finished, tmp_path, name, text):
    shutil.copytree(finished[0], tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    observer = Watcher()
    with pytest.raises(UserError, match=re.escape(name)):
        go_on(tmp_path / "run", observer)
    assert observer.notices == []


def test_a_changed_digit_of_a_finished_run_is_noticed(finished, tmp_path):
    """The summary has no number of the training loss of the first round."""
    out = shutil.copytree(finished[0], tmp_path / "run")
    lines = (out / "metrics.jsonl").read_text()
    changed = re.sub(r'("train_loss": \d+\.)(\d)', lambda m: m[1] + str(9 - int(m[2])), lines, count=1)
    (out / "metrics.jsonl").write_text(changed)
    with pytest.raises(UserError, match=r"summary\.json .*metrics\.jsonl"):
        uefl.load(out)


def test_two_processes_do_not_share_a_folder(finished):
    out = finished[0]
    with folder.lock(out), pytest.raises(UserError, match=r"\bprocess;"):
        go_on(out)


def test_resuming_a_folder_without_a_run(tmp_path):
    with pytest.raises(UserError, match=r"config.toml\); .*PRESET --out "):
        go_on(tmp_path / "free")
    (tmp_path / "other").touch()
    with pytest.raises(UserError, match=r"config.toml\); .*folder"):
        go_on(tmp_path)


def test_a_checkpoint_of_another_version_is_refused_and_kept(stopped):
    index = stopped / "checkpoint.json"
    index.write_text(index.read_text().replace('"schema": 4', '"schema": 7'))
    kept = index.read_text()
    with pytest.raises(UserError, match="schema 7"):
        go_on(stopped)
    assert index.read_text() == kept


@pytest.mark.slow
def test_the_published_algorithm_resumes_after_an_interruption(tmp_path):
    keys = (
        "arms=uefl-published",
        "legacy_holdout=true",
        "holdout=0.1",
        "max_iterations=2",
        "reference=mean",
        "codewords=8",
        "stop_when_certain=false",
        "passes=20",  # its arms draw nothing
    )
    start(tmp_path / "whole", *keys)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", *keys, observer=Watcher(stop_after=10))
    go_on(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["gone", "short", "garbage"])
def test_metrics_that_differ_from_the_checkpoint_are_rejected(stopped, damage):
    metrics = stopped / "metrics.jsonl"
    text = metrics.read_text()
    if damage == "gone":
        metrics.unlink()
    else:
        metrics.write_text(text[:-200] if damage == "short" else "?" * len(text))
    with pytest.raises(UserError, match=f"{metrics} "):
        go_on(stopped)
    assert metrics.exists() == (damage != "gone")


def test_a_folder_in_the_place_of_a_file_is_named(stopped):
    """The advice to continue the run would lead nowhere."""
    (stopped / "manifest.json").unlink()
    (stopped / "manifest.json").mkdir()
    with pytest.raises(UserError, match=r"manifest\.json .*\bfolder"):
        go_on(stopped)


def test_a_lost_checkpoint_drops_no_results(tmp_path):
    metrics = interrupted(tmp_path / "run", after=14) / "metrics.jsonl"
    text = metrics.read_text()
    (tmp_path / "run" / "checkpoint.json").unlink()
    with pytest.raises(UserError, match=r"metrics\.jsonl .*checkpoint\.json"):
        go_on(tmp_path / "run")
    assert metrics.read_text() == text


def test_a_truncated_configuration_is_rejected(stopped):
    path = stopped / "config.toml"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:9]))
    with pytest.raises(UserError, match=r"lacks .*(section|key)"):
        go_on(stopped)


def test_a_configuration_that_was_changed_is_refused(stopped):
    path = stopped / "config.toml"
    assert not read_run(stopped).edited
    path.write_text(path.read_text().replace("gamma = 0.0", "gamma = 0.5"))
    with pytest.raises(UserError, match=r"config\.toml .*changed"):
        go_on(stopped)
    report = cli("report", stopped)
    assert (report.exit_code, report.stderr.count(read_run(stopped).edited)) == (0, 1)
    assert read_run(stopped).edited in (stopped / "report.html").read_text()


def test_other_images_are_refused(stopped, monkeypatch):
    monkeypatch.setattr(run, "build", lambda *given, **more: replace(build(*given, **more), digest="another"))
    with pytest.raises(UserError, match=r"images .*clients"):
        go_on(stopped)


_TORCH = torch.__version__


def test_another_torch_is_noted_and_threads_are_restored(stopped, monkeypatch):
    torch.set_num_threads(2)
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    observer = Watcher()
    go_on(stopped, observer)
    made_with = json.loads((stopped / "checkpoint.json").read_text())["state"]["made_with"]
    assert (made_with["threads"], torch.get_num_threads()) == (1, 2)
    (notice,) = (notice for notice in observer.notices if "->" in notice)
    assert notice.endswith(f": torch {_TORCH} -> 9.9.9")


def test_a_report_that_was_not_written_is_written_on_resume(tmp_path):
    start(tmp_path / "run", "arms=fedavg", "rounds=[1]")
    (tmp_path / "run" / "report.md").unlink()
    go_on(tmp_path / "run")
    assert (tmp_path / "run" / "report.md").exists()


def test_damaged_results_of_an_ended_arm_are_noted(tmp_path):
    """No turn of the second arm writes the model of the first arm again, and the manifest is known."""
    out = interrupted(tmp_path / "run", after=20)
    manifest, model = (out / "manifest.json").read_bytes(), out / "model-fedavg.safetensors"
    (out / "manifest.json").write_text("{")
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    observer = Watcher()
    go_on(out, observer)
    assert (out / "manifest.json").read_bytes() == manifest
    (notice,) = (notice for notice in observer.notices if "arm 'fedavg' has ended" in notice)
    assert str(model) in notice
    model.unlink()
    with pytest.raises(UserError, match=f"{model} .*restore"):
        uefl.load(out).model("fedavg")
