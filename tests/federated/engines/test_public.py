"""Of Flower's modules those that its documentation names, and no more of the others than today."""

import ast
from pathlib import Path

import uefl

PACKAGE = Path(uefl.__file__).parent
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
PRIVATE = {"engines/flower/request_limits.py": 4, "engines/flower/node.py": 4}
"""import statements of other modules, by file: none is to be added"""


def _modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_other_module_of_flower_is_imported_than_before():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        names = [name for name in _modules(path) if name.split(".")[0] == "flwr"]
        if count := sum(name not in PUBLIC for name in names):
            found[str(path.relative_to(PACKAGE))] = count
    assert found == PRIVATE
