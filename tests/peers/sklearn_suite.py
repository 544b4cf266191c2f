"""Run scikit-learn's own tests of ``KMeans`` on ours and on its own.

The tests come from the installed scikit-learn, ``sklearn/cluster/tests/test_k_means.py``. The plugin
selects the tests that use ``KMeans``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.peers.vq_suite import pytest_outcomes

PRIVATE = "object has no attribute '_"
"""in the outcome of a test that reads a private attribute of the peer"""


def outcomes(ours: bool) -> Mapping[str, str]:
    """Return test -> "passed", "failed: why" or "skipped: why", from a process of its own."""
    import sklearn.cluster.tests

    tests = Path(str(sklearn.cluster.tests.__file__)).with_name("test_k_means.py")
    plugin = "tests.peers.sklearn_plugin"
    return pytest_outcomes(plugin, tests.parents[1], [tests], ours, SKLEARN_RUN_FLOAT32_TESTS="1")
