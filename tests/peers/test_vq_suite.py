"""vector-quantize-pytorch's own tests on our layers; name a checkout of it in UEFL_VQ_TESTS."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .vq_suite import find_tests, outcomes, table

WITHOUT_REASON_OF_OURS = {"test_fvq": "x_transformers"}


def test_the_peers_own_tests_pass(tmp_path):
    where = os.environ.get("UEFL_VQ_TESTS")
    if not where:
        pytest.skip("UEFL_VQ_TESTS names no checkout of vector-quantize-pytorch")
    found = outcomes(find_tests(Path(where), tmp_path), True)
    assert len(found) >= 40
    failed = {name: why for name, why in found.items() if why.startswith("failed")}
    failed = {
        name: why
        for name, why in failed.items()
        if WITHOUT_REASON_OF_OURS.get(name.split("::")[1], "\0") not in why
    }
    assert not failed


def test_where_the_tests_are(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no test_readme.py; name a checkout"):
        find_tests(tmp_path, tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_readme.py").touch()
    assert find_tests(tmp_path, tmp_path) == tmp_path / "tests"


def test_table():
    ours = {"a.py::a[1]": "passed", "a.py::a[2]": "passed", "b.py::b": "failed: x"}
    assert table(ours, {"a.py::a[1]": "passed", "a.py::a[2]": "skipped: y"}).splitlines()[2:] == [
        "| `a.py::a` | 2 of 2 passed | 1 of 2 passed; skipped: y |",
        "| `b.py::b` | 0 of 1 passed; failed: x | not installed |",
        "",
        "Ours: 2 passed, 1 failed, 0 skipped, of 3.",
    ]
