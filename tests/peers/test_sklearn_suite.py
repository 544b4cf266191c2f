"""scikit-learn's own tests of ``KMeans`` on ours, and the page that has their outcomes."""

from __future__ import annotations

import re

import pytest

from .peer_tables import PAGE, replaced
from .sklearn_suite import PRIVATE, outcomes
from .vq_suite import table


def pinned(name, requirements):
    return re.search(rf"^{name}==(\S+)", (PAGE.parents[1] / requirements).read_text(), re.MULTILINE)[1]


@pytest.mark.slow
def test_scikit_learn_test_suite_passes():
    """The tests that fail read private names."""
    sklearn = pytest.importorskip("sklearn")
    found = outcomes(ours=True)
    assert len(found) >= 160
    failed = {name: why for name, why in found.items() if why.startswith("failed")}
    assert not {name: why for name, why in failed.items() if PRIVATE not in why}
    assert sum(why == "passed" for why in found.values()) >= len(found) - 9
    page = PAGE.read_text()
    if sklearn.__version__ == pinned("scikit-learn", "requirements.txt"):
        assert replaced(page, "scikit-learn", table(found, {}, page)) == page


def test_page_names_the_pinned_versions():
    text = " ".join(PAGE.read_text().split())
    assert f"(here {pinned('scikit-learn', 'requirements.txt')})" in text
    version = pinned("vector-quantize-pytorch", "requirements-peers.txt")
    assert f"/vector-quantize-pytorch) {version}. " in text
    assert f"torch {pinned('torch', 'requirements.txt')} " in text
