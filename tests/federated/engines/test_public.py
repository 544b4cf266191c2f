"""Only the modules of Flower that its documentation names are used."""

import ast
import importlib
import pkgutil
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import uefl

PACKAGE = Path(uefl.__file__).parent
PUBLIC = {
    "flwr.app": {"Array", "ArrayRecord", "ConfigRecord", "Context", "Message", "RecordDict"},
    "flwr.clientapp": {"ClientApp"},
    "flwr.serverapp": {"Grid", "ServerApp"},
}
"""by module, the names that may be imported from it"""
LOADERS = {"import_module", "__import__", "run_module", "run_path", "exec", "eval"}
"""functions that take code or the name of a module"""


def private_uses(source, computed=True):
    """Return the private names of Flower that a module uses: imports, and strings that could import a module.

    ``computed``: return the calls that import a module by a computed name too.
    """
    tree = ast.parse(source)
    documentation = {
        id(body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (body := node.body)
        and isinstance(body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_flowers(node.module or ""):
            names = {alias.name for alias in node.names}
            yield from (f"{node.module}.{name}" for name in names - PUBLIC.get(node.module, set()))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_flowers(alias.name))
        elif isinstance(node, ast.Call) and _name(node.func) in LOADERS:
            yield from _loaded(node, node.args[:1], computed)
        elif isinstance(node, ast.Subscript) and _name(node.value) == "modules":  # sys.modules
            yield from _loaded(node, [node.slice], computed)
        elif isinstance(node, ast.Constant) and id(node) not in documentation:
            text = node.value if isinstance(node.value, str) else ""
            yield from (word for word in text.split() if word.startswith("flwr."))


def _is_flowers(name):
    return name.split(".")[0] == "flwr"


def _name(node):
    """Return the name of a function, or none for a method of an object that is not a module."""
    if isinstance(node, ast.Attribute):
        return node.attr if _name(node.value) in ("importlib", "runpy", "builtins", "sys") else None
    return getattr(node, "id", None)


def _loaded(node, argument, computed):
    match argument:
        case [ast.Constant(value=str(text))]:
            if "flwr" in text:
                yield text
        case _ if computed:
            yield ast.unparse(node)


def test_only_public_names_of_flower_are_imported():
    """Packages that do not know Flower import registered modules by computed names."""
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    for path in files:
        computed = path.relative_to(PACKAGE).parts[0] in ("engines", "deploy")
        assert not list(private_uses(path.read_text(), computed)), path


def test_no_module_has_private_objects_of_flower():
    """This covers private objects from any source."""
    pytest.importorskip("flwr")
    modules = {name: importlib.import_module(name) for name in PUBLIC}
    public = {id(getattr(modules[module], name)) for module, names in PUBLIC.items() for name in names}
    found = []
    for info in pkgutil.walk_packages(uefl.__path__, "uefl."):
        if not info.name.startswith(("uefl.engines.", "uefl.deploy.")):
            continue
        for name, value in vars(importlib.import_module(info.name)).items():
            module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(value, ModuleType | type | FunctionType) and _is_flowers(str(module)):
                found += [f"{info.name}.{name}"] if id(value) not in public else []
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import flwr",
        "import flwr.supercore.date",
        "import flwr as other",
        "from flwr import supernode",
        "from flwr.app import *",
        "from flwr.app.message import Message",
        "from flwr.supercore import heartbeat",
        "def f():\n    from flwr.common import constant",
        "import importlib\nimportlib.import_module('flwr')",
        "from importlib import import_module as find\nmodule = 'flwr.supernode'\nfind(module)",
        "import_module('fl' + 'wr')",
        "importlib.import_module(name='flwr')",
        "__import__('flwr')",
        "__import__(name)",
        "import sys\nsys.modules['flwr.common']",
        "sys.modules[name]",
        "exec('import flwr')",
        "runpy.run_module('flwr')",
    ],
)
def test_other_uses_are_found(source):
    assert list(private_uses(source))


@pytest.mark.parametrize(
    "source", ["from flwr.app import Message, Context", '"""As flwr.common does."""', "from .flwr import x"]
)
def test_public_uses_pass(source):
    assert not list(private_uses(source))
