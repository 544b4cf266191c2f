"""Run vector-quantize-pytorch's own tests, README and examples on ours and on its own, and make tables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_FIRST = "test_readme.py"
_HERE = str(Path(__file__).parents[2])


def find_tests(path: Path, folder: Path) -> Path:
    """Return the folder with the test files, below ``path`` or unpacked into ``folder``."""
    if path.is_file():
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
        path = folder
    for found in sorted(path.rglob(_FIRST)):
        return found.parent
    raise FileNotFoundError(
        f"{path} holds no {_FIRST}; name a checkout of vector-quantize-pytorch (its sdist has no tests)"
    )


def reported(module: str, arguments: Sequence[str], ours: bool, **settings: str) -> Mapping[str, str]:
    """Run a module in a process of its own, and return its report, a mapping of name to outcome."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        environment = os.environ | {"UEFL_PEER_REPORT": str(report), "UEFL_PEER_OURS": str(int(ours))}
        environment |= {"PYTHONPATH": os.pathsep.join([_HERE, os.environ.get("PYTHONPATH", "")]), **settings}
        command = [sys.executable, "-m", module, *arguments]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(f"{module} did not run:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
        return dict(line.split("\t", 1) for line in report.read_text().splitlines())


def pytest_outcomes(
    plugin: str, root: Path, files: Sequence[Path], ours: bool, **settings: str
) -> Mapping[str, str]:
    """Return test -> "passed", "failed: why" or "skipped: why"."""
    options = ["-q", "-p", plugin, "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(root)]
    return reported("pytest", [*options, *map(str, files)], ours, **settings)


def outcomes(tests: Path, ours: bool) -> Mapping[str, str]:
    """Return test -> "passed", "failed: why" or "skipped: why"."""
    return pytest_outcomes("tests.peers.vq_plugin", tests, sorted(tests.glob("test_*.py")), ours)


def program_outcomes(tests: Path, ours: bool) -> Mapping[str, str]:
    """Return block of the README or example -> "passed" or "failed: why"."""
    return reported("tests.peers.vq_programs", [str(tests.parent)], ours)


def table(ours: Mapping[str, str], theirs: Mapping[str, str], before: str = "") -> str:
    """Return one row for each test function with the outcomes of its cases, and the counts.

    Where the peer did not run, its column is the one of the table ``before``.
    """
    kept = dict(re.findall(r"^\| `(.+?)` \|.*\| (.+?) \|$", before, re.MULTILINE))
    rows = ["| test | ours | the peer itself |", "|---|---|---|"]
    for function in dict.fromkeys(name.split("[")[0] for name in ours):
        mine, other = (
            _said([outcome for name, outcome in found.items() if name.split("[")[0] == function])
            for found in (ours, theirs)
        )
        rows.append(f"| `{function}` | {mine} | {other or kept.get(function, 'not installed')} |")
    return "\n".join([*rows, "", _counted("Ours", ours)])


def _counted(who: str, found: Mapping[str, str]) -> str:
    counts = [
        f"{sum(outcome.startswith(kind) for outcome in found.values())} {kind}"
        for kind in ("passed", "failed", "skipped")
    ]
    return f"{who}: {', '.join(counts)}, of {len(found)}."


def _said(outcomes: list[str]) -> str:
    passed = outcomes.count("passed")
    others = dict.fromkeys(outcome for outcome in outcomes if outcome != "passed")
    return "; ".join([f"{passed} of {len(outcomes)} passed", *others]) if outcomes else ""


def installed() -> bool:
    """Return True if the peer can be imported."""
    command = [sys.executable, "-c", "import vector_quantize_pytorch"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def worse(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the names of what fails with ours and does not fail with the peer."""
    return [
        name
        for name, outcome in ours.items()
        if outcome.startswith("failed") and not theirs.get(name, "").startswith("failed")
    ]


def both_tables(path: Path, before: str = "") -> tuple[str, list[str]]:
    """Return the tables of the tests and of the programs, and the names of what only fails with ours.

    Args:
        path: a checkout of https://github.com/lucidrains/vector-quantize-pytorch, its ``tests`` folder, or a
            .tar.gz of it; the sdist on PyPI leaves the tests out.
        before: the page with earlier tables; they keep the peer's column where it is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        tests = find_tests(path, Path(folder))
        pairs = [
            (run(tests, True), run(tests, False) if installed() else {})
            for run in (outcomes, program_outcomes)
        ]
    failed = [name for pair in pairs for name in worse(*pair)]
    return "\n\n".join(table(*pair, before) for pair in pairs), failed
