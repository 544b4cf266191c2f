"""The benchmark registry is complete and runs; its own timings are taken by ``python -m benchmarks.run``."""

import csv
import pkgutil
import re
import sys

import pytest
import torch

import uefl_kernels.ops
from benchmarks import run
from benchmarks.ops import REGISTRY


def test_every_op_is_measured():
    measured = set(REGISTRY).union(*(op.covers for op in REGISTRY.values()))
    assert {module.name for module in pkgutil.iter_modules(uefl_kernels.ops.__path__)} <= measured


@pytest.mark.parametrize("name", REGISTRY)
def test_row(name):
    op = REGISTRY[name]
    assert next(iter(op.providers)) == "uefl"
    assert set(op.loose) <= set(op.providers)
    assert len({case.name for case in op.cases}) == len(op.cases)
    for case in (op.smoke, *op.cases):
        assert op.flops(case) > 0
        assert op.bytes(case) > 0


@pytest.mark.parametrize("name", REGISTRY)
def test_benchmark(name, benchmark):
    op = REGISTRY[name]
    inputs = op.inputs(op.smoke, "cpu")
    found = benchmark.pedantic(op.providers["uefl"](inputs), rounds=3)
    assert op.gate.against(inputs)(found) <= op.gate.limit


def test_case_is_named_by_what_is_not_default():
    assert [case.name for case in REGISTRY["vq_assign"].cases[-2:]] == ["1000000x16x256", "4096x128x128x4"]


def test_smoke_run_saves_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    assert run.main(["--smoke", "--peers", "cdist+argmin,eager", "--save"]) == 0
    (saved,) = tmp_path.glob("*.csv")
    rows = list(csv.DictReader(saved.open()))
    assert {(row["op"], row["provider"]) for row in rows} >= {("vq_assign", "uefl"), ("vq_assign", "cdist+argmin"), ("vq", "eager")}
    assert {row["error"] for row in rows if row["provider"] == "uefl"} == {"0"}
    assert all(float(row["median_ms"]) > 0 for row in rows)
    assert "cdist+argmin" in capsys.readouterr().out


def test_wrong_answer_of_ours_fails_the_run(monkeypatch, capsys):
    op = REGISTRY["vq_assign"]
    monkeypatch.setitem(op.providers, "uefl", lambda inputs: lambda: torch.zeros(len(inputs[0]), op.smoke.segments, dtype=torch.int64))
    assert run.main(["--smoke", "--op", "vq_assign"]) == 1
    assert "WRONG: vq_assign" in capsys.readouterr().out


def test_peer_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert run.main(["--smoke", "--op", "vq_assign", "--peers", "faiss"]) == 0
    assert re.search(r"^skipped: faiss \(.*faiss.*\)$", capsys.readouterr().out, re.M)


def test_unknown_peer_is_an_error(capsys):
    with pytest.raises(SystemExit):
        run.main(["--smoke", "--peers", "eager,fais"])
    error = capsys.readouterr().err
    assert "no peer 'fais'; there are uefl, " in error
    assert "faiss" in error


def test_unknown_shape_is_an_error(capsys):
    with pytest.raises(SystemExit):
        run.main(["--shape", "1x2x3"])
    assert "9216x512x64" in capsys.readouterr().err
