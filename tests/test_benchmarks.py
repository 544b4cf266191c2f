"""The benchmark registry is complete and runs; its own timings are taken by ``python -m benchmarks.run``."""

import csv
import pkgutil
import re
import sys

import pytest
import torch

import uefl_kernels.ops
from benchmarks import run
from benchmarks.registry import REGISTRY, SMOKE, float64_indices
from uefl_kernels._library import has_kernel


def test_every_op_is_measured():
    assert set(REGISTRY) == {module.name for module in pkgutil.iter_modules(uefl_kernels.ops.__path__)}


@pytest.mark.parametrize("name", REGISTRY)
def test_row(name):
    op = REGISTRY[name]
    assert has_kernel("uefl_reference", name, "CompositeExplicitAutograd")
    assert next(iter(op.providers)) == "uefl"
    for shape in op.shapes:
        assert shape.dim % shape.segments == 0
        assert op.flops(shape) == 2 * shape.n * shape.dim * shape.k
        assert op.bytes(shape) > 4 * shape.n * shape.dim


@pytest.mark.parametrize("name", REGISTRY)
def test_benchmark(name, benchmark):
    op = REGISTRY[name]
    x, codebook = op.inputs(SMOKE, "cpu")
    found = benchmark.pedantic(op.providers["uefl"](x, codebook), rounds=3)
    assert torch.equal(found, float64_indices(x, codebook))


def test_smoke_run_saves_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    assert run.main(["--smoke", "--peers", "cdist+argmin,eager", "--save"]) == 0
    (saved,) = tmp_path.glob("*.csv")
    rows = list(csv.DictReader(saved.open()))
    assert {(row["op"], row["provider"]) for row in rows} >= {("vq_assign", "uefl"), ("vq_assign", "cdist+argmin"), ("vq", "eager")}
    assert {row["wrong_rate"] for row in rows if row["provider"] == "uefl"} == {"0"}
    assert all(float(row["median_ms"]) > 0 for row in rows)
    assert "cdist+argmin" in capsys.readouterr().out


def test_wrong_answer_of_ours_fails_the_run(monkeypatch, capsys):
    op = REGISTRY["vq_assign"]
    monkeypatch.setitem(op.providers, "uefl", lambda x, codebook: lambda: torch.zeros(len(x), SMOKE.segments, dtype=torch.int64))
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
