"""The runs of a suite train at the same time, share one display, and continue where they stopped."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from tests import fresh
from uefl import load
from uefl.errors import RunError, UserError
from uefl.models.saved import SavedModel
from uefl.suites import command, cost, features, report, runner, suite

from . import sample_runs
from .command_line import accepted, cli
from .interrupted import Killer, outcome
from .test_suites import EXAMPLES, FEW, TINY, tiny
from .whole_run import train


def test_folder_with_another_run_is_not_reused(tmp_path: Path) -> None:
    job, *_ = suite.jobs(suite.load(tiny(tmp_path)), "cpu", 1, tmp_path / "out", threads=1)
    sample_runs.write(job.folder, sample_runs.records(("fedavg",)))
    with pytest.raises(UserError, match=r"seed-0: .*\bdata.clients.*\)"):
        runner.check_configurations([job])


def test_folders_of_other_suites_and_runs_keep_their_report(tmp_path: Path) -> None:
    """A folder is recognized by its results, by its runs, or as a run."""
    whole = suite.load(tiny(tmp_path))
    jobs = suite.jobs(whole, "cpu", 1, tmp_path / "out", threads=1)
    runner.check_own(tmp_path / "out", "tiny", jobs)  # the folder does not exist yet
    sample_runs.write(tmp_path / "out" / "other" / "uefl" / "seed-0")
    with pytest.raises(UserError, match=r"/out .*suite.*--out"):
        runner.check_own(tmp_path / "out", "tiny", jobs)
    results = tmp_path / "out" / "results.json"
    results.write_text(json.dumps(report.plain(report.SuiteResult(whole, "cpu", {}, {}))))
    runner.check_own(tmp_path / "out", "tiny", jobs)  # accepted, although the names of its cases have changed
    before = results.read_bytes()
    refused = cli("suite", tiny(tmp_path, name="mine"), "--out", tmp_path / "out")
    assert refused.exit_code == 2
    assert re.fullmatch(f"error: {tmp_path / 'out'} .*'tiny'; .*--out\n", refused.stderr)
    assert results.read_bytes() == before
    with pytest.raises(UserError, match=r"/few .*/out, .*suite 'tiny'"):
        runner.check_own(tmp_path / "out" / "few", "mine", [])
    results.unlink()
    sample_runs.write(jobs[0].folder)
    runner.check_own(tmp_path / "out", "tiny", jobs)  # interrupted
    with pytest.raises(UserError, match=r"/seed-0 .*\brun\b"):
        runner.check_own(jobs[0].folder, "tiny", jobs)


def test_a_chosen_precision_matches_an_open_one(tmp_path: Path) -> None:
    job, *_ = suite.jobs(suite.load(tiny(tmp_path)), "cpu", 1, tmp_path / "out", threads=1)
    assert job.config.run.precision == "auto"
    job.folder.mkdir(parents=True)
    (job.folder / "config.toml").write_text(job.config.with_run(precision="bf16").to_toml())
    runner.check_configurations([job])
    with pytest.raises(UserError, match=r"\(run.precision\)"):
        runner.check_configurations([replace(job, config=job.config.with_run(precision="fp32"))])


def test_a_changed_suite_names_all_its_runs_before_it_starts(tmp_path: Path) -> None:
    jobs = suite.jobs(suite.load(tiny(tmp_path)), "cpu", 2, tmp_path / "out", threads=1)
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / "config.toml").write_text(job.config.to_toml())
    tiny(tmp_path, TINY.replace("codewords = 4", "codewords = 3"))
    found = cli("suite", tmp_path / "tiny.toml", "--seeds", "2", "--out", tmp_path / "out")
    folder = tmp_path / "out" / "few" / "uefl" / "seed-0"
    message = rf"error: {folder} .*1 more: .*\(arms\.uefl\.codewords\); .*--out\n"
    assert (found.exit_code, found.stdout) == (2, "")
    assert re.fullmatch(message, found.stderr)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_requested_number_of_runs_share_one_device(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes train at a time on the same device, also on a GPU."""
    going: list[FakeProcess] = []
    most, seen = 0, []

    class FakeProcess:
        def __init__(self, *, target: object, args: tuple[object, ...], daemon: bool) -> None:
            self.left = 2
            seen.append(args)

        def start(self) -> None:
            going.append(self)

        @property
        def exitcode(self) -> int | None:
            nonlocal most
            most, self.left = max(most, len(going)), self.left - 1
            if self.left:
                return None
            going.remove(self)
            return 0

    monkeypatch.setattr(runner._FORK, "Process", FakeProcess)
    monkeypatch.setattr(runner, "_LOOK", 0.0)
    jobs = suite.jobs(suite.load(tiny(tmp_path)), "cpu", 2, tmp_path / "out", threads=1)
    ends: list[runner.JobResult] = []
    runner.run(
        jobs, side_by_side=3, device=device, data_root=None, ended=ends.append, report=lambda running: None
    )
    assert most == 3
    assert len(seen) == len(ends) == 8
    assert {args[2] for args in seen} == {device}


def test_one_display_shows_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bar shows the rounds of all runs and current names, and each finished run has a line."""

    def two_of_four(jobs: list[suite.Job], *, ended: Callable, report: Callable, **_: object) -> None:
        ended(runner.JobResult(jobs[0], 2.0, None))
        ended(runner.JobResult(jobs[2], 1.0, "gone"))
        ended(runner.JobResult(jobs[3], 1.0, "gone"))
        report({jobs[1]: 1})

    monkeypatch.setattr(runner, "run", two_of_four)
    shown = io.StringIO()
    keys = {"scale": "cpu", "seeds": 1, "jobs": 2, "device": "cpu", "data_root": None}
    with pytest.raises(RunError, match=r"\b4 .*\b4\b"):
        command.run(
            tiny(tmp_path),
            out=tmp_path / "out [/x]",
            console=Console(file=shown, force_terminal=True, width=160),
            **keys,
        )
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    folder = re.escape(str(tmp_path / "out [/x]"))
    assert re.search(f"4 runs, 0 .*finished, 2 .*{folder}", text)
    assert f"report: {tmp_path / 'out [/x]' / 'report.html'}" in text
    assert "1/4  few fedavg seed 0: 2 s" in text
    assert re.search("2/4  absent fedavg seed 0: .*: gone", text)
    assert re.search("3/4  absent uefl seed 0: .*same", text)
    assert re.search(r"7/8 rounds .* few uefl 0\b", text)  # two rounds each of three that have ended, and one


def test_notes_are_below_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds of an arm that ended early, and a measure that no run has."""

    def by_hand(jobs: list[suite.Job], **_: object) -> None:
        for job in jobs:
            lines = sample_runs.records((job.arm,))
            sample_runs.write(
                job.folder,
                [line for line in lines if job.arm == "fedavg" or line["round"] < 3],
                seed=job.seed,
            )

    monkeypatch.setattr(runner, "run", by_hand)
    monkeypatch.setattr(report, "write", lambda *_: None)
    shown = io.StringIO()
    keys = {"scale": "cpu", "seeds": 2, "jobs": 1, "device": "cpu", "data_root": None}
    mine = tiny(tmp_path, FEW.replace('"entropy"]', '"brier"]'))
    command.run(mine, out=tmp_path / "out", console=Console(file=shown, width=160), **keys)
    below = shown.getvalue().partition("few / uefl")[2]
    assert re.search("rounds: few / uefl 3, fedavg 4.\n.*'brier'\nreport: ", below)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_refused_before_any_run(tmp_path: Path) -> None:
    found = cli("suite", tiny(tmp_path), "--out", tmp_path / "out", "--device", "cuda")
    assert found.exit_code == 2
    assert "--device cuda: " in found.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_smallest_suite_of_the_documentation_runs(tmp_path: Path) -> None:
    mine = tiny(tmp_path, EXAMPLES.split("```toml\n")[1].partition("```")[0])
    found = cli("suite", mine, "--seeds", 1, "--device", "cpu", "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    measured = json.loads((tmp_path / "out" / "results.json").read_text())["cases"]["digits"]
    assert all(measured[arm][of]["0"] > 0 for arm in ("fedavg", "fedprox") for of in ("accuracy", "entropy"))


@pytest.mark.slow
def test_runs_go_side_by_side_and_are_not_run_twice(tmp_path: Path) -> None:
    options = ("--seeds", 1, "--out", tmp_path / "out", "--device", "cpu", "--data-root", tmp_path)
    command = ("suite", tiny(tmp_path), *options)
    first = cli(*command)
    assert first.exit_code == 1, first.output  # there is no CIFAR-100 in that folder
    assert "error: 2 of 4 runs" in first.output
    text = (tmp_path / "out" / "report.md").read_text()
    assert "2 runs of absent: " in text
    assert "cifar100" in text
    pictures = {path.name.removesuffix(".png") for path in (tmp_path / "out" / "plots").iterdir()}
    assert pictures >= {"curves", "sweep", "entropy-few-uefl", "usage-few-uefl", "features-few-uefl"}
    assert "features-few-fedavg" not in pictures
    _shows_features_and_codewords(tmp_path / "out" / "few" / "uefl" / "seed-0")
    before = (tmp_path / "out" / "few" / "uefl" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns
    again = cli(*command)
    assert re.search("4 runs, 2 .*finished", again.output)
    assert (tmp_path / "out" / "few" / "uefl" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns == before


def _shows_features_and_codewords(run: Path) -> None:
    """Check that there is a panel for each client, with tokens and codewords.

    A panel has nine tokens of each of the client's ten test images, the four shared codewords, and the
    client's own codewords.
    """
    panels = features.draw(run, None).axes
    codebooks = [tensors["codebook"] for tensors in load(run).model("uefl").members[0][1].values()]
    assert [ax.get_title() for ax in panels] == [
        f"silo-{i}, {len(codebook)} codewords" for i, codebook in enumerate(codebooks)
    ]
    for ax, codebook in zip(panels, codebooks, strict=True):
        assert [len(points.get_offsets()) for points in ax.collections] == [90, 4, len(codebook) - 4]


def test_extensions_of_every_segment_are_drawn_separately() -> None:
    """Draw two codebooks of four codewords, with equal extensions, and ten tokens of two segments."""
    rng = np.random.default_rng(0)
    found = {name: rng.normal(size=(10, 1, 1, 6)) for name in ("silo-0", "silo-1")}
    for ax in features.panels(found, dict.fromkeys(found, rng.normal(size=(2, 8, 3))), 4).axes:
        assert ax.get_title().endswith(", 16 codewords")
        assert [len(points.get_offsets()) for points in ax.collections] == [20, 8, 8]


def test_residual_codewords_are_drawn_from_the_mean() -> None:
    """An added codeword of zero lies in the middle of features around (9, 9)."""
    found = {"silo-0": 9 + np.random.default_rng(0).normal(size=(400, 1, 1, 2))}
    codebook = {"silo-0": np.array([[9.0, 9.0], [0.0, 0.0]])}
    for residual, distance in ((True, 0.0), (False, 9 * 2**0.5)):
        added = features.panels(found, codebook, 1, residual=residual).axes[0].collections[2].get_offsets()
        assert float(np.linalg.norm(added)) == pytest.approx(distance, abs=0.3)


def test_the_server_of_forks_ignores_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the first seconds of a suite would otherwise print the traceback of its imports."""
    before, seen = signal.getsignal(signal.SIGINT), []
    monkeypatch.setattr(
        "multiprocessing.forkserver.ensure_running", lambda: seen.append(signal.getsignal(signal.SIGINT))
    )
    runner.run([], side_by_side=1, device="cpu", data_root=None, ended=print, report=print)
    assert seen == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_runs_end_with_a_suite_that_is_killed(tmp_path: Path) -> None:
    options = ("--seeds", "1", "--jobs", "1", "--out", tmp_path / "out", "--device", "cpu")
    command = (sys.executable, "-m", "uefl", "suite", tiny(tmp_path), *options)
    suite_process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{suite_process.pid}/task/{suite_process.pid}/children")
    end = time.monotonic() + 120
    while not (found := children.read_text().split()) and time.monotonic() < end:
        time.sleep(0.05)
    suite_process.kill()
    suite_process.wait()
    while (
        Path(f"/proc/{found[0]}/cmdline").exists()
        and Path(f"/proc/{found[0]}/cmdline").read_bytes()
        and time.monotonic() < end
    ):
        time.sleep(0.05)
    assert time.monotonic() < end, "the run went on"


@pytest.mark.slow
def test_stopped_run_is_resumed(tmp_path: Path) -> None:
    """A suite finishes a run that stops before its last measurement with the same bits."""
    mine = tiny(tmp_path, FEW)
    first = suite.jobs(suite.load(mine), "cpu", 1, tmp_path / "stopped", threads=1)[0]
    with pytest.raises(KeyboardInterrupt):
        train(first.config, first.folder, Killer((first.arm, 2, "silo-1")), pages=False)
    assert not (first.folder / "summary.json").exists()
    for name in ("stopped", "whole"):
        accepted("suite", mine, "--seeds", "1", "--out", tmp_path / name, "--device", "cpu")
    assert re.search("fedavg .*round 2/2", first.folder.with_suffix(".log").read_text())
    (of_stopped, *stopped), (of_whole, *whole) = (
        outcome(tmp_path / name / "few" / first.arm / "seed-0") for name in ("stopped", "whole")
    )
    assert stopped == whole
    assert of_stopped["arms"] == of_whole["arms"]


def test_special_and_damaged_files_in_the_folder_of_a_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe is not waited for, and a damaged cost is measured again."""
    job, *_ = suite.jobs(suite.load(tiny(tmp_path)), "cpu", 1, tmp_path / "out", threads=1)
    job.folder.mkdir(parents=True)
    os.mkfifo(tmp_path / "out" / "results.json")
    runner.check_own(tmp_path / "out", "tiny", [job])
    os.mkfifo(job.folder.with_suffix(".log"))
    monkeypatch.setattr(runner, "_start_server", lambda: None)
    keys = {"side_by_side": 1, "device": "cpu", "data_root": None, "ended": print, "report": print}
    with pytest.raises(UserError, match=r"seed-0\.log .*\bpipe"):
        runner.run([job], **keys)
    os.mkfifo(tmp_path / "out" / "config.toml")
    with pytest.raises(UserError, match=r"out/config\.toml .*\bpipe"):
        runner.check_own(tmp_path / "out", "tiny", [job])
    for name, check in (
        ("config.toml", runner.check_configurations),
        ("summary.json", partial(runner.run, **keys)),
    ):
        os.mkfifo(job.folder / name)
        with pytest.raises(UserError, match=rf"{name} .*\bpipe"):
            check([job])
        (job.folder / name).unlink()
    (job.folder / "cost.json").write_text('{"parameters_')
    assert cost.read(job.folder) == {}
    (job.folder / "cost.json").unlink()
    os.mkfifo(job.folder / "cost.json")
    with pytest.raises(UserError, match=r"cost\.json .*\bpipe"):
        cost.read(job.folder)


def test_a_full_disk_is_the_reason_of_a_run(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from uefl.suites import worker
def full(*_, **keys):
    raise OSError(28, "full", str(keys["out"] / "checkpoint.new"))
worker.run.train, worker.from_toml = full, str
worker.work("", Path(sys.argv[1]), "cpu", None, Path(sys.argv[1] + ".log"))
"""
    assert fresh.python(code, str(tmp_path / "run")).returncode == 1
    (line,) = (tmp_path / "run.log").read_text().splitlines()
    assert re.search(r"28.*/run/checkpoint\.new", line)


def test_the_cost_of_a_model_covers_the_cpu_and_any_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count covers the network and one client's codebook."""
    job = suite.jobs(suite.load(tiny(tmp_path, FEW)), "cpu", 1, tmp_path / "out", threads=1)[1]
    train(job.config, job.folder, Killer(), pages=False)
    monkeypatch.setattr(cost, "_REPEATS", 2)
    went: list[str] = []
    timed: list[SavedModel] = []
    there = load(job.folder).model("uefl")
    monkeypatch.setattr(SavedModel, "to", lambda model, device: went.append(device) or there)
    monkeypatch.setattr(
        cost,
        "milliseconds",
        lambda model, client, of=cost.milliseconds: timed.append(model) or of(model, client),
    )
    (job.folder / "cost.json").write_text('{"milliseconds": 1}')  # of a version that measured less
    cost.measure(job.folder, gpu=False)
    assert set(cost.read(job.folder)) == set(cost.MEASURES) - {cost.ON_GPU}
    for _ in range(2):  # a machine with a GPU replaces the file of one without
        cost.measure(job.folder, gpu=True)
    found = cost.read(job.folder)
    assert set(found) == set(cost.MEASURES)
    assert (went, len(timed), timed[-1] is there) == (["cuda"], 3, True)
    assert min(found["milliseconds"], found["milliseconds_gpu"], found["kmeans_milliseconds"]) > 0
    net, own = load(job.folder).model("uefl").members[0]
    assert 1e6 * found["parameters_millions"] == pytest.approx(
        sum(p.numel() for p in net.parameters()) + own["silo-0"]["codebook"].numel()
    )
