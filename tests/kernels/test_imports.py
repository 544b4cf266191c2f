"""The import graph of ``uefl_kernels``: no circle, nothing of the federated layer, definitions for the
registration alone."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import uefl_kernels
from tests.import_graph import imported, module_name

ROOT = Path(uefl_kernels.__file__).parent


MODULES = {module_name(path, ROOT): path for path in ROOT.rglob("*.py")}
GRAPH = {name: imported(path, name, set(MODULES)) - {name} for name, path in MODULES.items()}


def test_there_is_no_circle():
    assert len(GRAPH) > 50
    # raises CycleError, which names it
    TopologicalSorter({name: targets & set(MODULES) for name, targets in GRAPH.items()}).prepare()


def test_the_kernels_import_nothing_of_the_federated_layer():
    assert {
        name for name, targets in GRAPH.items() if any(target.split(".")[0] == "uefl" for target in targets)
    } == set()


def test_what_runs_on_a_gpu_imports_no_definition_of_a_composed_op():
    """``reference.py`` defines; ``composed.py`` runs."""
    composed = {name.removesuffix(".composed") for name in MODULES if name.endswith(".composed")}
    assert "uefl_kernels.ops.vq" in composed
    definitions = {f"{op}.reference" for op in composed}
    allowed = {*composed, *definitions}  # where ops are registered, and definitions that are made of others
    assert {
        name: targets & definitions
        for name, targets in GRAPH.items()
        if targets & definitions and name not in allowed
    } == {}
