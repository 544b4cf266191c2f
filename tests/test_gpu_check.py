"""The tests run the check of the kernels for GPU machines on a machine without a GPU.

The tests cover limits, summaries, and remaining files.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_model, gpu_profile, gpu_replay, gpu_smoke
from benchmarks.cases import case_of
from benchmarks.ops import REGISTRY

SCRIPT = Path(gpu_smoke.__file__).with_name("gpu_check.sh")
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *sys.executable*) echo "$0" ;;
  *gpu_smoke*triton*) exit 1 ;;
  *gpu_smoke*) echo first case; sleep 60 ;;
  *gpu_profile*) echo a table ;;
  *wgmma\\ or*) trap '' INT; echo hanging; sleep 60; sleep 60 ;;
  *pytest*) echo "$UEFL_CUDA_SEARCH." ;;
esac
"""


@pytest.fixture
def check(tmp_path):
    """Return a function that runs the script with a replacement for Python and limits of one second.

    The function returns the process, the summary and the folder.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "python": PYTHON,
        "timeout": f'#!/bin/sh\nshift 5\nexec {shutil.which("timeout")} -s INT -k 1 1 "$@"\n',
        "ncu": "#!/bin/sh\necho counters\n",
        "compute-sanitizer": "#!/bin/sh\n",
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    def run(*stages, **variables):
        out = tmp_path / "out"
        given = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": str(folder / "python"), "OUT": str(out)}
        done = subprocess.run(
            ["bash", SCRIPT, *stages], env=os.environ | given | variables, capture_output=True, text=True
        )
        summary = (out / "summary.txt").read_text() if out.exists() else ""
        return done, [(line.split()[0], line.split()[3]) for line in summary.splitlines()], out

    return run


def test_step_at_its_limit_keeps_results_and_stops_no_other(check):
    done, summary, out = check("smoke")
    assert done.returncode == 1
    assert summary == [
        ("timeout", "smoke"),
        ("ok", "profile"),
        ("ok", "ncu"),
        ("ok", "ncu-source"),
        ("FAILED", "smoke-triton"),
    ]
    assert (out / "smoke.log").read_text() == "first case\n"
    assert "a table" in done.stdout
    assert done.stdout.endswith("not ok: smoke smoke-triton\n")


def test_step_that_ignores_the_interrupt_is_killed(check):
    _, summary, out = check("tests")
    assert dict(map(reversed, summary)) == {
        "tests-streamed": "ok",
        "tests-mma": "ok",
        "tests-wgmma": "timeout",
        "memcheck": "timeout",
        "racecheck": "timeout",
        "tests-federated": "ok",
        "tests-triton": "ok",
    }
    assert (out / "tests-wgmma.log").read_text() == "hanging\n"
    assert (out / "tests-mma.log").read_text() == "mma.\n"


def test_no_stage_starts_after_the_time_limit(check):
    _, summary, _ = check("bench", LIMIT="15")
    assert len(summary) > 5
    assert {status for status, _ in summary} == {"skipped"}


def test_unknown_stage_is_refused(check):
    done, summary, _ = check("smoke", "sanitize")
    assert done.returncode == 2
    assert re.search(r"'sanitize'.*\bsmoke, tests, bench .*\bcall1 to call7", done.stdout)
    assert summary == []


def test_script_covers_all_ops():
    named = [
        word
        for line in SCRIPT.read_text().splitlines()
        if " --op " in line
        for word in line.split(" --op ")[1].split()[0].split(",")
    ]
    assert {name for name in named if name.isidentifier()} == set(REGISTRY)


def test_every_quantity_of_the_model_has_a_counter():
    (pattern,) = re.findall(r'-k "regex:(.*?)"', SCRIPT.read_text())
    (profiled,) = re.findall(r"^counted='(.*?)'", SCRIPT.read_text(), re.M)
    looked_at = [target for target in gpu_profile.TARGETS if re.search(profiled, target.name)]
    assert {target.op for target in looked_at} == {"vq", "vq_assign", "mc_dropout_mlp"}
    for target in looked_at:
        case = case_of(type(REGISTRY[target.op].smoke), target.shape)
        names = {kernel.name for kernel in gpu_model.kernels(target.op, case, "90a", gpu_model.COUNTS)} - {
            gpu_model.PRODUCT,
            gpu_model.OPEN,  # the second phase, which is part of the search
        }
        assert [name for name in names if not re.search(pattern, name)] == []


@pytest.mark.parametrize(
    "name",
    [name for name in gpu_smoke.CHECKS if not name.startswith("vq")] + ["vq gradient", "vq_assign one row"],
)
def test_small_case(name):
    gpu_smoke.CHECKS[name].run("cpu")


@pytest.mark.slow
def test_a_small_case_names_its_failure(tmp_path, capsys):
    arguments = [
        "--device",
        "cpu",
        "--paths",
        "cpu,mma",
        "--only",
        "one row",
        "--limit",
        "120",
        "--out",
        str(tmp_path),
    ]
    assert gpu_smoke.main(arguments) == 1
    good, bad, summary = sorted(
        capsys.readouterr().out.splitlines(), key=lambda line: ("ok", "FAILED", "of").index(line.split()[0])
    )
    assert good.endswith(" cpu      vq_assign one row")
    assert re.search("mma      vq_assign one row  RuntimeError: backend 'cuda' .*cpu", bad)
    assert summary.startswith("of 2: 1 ok, 1 FAILED, 0 timeout, 0 stopped; ")
    assert [path.name for path in tmp_path.iterdir()] == ["mma-vq_assign-one-row.log"]


def test_a_hanging_case_ends_with_its_processes(tmp_path, monkeypatch, capsys):
    sleeper = tmp_path / "python"
    sleeper.write_text('#!/bin/sh\n[ "$1" = -c ] && exit\necho begun\nsleep 60 & wait\n')
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    assert (
        gpu_smoke.main(
            ["--device", "cpu", "--only", "one row", "--limit", "0.5", "--out", str(tmp_path / "out")]
        )
        == 1
    )
    assert "of 1: 0 ok, 0 FAILED, 1 timeout, 0 stopped; " in capsys.readouterr().out
    assert (tmp_path / "out" / "cpu-vq_assign-one-row.log").read_text() == "begun\n"


def test_a_wrong_result_is_reported():
    answers = iter((torch.zeros(3), torch.ones(3)))
    with pytest.raises(AssertionError, match="result 0: "):
        gpu_smoke.SmokeCheck(lambda x: next(answers), (torch.zeros(1),)).run("cpu")


def test_targets_are_measured_by_the_benchmark_too():
    for target in gpu_profile.TARGETS:
        op = REGISTRY[target.op]
        assert case_of(type(op.smoke), target.shape) in op.cases_on("cuda")


def test_profile(tmp_path, capsys):
    assert gpu_profile.main(["--device", "cpu", "--only", "^kmeans_", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "profile.json").read_text())
    assert [row["target"] for row in found["targets"]] == [
        "kmeans_step 1048576x64x256",
        "kmeans_lloyd 1048576x64x256",
    ]
    assert all(row["events_us"] > 0 and row["kernels"] for row in found["targets"])
    assert set(found["limits"]) == {"copy", "bfloat16"}
    assert "kmeans_lloyd 1048576x64x256" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (
            (
                "void (anonymous namespace)::search_wgmma<float>(float const*, uefl::Shape, (anonymous"
                " namespace)::Stages, bool)"
            ),
            "search_wgmma<float>",
        ),
        ("void uefl::cuda::head<2, 4>(uefl::cuda::Problem)", "head<2, 4>"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("_search", "_search"),
    ],
)
def test_names_of_kernels_are_shown_without_their_arguments(name, shown):
    assert gpu_profile.short(name) == shown


def test_replay_measures_every_shape_and_fails_at_a_wrong_index(tmp_path, capsys, monkeypatch):
    arguments = [
        "--device=cpu",
        "--shapes=40x8x16,30x32x16xfloat16",
        "--check",
        f"--out={tmp_path / 'times.json'}",
    ]
    assert gpu_replay.main(arguments) == 0
    rows = json.loads((tmp_path / "times.json").read_text())
    assert {shape: row["wrong"] for shape, row in rows.items()} == {"40x8x16": 0, "30x32x16xfloat16": 0}
    assert all(row[name] > 0 for row in rows.values() for name in ("exact", "fast", "vq"))
    assert "30x32x16xfloat16" in capsys.readouterr().out
    monkeypatch.setattr(gpu_replay, "wrong", lambda x, codebook: 3)
    assert gpu_replay.main(arguments) == 1
    assert all(case_of(gpu_replay.SearchCase, shape) for shape in gpu_replay.SHAPES)
