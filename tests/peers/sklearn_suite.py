"""Run scikit-learn's own tests of ``KMeans`` on ours and on its own, and print a table.

    python -m tests.peers.sklearn_suite

The tests come from the installed scikit-learn, ``sklearn/cluster/tests/test_k_means.py``: those
that name ``KMeans``. Tests of its private functions and of ``MiniBatchKMeans`` alone are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.peers.vq_suite import table


def outcomes(ours: bool) -> Mapping[str, str]:
    """Return test -> "passed", "failed: why" or "skipped: why", from a process of its own."""
    import sklearn.cluster.tests

    tests = Path(str(sklearn.cluster.tests.__file__)).with_name("test_k_means.py")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        environment = os.environ | {
            "UEFL_PEER_REPORT": str(report),
            "UEFL_PEER_OURS": str(int(ours)),
            "SKLEARN_RUN_FLOAT32_TESTS": "1",
        }
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        )
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.peers.sklearn_plugin",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-c", os.devnull, "--rootdir", str(tests.parents[1]), str(tests)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(f"pytest did not run:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
        return dict(line.split("\t", 1) for line in report.read_text().splitlines())


def main() -> int:
    """Print the table; return 1 where a test fails with ours that passes with scikit-learn's own."""
    ours, theirs = outcomes(True), outcomes(False)
    print(table(ours, theirs))
    return int(
        any(outcome.startswith("failed") and theirs.get(name) == "passed" for name, outcome in ours.items())
    )


if __name__ == "__main__":
    sys.exit(main())
