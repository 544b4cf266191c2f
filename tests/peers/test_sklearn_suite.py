"""scikit-learn's own tests of ``KMeans`` on ours."""

from __future__ import annotations

import pytest

from .sklearn_suite import PRIVATE, outcomes


@pytest.mark.slow
def test_scikit_learn_test_suite_passes():
    """The tests that fail read private names."""
    pytest.importorskip("sklearn")
    found = outcomes(ours=True)
    assert len(found) >= 160
    failed = {name: why for name, why in found.items() if why.startswith("failed")}
    assert not {name: why for name, why in failed.items() if PRIVATE not in why}
    assert sum(why == "passed" for why in found.values()) >= len(found) - 9
