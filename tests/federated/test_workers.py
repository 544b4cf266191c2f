"""Whole runs over workers, as a user starts them, have the numbers of one process.

This also holds after one of the processes was killed.
"""

import os
import re
import signal

import pytest
from typer.testing import CliRunner

from tests.federated.deploy.chaos.cluster import UEFL, measured, until
from tests.federated.deploy.runs import children, config, end, gone, start, uefl
from uefl.cli import app

WORKERS = ("--engine", "distributed", "--workers", 2, "--device", "cpu")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("who", ["worker", "server"])
def test_a_killed_process_ends_the_run_and_it_can_resume(tmp_path, who):
    cfg = config(tmp_path, f"{UEFL}[arms.fedavg]\n[arms.fedper]\n")
    assert uefl("train", cfg, "--out", "local", "--device", "cpu", cwd=tmp_path)[0] == 0
    run = start("train", cfg, *WORKERS, "--out", "run", cwd=tmp_path)
    until("a round", lambda: measured(tmp_path / "run"))
    begun = children(run.pid)
    assert len(begun) == 2
    os.kill(min(begun) if who == "worker" else run.pid, signal.SIGKILL)
    code, _, err = end(run, 60)
    assert gone(list(begun))
    if who == "worker":
        assert code == 1
        command = "uefl train --resume run --engine distributed --workers 2"
        assert re.search(f"error: worker-1 .*SIGKILL; .*: {command}", err)
    code, _, err = uefl("train", "--resume", "run", *WORKERS, cwd=tmp_path)
    assert code == 0, err
    for name in (
        "metrics.jsonl",
        "manifest.json",
        "config.toml",
        *(path.name for path in tmp_path.glob("local/model-*")),
    ):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "local" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--workers", "2"), "--workers"),
        (("--engine", "distributed", "--silos", "2"), "--engine flower"),
        (("--engine", "distributed", "--set", "clients=9000"), "clients"),
    ],
)
def test_incompatible_options_are_one_line(arguments, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", "demo", *arguments])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert line in result.stderr
    assert list(tmp_path.iterdir()) == []
