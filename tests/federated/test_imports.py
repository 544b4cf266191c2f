"""The import graph of the package: no circle, and few files that many lean on."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import uefl

ROOT = Path(uefl.__file__).parent


def imports() -> dict[str, set[str]]:
    """For every module the modules of the package that it imports, also inside of functions, but not for its types alone."""
    modules = {_name(path): path for path in ROOT.rglob("*.py")}
    return {name: {target for target in _targets(path, name, set(modules)) if target != name} for name, path in modules.items()}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _targets(path: Path, name: str, modules: set[str]) -> set[str]:
    tree = ast.parse(path.read_text())
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
            found |= {one if one in modules else module for one in inner}
    return found & modules


def test_there_is_no_circle():
    graph = imports()
    assert len(graph) > 80
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, [*trail, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])


def test_engines_and_algorithms_know_little():
    graph = imports()
    for name, targets in graph.items():
        if name.startswith("uefl.engines"):
            assert all(target.startswith("uefl.engines") for target in targets), name
        if name.startswith("uefl.algorithms"):
            assert not any(target.startswith(("uefl.engines.local", "uefl.run", "uefl.config", "uefl.report")) for target in targets), name
        if name.startswith(("uefl.server", "uefl.client")):
            assert not any(target.startswith("uefl.algorithms") and target != "uefl.algorithms.base" for target in targets), name


def test_no_file_is_leant_on_from_everywhere_but_types_and_errors():
    """Modules that more than an eighth of the package imports, its own folder apart: the data of messages and clients, and the errors."""
    graph = imports()
    leaning = Counter(target for name, targets in graph.items() for target in targets if name.split(".")[1:2] != target.split(".")[1:2])
    common = {name for name, count in leaning.items() if count > len(graph) / 8}
    assert common == {"uefl.errors", "uefl.engines.base", "uefl.data.federation"}
    assert all(graph[name] == set() for name in common)
