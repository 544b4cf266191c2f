"""Docstrings of the federated layer: public functions list their errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import uefl

ROOT = Path(uefl.__file__).parent
ERRORS = {"UserError", "RunError", "InvalidPriors", "ValueError", "TypeError", "OSError"}
COMMANDS = {"cli.py", "command.py"}
"""docstrings there are the help of a command"""
SAID_ONCE = {"check": "Algorithm", "build_model": "Algorithm", "deal": "Scheme"}
"""methods that say it where they are defined first, and the class that does"""


def functions(node: ast.AST) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Return public functions and methods, each with the name of its class."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and inner.name.startswith("_"):
            continue
        if isinstance(inner, ast.FunctionDef):
            yield inner, node.name if isinstance(node, ast.ClassDef) else ""
        elif isinstance(inner, ast.ClassDef):
            yield from functions(inner)


def raised(node: ast.AST) -> Iterator[str]:
    """Return the names of the errors that a function raises itself, without its inner functions."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Raise) and isinstance(inner.exc, ast.Call):
            yield ast.unparse(inner.exc.func)
        if not isinstance(inner, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            yield from raised(inner)


def test_each_error_begins_a_line():
    """The pages of the reference show one error for each entry of ``Raises``."""
    run_on = re.compile(r"Raises:.*[^\s,] [A-Z]\w*(?:Error|Priors|Lost): ", re.DOTALL)
    assert [
        f"{path.name}:{node.lineno}"
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and run_on.search(ast.get_docstring(node) or "")
    ] == []


def test_a_public_function_documents_its_errors():
    silent, seen = [], 0
    for path in sorted(ROOT.rglob("*.py")):
        folders = path.relative_to(ROOT).parts
        if path.name in COMMANDS or "deploy" in folders or "sources" in folders:
            continue  # no public functions; readers of data sets have one type, which documents the errors
        for function, owner in functions(ast.parse(path.read_text())):
            decorators = {ast.unparse(each).partition("(")[0] for each in function.decorator_list}
            errors = ERRORS.intersection(raised(function))
            if not errors or "model_validator" in decorators or SAID_ONCE.get(function.name, owner) != owner:
                continue
            seen += 1
            if "Raises:" not in (ast.get_docstring(function) or ""):
                silent.append(
                    f"{path.relative_to(ROOT)}:{function.lineno} {function.name}: {', '.join(sorted(errors))}"
                )
    assert silent == []
    assert seen > 60
