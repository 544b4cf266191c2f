"""The import graph of ``uefl_kernels``, and the files of an op."""

from __future__ import annotations

import json
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import uefl_kernels
from tests.fresh import python
from tests.import_graph import imported, module_name

ROOT = Path(uefl_kernels.__file__).parent
REPOSITORY = ROOT.parent
MODULES = {module_name(path, ROOT): path for path in ROOT.rglob("*.py")}
GRAPH = {name: imported(path, name, set(MODULES)) - {name} for name, path in MODULES.items()}
OPS = sorted(path.parent.name for path in (ROOT / "ops").glob("*/__init__.py"))


def test_there_is_no_circle():
    assert len(GRAPH) > 50
    # prepare() raises CycleError, which names the circle
    TopologicalSorter({name: targets & set(MODULES) for name, targets in GRAPH.items()}).prepare()


def test_kernels_do_not_import_the_federated_layer():
    assert {
        name for name, targets in GRAPH.items() if any(target.split(".")[0] == "uefl" for target in targets)
    } == set()


def test_only_references_import_references():
    definitions = {name for name in MODULES if name.endswith(".reference")}
    assert len(definitions) == len(OPS) + 1  # one more, because vq has a private op
    assert {
        name: targets & definitions
        for name, targets in GRAPH.items()
        if targets & definitions and name not in definitions
    } == {}


CALLS = """
import json, sys, torch, uefl_kernels
from uefl_kernels import KMeans
x, codebook = torch.randn(40, 6, requires_grad=True), torch.randn(5, 3, requires_grad=True)
uefl_kernels.vq_with_sums(x, codebook)[0].loss.backward()
uefl_kernels.kmeans_step(x, x[:3])
model = KMeans(3, random_state=0).fit(x.detach())
model.predict(x.detach()), model.transform(x.detach())
uefl_kernels.mc_dropout_mlp(x, [torch.randn(4, 6), torch.randn(3, 4)], p=0.5).entropy.sum().backward()
matrix = torch.randn(4, 6)
targets = torch.zeros(40, dtype=torch.int64)
uefl_kernels.transition_nll(x, targets, matrix).sum().backward()
uefl_kernels.transition_double_softmax(x, targets, matrix).sum().backward()
sizes = torch.tensor([0, 10, 40])
uefl_kernels.set_proportion_loss(x, sizes, torch.full((2, 6), 1 / 6)).sum().backward()
print(json.dumps([name for name in sys.modules if name.startswith("uefl") and name.endswith("reference")]))
"""


@pytest.mark.skipif(not uefl_kernels.COMPILED, reason="without kernels an op may run on its reference")
def test_no_call_imports_a_reference():
    done = python(CALLS)
    assert json.loads(done.stdout or "null") == [], done.stderr


def files_of(op):
    """Return the files named after an op, over all folders, and the files of its package."""
    listed = subprocess.run(
        ["git", "ls-files", "csrc", "tests", f"uefl_kernels/ops/{op}"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    ).stdout.splitlines()
    return [
        name
        for name in listed
        if name.startswith("uefl_kernels/") or Path(name).name.removeprefix("test_").split(".")[0] == op
    ]


def test_an_op_has_at_most_12_files():
    counts = {op: len(files_of(op)) for op in OPS}
    # kmeans has files for seeding, blocks, sparse rows and launches of kmeans_step. vq_assign has a search
    # for each of six kinds of hardware. vq has a private op.
    pieces = {"kmeans": 16, "vq_assign": 15, "vq": 13}
    assert all(2 <= count <= pieces.get(op, 12) for op, count in counts.items()), counts


def test_importing_the_kernels_imports_little_more_than_torch():
    code = """
import sys, torch
before = set(sys.modules)
import uefl_kernels
uefl_kernels.vq, uefl_kernels.nn, uefl_kernels.metrics
print(*sorted(set(sys.modules) - before), sep="\\n")
"""
    done = python(code)
    added = [name for name in done.stdout.splitlines() if not name.startswith("uefl_kernels")]
    packages = {"sklearn", "scipy", "triton", "onnx", "onnxscript", "pandas", "torchvision", "pydantic"}
    assert not packages & {name.split(".")[0] for name in added}, done.stderr
    assert not any(name.startswith(("torch.onnx._internal", "torch._inductor")) for name in added), added
    assert len(added) < 20, added
