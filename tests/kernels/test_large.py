"""Tensors of more than 2^31 elements, which 32-bit indices cannot count.

Run them with ``pytest -m large`` (14 GB), or ``-m cuda``; a plain run leaves them out.
"""

from __future__ import annotations

import pytest
import torch

from uefl_kernels import backend, vq_assign, vq_with_sums

from .conftest import normal

pytestmark = pytest.mark.large

ROWS, D, K, PERIOD = (1 << 25) + 3, 64, 5, 1021


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return request.param


def rows_and_codebook(device):
    """Repeat a few rows, so that the reference needs only these rows."""
    few, codebook = normal(PERIOD, D, dtype=torch.bfloat16), normal(K, D, seed=1)
    x = few.to(device).repeat(-(-ROWS // PERIOD), 1)[:ROWS]
    assert x.numel() > 1 << 31
    with backend("reference"):
        indices = vq_assign(few, codebook)[:, 0]
    return few, x, codebook.to(device), indices, torch.bincount(torch.arange(ROWS) % PERIOD)


def test_vq_assign(device):
    _, x, codebook, expected, _ = rows_and_codebook(device)
    found = vq_assign(x, codebook)[:, 0].cpu()
    assert torch.equal(found, expected.repeat(-(-ROWS // PERIOD))[:ROWS])


def test_vq(device):
    few, x, codebook, indices, times = rows_and_codebook(device)
    out, sums = vq_with_sums(x, codebook)
    counts = torch.zeros(K, dtype=torch.int64).index_add_(0, indices, times)
    assert torch.equal(out.counts.cpu(), counts)
    exact = torch.zeros(K, D, dtype=torch.float64).index_add_(0, indices, few.double() * times[:, None])
    # rounding a row adds an error of at most half a unit
    torch.testing.assert_close(sums.cpu(), exact, rtol=0, atol=ROWS * 2.0**-31 * 4)
    squares = ((few.double() - codebook.cpu()[indices].double()).square().sum(1) * times).sum()
    torch.testing.assert_close(out.loss.cpu().double(), 1.25 * squares / x.numel(), rtol=1e-6, atol=0)
    for piece in (slice(0, 500), slice(ROWS - 500, ROWS)):
        assert torch.equal(out.quantized[piece], codebook[out.indices[piece, 0]].bfloat16())
