"""``kmeans_labels`` and ``kmeans_distances``, which ``KMeans`` applies to rows after a fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from uefl_kernels import COMPILED, KMeans, backend
from uefl_kernels.ops.kmeans_labels import kmeans_distances, kmeans_labels, kmeans_labels_and_squares

from .conftest import normal

SHAPES = [(1, 1, 1), (7, 3, 5), (300, 17, 9), (500, 64, 33), (70, 131, 6), (2000, 2, 8)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def centers_of(x, k):
    return normal(k, x.shape[1], seed=1).to(torch.float64 if x.dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "d", "k"), SHAPES)
def test_the_bits_of_the_definition(n, d, k, dtype):
    wide = normal(n, 2 * d).to(dtype)
    for x in (wide[:, :d].contiguous(), wide[:, ::2], wide[:, :d].contiguous().T.contiguous().T):
        centers = centers_of(x, k)
        labels, squares = kmeans_labels_and_squares(x, centers)
        distances = kmeans_distances(x, centers)
        with backend("reference"):
            expected = kmeans_labels_and_squares(x, centers)
            assert torch.equal(distances, kmeans_distances(x, centers))
        assert torch.equal(labels, expected[0])
        assert torch.equal(squares, expected[1])
        assert torch.equal(kmeans_labels(x, centers), labels)
        assert distances.dtype == centers.dtype
        truth = torch.cdist(x.double(), centers.double(), compute_mode="donot_use_mm_for_euclid_dist")
        torch.testing.assert_close(distances.double(), truth, rtol=1e-6, atol=0)
        torch.testing.assert_close(squares, truth.amin(1).square(), rtol=1e-12, atol=0)


def test_the_bits_do_not_depend_on_the_threads():
    x = normal(5000, 33)
    centers = centers_of(x, 20)
    expected = [*kmeans_labels_and_squares(x, centers), kmeans_distances(x, centers)]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for one, other in zip(
                [*kmeans_labels_and_squares(x, centers), kmeans_distances(x, centers)], expected, strict=True
            ):
                assert torch.equal(one, other)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("on", ["auto", "reference"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("n", "d", "k"), [(50, 6, 4), (900, 70, 40), (300, 33, 200)])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(n, d, k, value, on):
    for dtype in DTYPES:
        x = normal(n, d).to(dtype)
        centers = centers_of(x, k)
        for row, column in ((0, 0), (n - 1, d - 1), (n // 2, d // 3)):
            broken = x.clone()
            broken[row, column] = value
            for op in (kmeans_labels, kmeans_labels_and_squares, kmeans_distances):
                with backend(on), pytest.raises(RuntimeError, match=r"^kmeans_labels: x .*NaN"):
                    op(broken, centers)


def test_large_numbers_are_finite():
    """Rows with squares that overflow float32 are accepted.

    Values above 2^480, with squares that overflow float64, are not.
    """
    x = normal(300, 9) * 1e30
    model = KMeans(4, random_state=0).fit(x)
    assert torch.equal(model.predict(x), model.labels_)
    assert bool(torch.isfinite(model.transform(x)).all())
    assert model.score(x) == pytest.approx(-model.inertia_, rel=1e-12)
    wide = x.double()
    wide[7, 3] = 1e200
    for method in (model.predict, model.transform, model.score):
        with pytest.raises(ValueError, match=r"^KMeans: X .*2\^480"):
            method(wide)


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("options", [{}, {"metric": "cosine"}], ids=str)
def test_every_method_refuses_non_finite_values(options, make):
    x = normal(200, 5).numpy()
    model = KMeans(4, random_state=0, **options).fit(x)
    for value in (np.nan, np.inf):
        broken = x.copy()
        broken[199, 4] = value
        for method in (
            model.predict,
            model.transform,
            model.score,
            model.partial_fit,
            KMeans(4, **options).fit,
        ):
            with pytest.raises(ValueError, match=r"^KMeans: X .*NaN.*rows$"):
                method(make(broken))


def test_score_is_minus_the_inertia_to_the_bit():
    for dtype in (np.float32, np.float64):
        x = normal(700, 11).numpy().astype(dtype)
        model = KMeans(6, random_state=0).fit(x)
        assert model.score(x) == -model.inertia_


@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
def test_opcheck():
    x, centers = normal(30, 5), normal(4, 5, seed=1)
    torch.library.opcheck(torch.ops.uefl.kmeans_labels.default, (x, centers, True))
    torch.library.opcheck(torch.ops.uefl.kmeans_labels.default, (x, centers, False))
    torch.library.opcheck(torch.ops.uefl.kmeans_distances.default, (x, centers.double()))
