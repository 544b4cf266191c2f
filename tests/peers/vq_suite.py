"""Run vector-quantize-pytorch's own tests of the classes that uefl_kernels.nn has, against ours and against
its own, and print a table.

    python -m tests.peers.vq_suite PATH

PATH is a checkout of https://github.com/lucidrains/vector-quantize-pytorch, its ``tests`` folder, or a
.tar.gz of it. (The sdist on PyPI leaves the tests out.) The peer's own column needs the package installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

CLASSES = (
    "VectorQuantize",
    "ResidualVQ",
    "GroupedResidualVQ",
    "SimVQ",
    "ResidualSimVQ",
    "FSQ",
    "ResidualFSQ",
    "GroupedResidualFSQ",
    "LFQ",
    "ResidualLFQ",
    "GroupedResidualLFQ",
    "LatentQuantize",
    "BinaryMapper",
    "RandomProjectionQuantizer",
    "Sequential",
)
FILES = ("test_readme.py", "test_beam.py", "test_lfq.py", "test_latent_quantization.py")


def find_tests(path: Path, folder: Path) -> Path:
    """The folder with the test files, below ``path`` or unpacked into ``folder``."""
    if path.is_file():
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
        path = folder
    for found in sorted(path.rglob(FILES[0])):
        return found.parent
    raise FileNotFoundError(
        f"{path} holds no {FILES[0]}; name a checkout of vector-quantize-pytorch (its sdist has no tests)"
    )


def outcomes(tests: Path, ours: bool) -> Mapping[str, str]:
    """Test -> "passed", "failed: why" or "skipped: why", in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        environment = os.environ | {"UEFL_PEER_REPORT": str(report), "UEFL_PEER_OURS": str(int(ours))}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        )
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.peers.vq_plugin",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
        ]
        files = [str(tests / name) for name in FILES if (tests / name).exists()]
        run = subprocess.run(
            [*command, "--rootdir", str(tests), *files],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            raise RuntimeError(f"pytest did not run:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
        return dict(line.split("\t", 1) for line in report.read_text().splitlines())


def table(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """One row for each test function with the outcomes of its cases, and the counts."""
    rows = ["| test | ours | the peer itself |", "|---|---|---|"]
    for function in dict.fromkeys(name.split("[")[0] for name in ours):
        columns = [
            [outcome for name, outcome in found.items() if name.split("[")[0] == function]
            for found in (ours, theirs)
        ]
        rows.append(f"| `{function}` | {_said(columns[0])} | {_said(columns[1])} |")
    counts = {
        kind: sum(outcome.startswith(kind) for outcome in ours.values())
        for kind in ("passed", "failed", "skipped")
    }
    rows += [
        "",
        (
            f"Ours: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped, of"
            f" {len(ours)}."
        ),
    ]
    return "\n".join(rows)


def _said(outcomes: list[str]) -> str:
    if not outcomes:
        return "not installed"
    passed = outcomes.count("passed")
    return "; ".join(
        [
            f"{passed} of {len(outcomes)} passed",
            *dict.fromkeys(outcome for outcome in outcomes if outcome != "passed"),
        ]
    )


def installed() -> bool:
    """Return True if the peer can be imported."""
    return (
        subprocess.run(
            [sys.executable, "-c", "import vector_quantize_pytorch"], capture_output=True, check=False
        ).returncode
        == 0
    )


def main() -> int:
    """Print the table; 1 where a test fails with ours that passes with the peer."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        tests = find_tests(Path(sys.argv[1]), Path(folder))
        ours, theirs = outcomes(tests, True), outcomes(tests, False) if installed() else {}
    print(table(ours, theirs))
    return int(
        any(
            outcome.startswith("failed") and not theirs.get(name, "").startswith("failed")
            for name, outcome in ours.items()
        )
    )


if __name__ == "__main__":
    sys.exit(main())
