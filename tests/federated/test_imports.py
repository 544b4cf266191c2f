"""The import graph of the package: no circle, and few files that many lean on."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import uefl
from tests.import_graph import imported, module_name

ROOT = Path(uefl.__file__).parent


@cache
def imports() -> dict[str, set[str]]:
    """Return for every module the imported modules of the package.

    Imports inside of functions count, imports for types do not.
    """
    modules = {module_name(path, ROOT): path for path in ROOT.rglob("*.py")}
    return {
        name: imported(path, name, set(modules)) & modules.keys() - {name} for name, path in modules.items()
    }


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


LAYERS = (
    ("cli", "api", "suites", "deploy"),
    ("run",),
    ("report",),
    ("config", "models.saved", "algorithms"),
    ("server", "client"),
    ("algorithms.base", "algorithms.context"),
    ("engines", "models", "data"),
)
"""the picture of docs/architecture.md, from the top"""


def _layer(module: str) -> int | None:
    """Return the row of a module in the picture, by the longest matching name.

    None if the picture does not have it.
    """
    fitting = [
        (len(name), row)
        for row, names in enumerate(LAYERS)
        for name in names
        if f"{module}.".startswith(f"uefl.{name}.")
    ]
    return max(fitting)[1] if fitting else None


def test_arrows_point_down_in_the_picture_of_the_map():
    picture = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
    places = [picture.index(f"uefl.{name} ") for names in LAYERS for name in names]
    assert places == sorted(places)
    up = [
        f"{name} -> {target}"
        for name, targets in imports().items()
        for target in targets
        if (above := _layer(name)) is not None and (below := _layer(target)) is not None and below < above
    ]
    assert up == []


def test_engines_and_algorithms_know_little():
    graph = imports()
    for name, targets in graph.items():
        if name.startswith("uefl.engines"):
            assert all(target.startswith("uefl.engines") for target in targets), name
        if name.startswith("uefl.algorithms"):
            assert not any(
                target.startswith(("uefl.engines.in_process", "uefl.run", "uefl.config", "uefl.report"))
                for target in targets
            ), name
        if name.startswith(("uefl.server", "uefl.client")):
            assert not any(
                target.startswith("uefl.algorithms") and target != "uefl.algorithms.base"
                for target in targets
            ), name


LEANED_ON = {
    "uefl.algorithms.base": "what an algorithm is; every algorithm begins with it",
    "uefl.client.work": "what the client half of every algorithm is given",
    "uefl.data.federation": "what a client has: types without a function that reads anything",
    "uefl.data.inputs": "the kinds of inputs: one type",
    "uefl.engines.base": "messages and replies: types, and the protocol of an engine",
    "uefl.errors": "the errors that become a line for the user",
    "uefl.paths": "checks of paths, and the functions that read files",
}
"""the only modules that an eighth of the package or more may import, and why"""


def test_shared_modules_are_few_and_import_only_base():
    graph = imports()
    leaning = Counter(target for targets in graph.values() for target in targets)
    assert {name for name, count in leaning.items() if count >= len(graph) / 8} <= set(LEANED_ON)
    for name in LEANED_ON.keys() - {"uefl.algorithms.base"}:
        assert graph[name] <= set(LEANED_ON), name
