"""The import graph of ``uefl_kernels``: no circle, nothing of the federated layer, definitions for the registration alone."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import uefl_kernels

ROOT = Path(uefl_kernels.__file__).parent


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in ROOT.rglob("*.py")}


def _imports(name: str) -> set[str]:
    """Modules that a module imports, also inside of functions, but not for its types alone."""
    path = MODULES[name]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    hidden = {id(inner) for node in typing for inner in ast.walk(node)}
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            inner = {f"{module}.{alias.name}" for alias in node.names}
            found |= {one if one in MODULES else module for one in inner}
    return found - {name}


GRAPH = {name: _imports(name) for name in MODULES}


def test_there_is_no_circle():
    assert len(GRAPH) > 50
    TopologicalSorter({name: targets & set(MODULES) for name, targets in GRAPH.items()}).prepare()  # raises CycleError, which names it


def test_the_kernels_import_nothing_of_the_federated_layer():
    assert {name for name, targets in GRAPH.items() if any(target.split(".")[0] == "uefl" for target in targets)} == set()


def test_what_runs_on_a_gpu_imports_no_definition_of_a_composed_op():
    """``reference.py`` defines; ``composed.py`` runs."""
    composed = {name.removesuffix(".composed") for name in MODULES if name.endswith(".composed")}
    assert "uefl_kernels.ops.vq" in composed
    definitions = {f"{op}.reference" for op in composed}
    allowed = {*composed, *definitions}  # where ops are registered, and definitions that are made of others
    assert {name: targets & definitions for name, targets in GRAPH.items() if targets & definitions and name not in allowed} == {}
