"""The examples run and print their results, each in well under a minute."""

import importlib.util
import itertools
import json
import runpy
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

mpl.use("agg")
EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()


SCRIPTS = {
    "train_uefl": (["1", "1"], ["fedavg", "uefl"]),
    "train_fedul": (["1"], ["fedul", "fedul-m1", "supervised"]),
    "train_table": (["2", "1"], ["fedavg", "uefl"]),
    "train_tokens": (["2", "1"], ["fedavg", "uefl"]),
}
"""training scripts: their rounds and arms"""


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_training_scripts(name, tmp_path, monkeypatch, capsys):
    rounds, arms = SCRIPTS[name]
    out = tmp_path / "run"
    monkeypatch.setattr("sys.argv", [name, "--rounds", *rounds, "--device", "cpu", "--out", str(out)])
    run(name)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(arms)]] == arms
    assert (out / "report.html").is_file()


@pytest.mark.slow
def test_vq_autoencoder():
    result = run("vq_autoencoder")
    assert result["error"] < 0.3 * result["mean image's error"]
    assert result["codewords in use"] > 0.9


@pytest.mark.slow
def test_residual_vq():
    errors = run("residual_vq")
    assert all(later < 0.9 * earlier for earlier, later in itertools.pairwise(errors))


@pytest.mark.slow
def test_swap_from_vector_quantize_pytorch(capsys):
    difference = run("swap_from_vector_quantize_pytorch")
    if importlib.util.find_spec("vector_quantize_pytorch"):
        assert difference < 1e-6
    else:
        assert "not installed" in capsys.readouterr().out


@pytest.mark.slow
def test_federated(tmp_path, monkeypatch):
    """Run the notebook cell by cell, as in a new kernel."""
    cells = [
        cell
        for cell in json.loads((EXAMPLES / "federated.ipynb").read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    assert all(cell["outputs"] == [] for cell in cells)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", plt.close)
    names = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    run, own = names["run"], names["own"]
    assert set(own.summary) == {"fedavg", "near", "nearer"}
    assert own.metrics.client.unique().tolist() == ["clinic-a", "clinic-b", "clinic-c"]
    assert len({outcome["accuracy"] for outcome in own.summary.values()}) > 1
    assert names["curves"].columns.tolist() == ["fedavg", "uefl"]
    assert names["probabilities"].shape == (60, 10)
    for folder in (run.path, own.path):
        assert (folder / "report.html").exists()


def test_every_example_is_run():
    names = {path.stem for pattern in ("*.py", "*.ipynb") for path in EXAMPLES.glob(pattern)}
    assert names == SCRIPTS.keys() | {
        name.removeprefix("test_") for name in globals() if name.removeprefix("test_") in names
    }
