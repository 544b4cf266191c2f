"""Searches that compute every distance by its definition: few or short codewords, and very long ones."""

import itertools

import pytest
import torch

import uefl_kernels
from uefl_kernels import KMeans, kmeans, vq_assign

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def expected(x, codebook, metric="l2"):
    with uefl_kernels.backend("reference"):
        return vq_assign(x, codebook, metric=metric)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize(("k", "d"), [(1, 1), (2, 300), (3, 129), (4, 128), (5, 6), (8, 2), (8, 4), (32, 1)])
def test_every_dtype(k, d, metric):
    for dtype, code_dtype, offset in itertools.product(DTYPES, DTYPES, (0.0, 30.0)):
        x, codebook = (offset + normal(117, d)).to(dtype), (offset + normal(k, d)).to(code_dtype)
        assert torch.equal(vq_assign(x, codebook, metric=metric), expected(x, codebook, metric))


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_segments_and_strides(metric):
    x, codebooks = normal(7, 90, 12), normal(4, 3, 3)
    for rows in (x, x.transpose(0, 1), x[:, ::2], x.flip(-1)):
        assert torch.equal(vq_assign(rows, codebooks, metric=metric), expected(rows, codebooks, metric))
        assert torch.equal(vq_assign(rows, codebooks[0], metric=metric), expected(rows, codebooks[0], metric))


@pytest.mark.parametrize("k", [4, 10, 16])
def test_rows_between_two_codewords(k):
    """Float32 scores cannot tell these codewords apart."""
    codebook, (a, b) = normal(k, 200), torch.randint(k, (2, 500), generator=torch.Generator().manual_seed(0))
    x = (codebook[a] + codebook[b]) / 2
    assert torch.equal(vq_assign(x, codebook), expected(x, codebook))


def test_ties_go_to_the_lowest_index_and_nan_to_the_first():
    codebook = normal(2, 5).repeat(2, 1)
    x = codebook[:2].repeat(30, 1)
    x[7] = torch.nan
    x[9, 3] = torch.inf
    found = vq_assign(x, codebook)[:, 0]
    assert torch.equal(found, expected(x, codebook)[:, 0])
    assert found[7] == found[9] == 0
    assert torch.equal(found[10:], torch.arange(50) % 2)


@pytest.mark.parametrize("rows", [3, 20])
def test_codewords_longer_than_any_bound_in_float32(rows):
    d = 70_000
    x, codebook = normal(rows, d), normal(6, d)
    assert torch.equal(vq_assign(x, codebook), expected(x, codebook))


@pytest.mark.parametrize(("n", "d", "k"), [(500, 2, 8), (40, 3000, 3), (60, 2000, 12)])
def test_fits_have_the_bits_of_the_reference(n, d, k):
    x = normal(n, d)
    found = kmeans(x, k, max_iter=3, tol=0)
    with uefl_kernels.backend("reference"):
        right = kmeans(x, k, max_iter=3, tol=0)
    for piece, other in zip(found, right, strict=True):
        assert torch.equal(piece, other)


def test_a_row_that_is_not_finite_is_refused_in_a_prediction():
    model = KMeans(3, random_state=0).fit(normal(50, 4))
    for bad in (torch.nan, torch.inf):
        x = normal(60, 4)
        x[51, 2] = bad
        for call in (model.predict, model.transform, model.score):
            with pytest.raises(ValueError, match=r"KMeans: X .*NaN"):
                call(x)
