"""Thousands of small random searches: shapes, dtypes, layouts and difficult values, on every CPU variant."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from uefl_kernels import COMPILED, vq_assign
from uefl_kernels.ops.vq_assign.distances import LARGEST

from .conftest import DTYPES, wrong_indices

pytestmark = pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 96, 100, 130, 257, 520)
COUNTS = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 129, 200, 300)
ROWS = (1, 2, 4, 5, 11, 12, 13, 15, 16, 17, 31, 32, 33, 40, 70, 200, 400)

RowsAndCodebook = tuple[torch.Tensor, torch.Tensor]


def _powers(count: int, lowest: float, highest: float, random: torch.Generator) -> torch.Tensor:
    return 10 ** (torch.rand(count, 1, generator=random, dtype=torch.float64) * (highest - lowest) + lowest)


def _near_ties(x: torch.Tensor, c: torch.Tensor, random: torch.Generator) -> RowsAndCodebook:
    """Return rows halfway between two codewords, some of them one float32 away from it in one element."""
    a, b = (torch.randint(len(c), (len(x),), generator=random) for _ in range(2))
    middle = ((c[a] + c[b]) / 2).float()
    element = torch.randint(c.shape[1], (len(x),), generator=random)
    rows = torch.arange(len(x))[::2]
    middle[rows, element[rows]] = torch.nextafter(middle[rows, element[rows]], torch.tensor(1e30))
    return middle.double(), c


def _gaps_of_every_size(x: torch.Tensor, c: torch.Tensor, random: torch.Generator) -> RowsAndCodebook:
    """Return rows near the middle of two codewords, with gaps on both sides of every error bound."""
    a, b = (torch.randint(len(c), (len(x),), generator=random) for _ in range(2))
    return (c[a] + c[b]) / 2 + (c[a] - c[b]) * _powers(len(x), -9, -1, random), c


def _clumps(x: torch.Tensor, c: torch.Tensor, random: torch.Generator) -> RowsAndCodebook:
    """Return a codebook with one to all codewords close together, around the length of a candidate list."""
    size = int(torch.randint(1, len(c) + 1, (1,), generator=random))
    c[:size] = c[0] + 1e-4 * c[:size]
    x[::2] = c[0] + 1e-3 * x[::2]
    return x, c[torch.randperm(len(c), generator=random)]


def _one_large_element(x: torch.Tensor, c: torch.Tensor, random: torch.Generator) -> RowsAndCodebook:
    x[torch.arange(len(x)), torch.randint(x.shape[1], (len(x),), generator=random)] *= 1e4
    c[torch.arange(len(c)), torch.randint(x.shape[1], (len(c),), generator=random)] *= _powers(
        len(c), 0, 4, random
    )[:, 0]
    return x, c


def _duplicates(x: torch.Tensor, c: torch.Tensor, random: torch.Generator) -> RowsAndCodebook:
    c = c[torch.randint(max(1, len(c) // 3), (len(c),), generator=random)]
    x[::2] = c[torch.randint(len(c), (len(x[::2]),), generator=random)]
    return x, c


def _not_finite(x: torch.Tensor, c: torch.Tensor, random: torch.Generator) -> RowsAndCodebook:
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38], dtype=torch.float64)
    row, column = (
        torch.randint(len(x), (5,), generator=random),
        torch.randint(x.shape[1], (5,), generator=random),
    )
    x[row, column] = bad[torch.randint(4, (5,), generator=random)]
    return x, c


def _nearly_equal(x: torch.Tensor, c: torch.Tensor, random: torch.Generator) -> RowsAndCodebook:
    return x, c[:1] + c * _powers(len(c), -9, -3, random)


def _scaled(low: float, high: float):
    def scale(x: torch.Tensor, c: torch.Tensor, random: torch.Generator) -> RowsAndCodebook:
        factor = _powers(1, low, high, random)
        return x * factor, c * factor

    return scale


KINDS = {
    "normal": lambda x, c, random: (x, c),
    "near ties": _near_ties,
    "gaps of every size": _gaps_of_every_size,
    "clumps": _clumps,
    "one large element": _one_large_element,
    "zeros": lambda x, c, random: (x.clamp(min=0) * (x > 1), c.clamp(min=0)),
    "duplicates": _duplicates,
    "integers": lambda x, c, random: (x.round(), (c * 1.5).round()),
    "all equal": lambda x, c, random: (x * 0 + 0.1, c * 0 + 0.1),
    "nearly equal codewords": _nearly_equal,
    "offset": lambda x, c, random: (x + (offset := _powers(1, 1, 7, random)), c + offset),
    "rows far away": lambda x, c, random: (x + _powers(len(x), 0, 12, random), c),
    "rows of many sizes": lambda x, c, random: (x * _powers(len(x), -25, 25, random), c),
    "codewords of many sizes": lambda x, c, random: (x, c * _powers(len(c), -12, 12, random)),
    "tiny": _scaled(-40, -15),
    "subnormal": _scaled(-46, -38),
    "huge": _scaled(15, 38),
    "float64 extremes": _scaled(-320, 300),
    "not finite": _not_finite,
}

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T.contiguous().T,
    "sliced": lambda x: torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]],
    "every other element": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "channels first": lambda x: x[None].transpose(1, 2).contiguous().transpose(1, 2),
    "two dimensions": lambda x: (
        x.reshape(-1, 2, x.shape[1]).transpose(0, 1).contiguous().transpose(0, 1) if len(x) % 2 == 0 else x
    ),
    "expanded": lambda x: x[:1].expand(len(x), -1),
}


searches = given(
    seed=st.integers(0, 1 << 30),
    n=st.sampled_from(ROWS),
    k=st.sampled_from(COUNTS),
    d=st.sampled_from(LENGTHS),
    segments=st.sampled_from((1, 1, 1, 2, 3)),
    shared=st.booleans(),
    kind=st.sampled_from(tuple(KINDS)),
    layout=st.sampled_from(tuple(LAYOUTS)),
    dtypes=st.tuples(st.sampled_from((torch.float32, *DTYPES)), st.sampled_from((torch.float32, *DTYPES))),
    metric=st.sampled_from(("l2", "l2", "cosine")),
)


def assert_exact(seed, n, k, d, segments, shared, kind, layout, dtypes, metric):
    random = torch.Generator().manual_seed(seed)
    pieces = [
        KINDS[kind](
            torch.randn(n, d, generator=random, dtype=torch.float64),
            torch.randn(k, d, generator=random, dtype=torch.float64),
            random,
        )
        for _ in range(segments)
    ]
    x = LAYOUTS[layout](torch.cat([rows for rows, _ in pieces], 1).to(dtypes[0]))
    codebook = pieces[0][1] if shared else torch.stack([codes for _, codes in pieces])
    limit = min(torch.finfo(dtypes[1]).max, LARGEST)  # larger values are refused
    assert wrong_indices(x, codebook.clamp(-limit, limit).to(dtypes[1]), metric) == 0


@pytest.mark.every_variant
@settings(max_examples=2000 if os.environ.get("UEFL_CPU") else 250)
@searches
def test_fuzz(**search):
    """Run longer on a variant that UEFL_CPU names, as ``test_variants.py`` does."""
    assert_exact(**search)


def test_more_than_2_to_the_31_elements():
    row = torch.randn(4096)
    codebook = torch.stack([row + 1, row])
    indices = vq_assign(row.expand((1 << 31) // 4096 + 7, 4096), codebook)
    assert indices.shape[0] > 1 << 19
    assert indices.unique().tolist() == [1]


def test_addresses_beyond_2_to_the_31_elements():
    """Rows are 2^26 elements apart, and only their memory is touched."""
    memory = torch.empty((1 << 31) + (1 << 27), dtype=torch.bfloat16)
    x = memory.as_strided((34, 16), (1 << 26, 1))
    expected = torch.arange(34) % 7
    x[:] = expected[:, None]
    codebook = torch.arange(7.0)[:, None].expand(7, 16)
    assert torch.equal(vq_assign(x, codebook)[:, 0], expected)
    x = memory.as_strided((9, 33), (1, 1 << 26))  # and the elements of a row
    x[:] = torch.arange(9)[:, None]
    assert torch.equal(vq_assign(x, torch.arange(9.0)[:, None].expand(9, 33))[:, 0], torch.arange(9))
