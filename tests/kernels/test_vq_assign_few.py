"""Calls with at most 96 rows, which the CPU compares with the codebook in place."""

import itertools

import pytest
import torch

import uefl_kernels
from uefl_kernels import vq_assign

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def expected(x, codebook, metric="l2"):
    with uefl_kernels.backend("reference"):
        return vq_assign(x, codebook, metric=metric)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize(("rows", "k", "d"), [(1, 1, 1), (1, 33, 7), (3, 100, 8), (5, 17, 31), (32, 300, 65)])
def test_every_dtype_and_offset(rows, k, d, metric):
    torch.manual_seed(rows)
    for dtype, code_dtype, offset in itertools.product(DTYPES, DTYPES, (0.0, 30.0)):
        x, codebook = (offset + torch.randn(rows, d)).to(dtype), (offset + torch.randn(k, d)).to(code_dtype)
        assert torch.equal(vq_assign(x, codebook, metric=metric), expected(x, codebook, metric))


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("d", [1, 2, 4, 7, 8, 9, 16, 33, 64])
def test_every_number_of_rows_and_codewords(d, metric):
    """Rows lie one by one or in groups.

    The last group and the last codewords may fill no step.
    """
    torch.manual_seed(d)
    x, codebook = torch.randn(97, d), torch.randn(64, d)
    for k in (5, 6, 7, 13, 64):
        right = expected(x, codebook[:k], metric)
        for rows in (*range(1, 35), 63, 64, 95, 96, 97):
            found = vq_assign(x[:rows], codebook[:k], metric=metric)
            assert torch.equal(found, right[:rows]), (rows, k)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("rows", [1, 13, 96])
def test_rows_between_two_codewords(rows, metric):
    """Float32 scores cannot tell the two codewords apart."""
    torch.manual_seed(0)
    codebook = torch.randn(200, 24)
    a, b = torch.randint(200, (2, 300 if rows == 1 else 2000))
    x = (codebook[a] + codebook[b]) / 2
    x[::3, 5] = torch.nextafter(x[::3, 5], torch.tensor(torch.inf))
    found = torch.cat([vq_assign(piece, codebook, metric=metric) for piece in x.split(rows)])
    assert torch.equal(found, expected(x, codebook, metric))


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e-19, 1e15, 1e19, 1e30, 3e37])
def test_scales_whose_squares_underflow_or_overflow(scale, metric):
    torch.manual_seed(1)
    x, codebook = torch.randn(16, 9), torch.randn(40, 9)
    for rows, codewords in ((x * scale, codebook * scale), (x * scale, codebook), (x, codebook * scale)):
        assert torch.equal(vq_assign(rows, codewords, metric=metric), expected(rows, codewords, metric))


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 0.03, 1.0])
@pytest.mark.parametrize("rows", [13, 96])
def test_rows_far_from_the_origin(rows, spread):
    """Products of such rows have large errors, so that differences decide."""
    torch.manual_seed(3)
    center = 10 * torch.randn(70)
    x, codebook = center + spread * torch.randn(rows, 70), center + spread * torch.randn(150, 70)
    codebook[40] = 1e15
    codebook[41] = 0
    x[5] = -x[5]
    assert torch.equal(vq_assign(x, codebook), expected(x, codebook))


@pytest.mark.parametrize("scale", [1e-44, 1e-20, 1.0, 1e18, 3e18, 1e19])
def test_rows_and_codewords_of_mixed_lengths(scale):
    torch.manual_seed(4)
    x, codebook = torch.randn(48, 33), torch.randn(300, 33)
    x[::2] *= scale
    codebook[::3] *= scale
    codebook[1::7] = x[:43] * (1 + 1e-6)
    assert torch.equal(vq_assign(x, codebook), expected(x, codebook))


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_ties_go_to_the_lowest_index(metric):
    codebook = torch.randn(20, 5).repeat(4, 1)
    assert torch.equal(vq_assign(codebook[15:31], codebook, metric=metric)[:, 0], torch.arange(15, 31) % 20)
    zero = torch.zeros(3, 5)
    assert torch.equal(vq_assign(zero, zero, metric=metric), torch.zeros(3, 1, dtype=torch.int64))


def test_rows_that_are_not_finite():
    x, codebook = torch.randn(8, 6), torch.randn(50, 6)
    x[1, 2], x[3, 0], x[5, 5] = torch.nan, torch.inf, -torch.inf
    for metric, precision in itertools.product(("l2", "cosine"), ("exact", "fast")):
        found = vq_assign(x, codebook, metric=metric, precision=precision)
        if precision == "exact":
            assert torch.equal(found, expected(x, codebook, metric))
        assert found[1] == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_a_codebook_that_is_not_finite_is_refused(bad, precision, metric):
    codebook = torch.randn(40, 6)
    codebook[17, 3] = bad
    for x in (torch.randn(2, 6), torch.full((1, 6), torch.nan)):
        with pytest.raises(RuntimeError, match=r"vq_assign: .*codebook"):
            vq_assign(x, codebook, metric=metric, precision=precision)


def test_segments_with_codebooks_of_their_own():
    x, codebooks = torch.randn(4, 3, 12), torch.randn(3, 30, 4)
    assert torch.equal(vq_assign(x, codebooks), expected(x, codebooks))
    channels_first = torch.randn(2, 12, 5).transpose(1, 2)
    assert torch.equal(vq_assign(channels_first, codebooks[0]), expected(channels_first, codebooks[0]))


def test_index_of_a_row_does_not_depend_on_the_batch():
    torch.manual_seed(2)
    x, codebook = torch.randn(300, 40).bfloat16(), torch.randn(500, 40)
    together = vq_assign(x, codebook)
    assert torch.equal(torch.cat([vq_assign(row, codebook) for row in x.split(7)]), together)


def test_vq_of_few_rows():
    x, codebook = torch.randn(9, 16), torch.randn(64, 16)
    found, many = uefl_kernels.vq(x, codebook), uefl_kernels.vq(x.repeat(20, 1), codebook)
    assert torch.equal(found.indices, many.indices[:9])
    assert torch.equal(found.quantized, codebook[found.indices[:, 0]])
    assert torch.equal(found.counts, many.counts // 20)
    torch.testing.assert_close(found.loss, many.loss)
