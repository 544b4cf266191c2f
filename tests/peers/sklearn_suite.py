"""Run scikit-learn's own tests of ``KMeans`` on ours and on its own, and print a table.

    python -m tests.peers.sklearn_suite

The tests come from the installed scikit-learn, ``sklearn/cluster/tests/test_k_means.py``. The plugin
selects the tests that use ``KMeans``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from tests.peers.vq_suite import pytest_outcomes, table, worse


def outcomes(ours: bool) -> Mapping[str, str]:
    """Return test -> "passed", "failed: why" or "skipped: why", from a process of its own."""
    import sklearn.cluster.tests

    tests = Path(str(sklearn.cluster.tests.__file__)).with_name("test_k_means.py")
    plugin = "tests.peers.sklearn_plugin"
    return pytest_outcomes(plugin, tests.parents[1], [tests], ours, SKLEARN_RUN_FLOAT32_TESTS="1")


def main() -> int:
    """Print the table.

    Returns 1 where a test fails with ours that passes with scikit-learn's own.
    """
    ours, theirs = outcomes(True), outcomes(False)
    print(table(ours, theirs))
    return int(bool(worse(ours, theirs)))


if __name__ == "__main__":
    sys.exit(main())
