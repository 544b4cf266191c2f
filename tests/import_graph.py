"""Read the import graph of a package from its sources."""

from __future__ import annotations

import ast
from pathlib import Path


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of a file below the package folder ``root``."""
    pieces = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(pieces[:-1] if pieces[-1] == "__init__" else pieces)


def imported(path: Path, name: str, modules: set[str]) -> set[str]:
    """Return the names that a module imports, also inside of functions, without imports for types only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    hidden = {id(inner) for node in typing for inner in ast.walk(node)}
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            pieces = package.split(".")
            base = ".".join(pieces[: len(pieces) - node.level + 1]) if node.level else ""
            module = ".".join(piece for piece in (base, node.module) if piece)
            inner = {f"{module}.{alias.name}" for alias in node.names}
            found |= {one if one in modules else module for one in inner}
    return found
