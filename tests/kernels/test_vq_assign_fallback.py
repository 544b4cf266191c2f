"""The search in plain PyTorch gives exact indices at the cost of a matrix product.

It serves installations without compiled kernels.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fresh import python
from uefl_kernels.ops.vq_assign import distances, fallback, reference

from .conftest import DTYPES, normal
from .search_cases import CASES
from .test_vq_assign_fuzz import COUNTS, KINDS, LENGTHS, ROWS

METRICS = ("l2", "cosine")


def wrong(x: torch.Tensor, codebook: torch.Tensor, metric: str) -> int:
    found = fallback.search(x, codebook, metric)
    expected = reference.search(x, codebook, metric)
    assert found.shape == expected.shape
    return int((found != expected).sum())


@pytest.mark.parametrize("case", CASES)
def test_cases(case):
    torch.manual_seed(0)
    x, codebook = CASES[case]()
    for metric in METRICS:
        assert wrong(x, codebook, metric) == 0, metric


@pytest.mark.slow
@settings(max_examples=1500)
@given(
    seed=st.integers(0, 1 << 30),
    n=st.sampled_from(ROWS),
    k=st.sampled_from(COUNTS),
    d=st.sampled_from(LENGTHS),
    kind=st.sampled_from(tuple(KINDS)),
    dtypes=st.tuples(st.sampled_from((torch.float32, *DTYPES)), st.sampled_from((torch.float32, *DTYPES))),
    metric=st.sampled_from(("l2", "l2", "cosine")),
)
def test_fuzz(seed, n, k, d, kind, dtypes, metric):
    random = torch.Generator().manual_seed(seed)
    x, codebook = KINDS[kind](
        torch.randn(n, d, generator=random, dtype=torch.float64),
        torch.randn(k, d, generator=random, dtype=torch.float64),
        random,
    )
    limit = torch.finfo(dtypes[1]).max  # a codebook must be finite
    assert wrong(x.to(dtypes[0]), codebook.clamp(-limit, limit).to(dtypes[1]), metric) == 0


def test_the_bound_is_needed(monkeypatch):
    """Without the error bound the product decides, and is wrong."""
    codebook = normal(40, 24, offset=5)
    x = (codebook[:, None] + codebook[None]).reshape(-1, 24) / 2
    assert wrong(x, codebook, "l2") == 0
    packed = fallback._PackedCodebook
    scores = packed._scores
    monkeypatch.setattr(packed, "_scores", lambda self, rows: (scores(self, rows)[0], torch.zeros(len(rows))))
    assert wrong(x, codebook, "l2") > 0


def test_few_rows_need_the_definition(monkeypatch):
    x, codebook = normal(20000, 64), normal(256, 64, seed=1)
    asked = []
    decide = fallback._PackedCodebook._decide_pairs
    monkeypatch.setattr(
        fallback._PackedCodebook,
        "_decide_pairs",
        lambda self, rows, pairs, indices: asked.append(pairs) or decide(self, rows, pairs, indices),
    )
    monkeypatch.setattr(distances, "argmin", None)
    for offset in (0.0, 100.0):
        packed = fallback._PackedCodebook(codebook + offset, "l2", x.dtype)
        assert packed.dtype == torch.float32
        packed.nearest(x + offset)
    assert 0 < sum(pairs[0].unique().numel() for pairs in asked) < 0.002 * 2 * len(x)


@contextlib.contextmanager
def _fp32_precision(value):
    before, torch.backends.mkldnn.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision, value
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_products_of_fewer_bits_are_not_trusted(precision):
    codebook = normal(5, 4)
    assert fallback._PackedCodebook(codebook, "l2", torch.float32).dtype == torch.float32
    with _fp32_precision(precision):
        assert fallback._PackedCodebook(codebook, "l2", torch.float32).dtype == torch.float64


def test_autocast_changes_nothing():
    x, codebook = normal(2000, 64), normal(500, 64, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        assert wrong(x, codebook, "l2") == 0


def test_numbers_flushed_to_zero_change_nothing():
    """The definition treats subnormal rows as zeros, too.

    It does not treat in this way products in float32 that would be subnormal.
    """
    assert torch.set_flush_denormal(True)
    try:
        for scale, size in ((1e-38, 1e-11), (1e-30, 1e-11), (1e-38, 1e-38), (1e-20, 1.0)):
            assert wrong(normal(300, 8, scale=scale), normal(40, 8, seed=1, scale=size), "l2") == 0
            assert wrong(normal(300, 8, scale=scale), normal(40, 8, seed=1, scale=size), "cosine") == 0
    finally:
        torch.set_flush_denormal(False)


def test_more_codewords_than_fit_a_block():
    assert wrong(normal(40, 2), normal(200_000, 2, seed=1), "l2") == 0


WITHOUT = """
from pathlib import Path
exists = Path.exists
Path.exists = lambda self: self.name != "_C.abi3.so" and exists(self)
import torch, uefl_kernels
from uefl_kernels import backend, kmeans, kmeans_step, vq_assign, vq_with_sums
from uefl_kernels.ops.vq_assign import fallback
assert not uefl_kernels.COMPILED
called = []
nearest = fallback._PackedCodebook.nearest
fallback._PackedCodebook.nearest = lambda *args: called.append(args) or nearest(*args)
torch.manual_seed(0)
x, codebook = torch.randn(300, 6), torch.randn(20, 3)
calls = {
    "vq_assign": lambda: [vq_assign(x, codebook)],
    "vq": lambda: [result for result in vq_with_sums(x, codebook) if isinstance(result, torch.Tensor)],
    "kmeans_step": lambda: kmeans_step(x, x[:9])[:5],
    "kmeans": lambda: kmeans(x, 9),
}
for name, call in calls.items():
    called.clear()
    found = call()
    assert called, name
    called.clear()
    with backend("reference"):
        expected = call()
    assert not called, name
    assert len(found) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name
print("ok")
"""


def test_ops_use_it_without_the_compiled_library():
    done = python(WITHOUT)
    assert done.stdout == "ok\n", done.stderr
