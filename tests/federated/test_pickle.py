"""Nothing in the packages unpickles: messages and files of strangers are data and never programs."""

import ast
from pathlib import Path

import pytest

import uefl
import uefl_kernels

FILES = [path for package in (uefl, uefl_kernels) for path in Path(package.__file__).parent.rglob("*.py")]
MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {"torch.load", "torch.save", "pandas.read_pickle"}


def unpickles(source: str) -> list[str]:
    """Return the calls in a source file that could unpickle.

    ``np.load`` must forbid it, and ``torch.load`` must create only tensors.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif (
            isinstance(node, ast.ImportFrom)
            and node.level == 0
            and (node.module or "").split(".")[0] in MODULES
        ):
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name, keys = ast.unparse(node.func), {key.arg: ast.unparse(key.value) for key in node.keywords}
            tensors_alone = name == "torch.load" and keys.get("weights_only") == "True"
            if (name in CALLS and not tensors_alone) or keys.get("allow_pickle") == "True":
                found.append(ast.unparse(node))
            if name in ("np.load", "numpy.load") and keys.get("allow_pickle") != "False":
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import torch\ntorch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_reader_finds_it(source):
    assert unpickles(source)


def test_nothing_in_the_packages_does():
    assert len(FILES) > 150
    assert {str(path): found for path in FILES if (found := unpickles(path.read_text()))} == {}
