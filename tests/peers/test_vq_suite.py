"""vector-quantize-pytorch's own tests, README and examples run on our layers.

Name a checkout of it in UEFL_VQ_TESTS.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .peer_tables import PAGE, replaced
from .vq_programs import blocks
from .vq_suite import find_tests, outcomes, program_outcomes, table, worse

# Failures with other causes: a package that may be absent, and blocks that also fail with the peer.
NOT_OURS = (
    "x_transformers",
    "directional_reparam=True leaves codewords behind",
    "LatentQuantize: z must have shape [B, 16, ...], got [1, 32, 16]",
    "name 'dim' is not defined",
)


def checkout(folder):
    where = os.environ.get("UEFL_VQ_TESTS")
    if not where:
        pytest.skip("UEFL_VQ_TESTS names no checkout of vector-quantize-pytorch")
    return find_tests(Path(where), folder)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "least"), [(outcomes, 107), (program_outcomes, 33)])
def test_suite_of_the_peer_passes(run, least, tmp_path):
    found = run(checkout(tmp_path), True)
    assert len(found) >= least
    failed = {name: found[name] for name in worse(found, {})}
    assert not {name: why for name, why in failed.items() if not any(piece in why for piece in NOT_OURS)}
    page = PAGE.read_text()
    if not any("x_transformers" in why for why in found.values()):
        assert table(found, {}, page) in page


def test_tests_of_the_peer_are_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"test_readme\.py"):
        find_tests(tmp_path, tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_readme.py").touch()
    assert find_tests(tmp_path, tmp_path) == tmp_path / "tests"


def test_table():
    ours = {"a.py::a[1]": "passed", "a.py::a[2]": "passed", "b.py::b": "failed: x"}
    theirs = {"a.py::a[1]": "passed", "a.py::a[2]": "skipped: y"}
    assert table(ours, theirs).splitlines()[2:] == [
        "| `a.py::a` | 2 of 2 passed | 1 of 2 passed; skipped: y |",
        "| `b.py::b` | 0 of 1 passed; failed: x | not installed |",
        "",
        "Ours: 2 passed, 1 failed, 0 skipped, of 3.",
    ]
    before = table(ours, theirs | {"b.py::b": "passed"})
    assert table(ours, {}, before) == before
    assert worse(ours, theirs) == ["b.py::b"]
    assert worse(ours, {"b.py::b": "failed: z"}) == []


def test_a_table_replaces_the_one_of_its_name():
    page = "a\n<!-- table: x -->\nold\n\n<!-- end -->\nb\n<!-- table: y -->\nkept\n<!-- end -->\n"
    assert replaced(page, "x", "new\\1") == page.replace("old\n\n", "new\\1\n")
    with pytest.raises(ValueError, match="z"):
        replaced(page, "z", "new")
    for name in ("vector-quantize-pytorch", "scikit-learn"):
        assert replaced(PAGE.read_text(), name, "") != PAGE.read_text()


def test_the_blocks_of_a_text():
    assert blocks("```python\na = 1\n```\ntext\n```bash\nls\n```\n```python\nb\n```\n") == ["a = 1\n", "b\n"]
