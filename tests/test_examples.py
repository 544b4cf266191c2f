"""The examples run and show what they say; each takes well under a minute."""

import importlib.util
import itertools
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()


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
        assert "not installed: nothing to compare with" in capsys.readouterr().out


def test_every_example_is_run():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {name.removeprefix("test_") for name in globals() if name.removeprefix("test_") in names}
