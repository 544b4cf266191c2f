"""A pytest plugin for sklearn_suite.

It puts our ``KMeans`` under scikit-learn's name, selects the tests that use it, and writes a report.
"""

from __future__ import annotations

import inspect
import os
import re

import pytest
import sklearn.cluster

from tests.peers.vq_plugin import pytest_runtest_logreport, pytest_sessionfinish  # noqa: F401  (hooks)

if os.environ.get("UEFL_PEER_OURS") == "1":
    from uefl_kernels import KMeans

    sklearn.cluster.KMeans = KMeans


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests that do not name ``KMeans``, and the cases of ``MiniBatchKMeans``."""
    items[:] = [item for item in items if isinstance(item, pytest.Function) and _about_ours(item)]


def _about_ours(item: pytest.Function) -> bool:
    estimators = (
        [value for value in item.callspec.params.values() if inspect.isclass(value)]
        if hasattr(item, "callspec")
        else []
    )
    if any(kind.__name__ == "MiniBatchKMeans" for kind in estimators):
        return False
    return any(kind.__name__ == "KMeans" for kind in estimators) or bool(
        re.search(r"\bKMeans\(", inspect.getsource(item.function))
    )
