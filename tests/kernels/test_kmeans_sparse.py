"""Sparse rows: centers and labels equal the ones of dense rows bit for bit, and few rows are made dense."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from uefl_kernels import KMeans
from uefl_kernels.ops.kmeans import sparse

DATA = sp.random_array((400, 60), density=0.07, rng=np.random.default_rng(0), format="csr")
CENTERS = DATA[:9].toarray()
OPTIONS = {
    "k-means++": {},
    "k-means||": {"init": "k-means||"},
    "random": {"init": "random", "n_init": 3},
    "given": {"init": CENTERS},
    "cosine": {"metric": "cosine"},
    "cosine, k-means||": {"metric": "cosine", "init": "k-means||"},
    "no tol": {"tol": 0.0, "max_iter": 7},
    "verbose": {"verbose": 1},
    "empty clusters": {"init": np.concatenate([CENTERS[:4], np.full((5, 60), 50.0) + np.arange(5)[:, None]])},
}


def equal(one, other):
    for name in ("cluster_centers_", "labels_", "counts_", "n_iter_"):
        a, b = np.asarray(getattr(one, name)), np.asarray(getattr(other, name))
        assert np.array_equal(a, b), name
        assert a.dtype == b.dtype, name
    assert one.inertia_ == pytest.approx(other.inertia_, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("case", OPTIONS)
def test_the_bits_of_dense_rows(case, dtype):
    x = (DATA * 10).astype(dtype) if dtype is np.int64 else DATA.astype(dtype)
    dense = x.toarray()
    model = KMeans(9, random_state=3, **OPTIONS[case]).fit(x)
    expected = KMeans(9, random_state=3, **OPTIONS[case]).fit(dense)
    equal(model, expected)
    assert np.array_equal(model.predict(x), expected.predict(dense))
    assert model.predict(x).dtype == np.int64
    assert model.score(x) == pytest.approx(expected.score(dense), rel=1e-12)
    weights = np.arange(400.0)
    assert model.score(x, sample_weight=weights) == pytest.approx(
        expected.score(dense, sample_weight=weights), rel=1e-12
    )
    found, truth = model.transform(x), expected.transform(dense)
    assert found.dtype == truth.dtype
    np.testing.assert_allclose(found, truth, rtol=1e-6 if found.dtype == np.float32 else 1e-9)


@pytest.mark.parametrize("make", [sp.csr_matrix, sp.csr_array, sp.csc_array, sp.coo_array, sp.lil_matrix])
def test_every_format(make):
    equal(KMeans(9, random_state=3).fit(make(DATA)), KMeans(9, random_state=3).fit(DATA.toarray()))


def test_columns_of_every_kind():
    """The columns are full, of one sign, far from zero, constant or empty; some rows are zero; entries repeat
    or are zero."""
    rng = np.random.default_rng(1)
    dense = rng.standard_normal((300, 12)) * (rng.random((300, 12)) < 0.3)
    dense[:, 0], dense[:, 1], dense[:, 2], dense[:, 3] = 5 + rng.random(300), -rng.random(300), 7.0, 0.0
    dense[:, 4] *= 1e6
    for x in (dense, np.where(np.arange(300)[:, None] % 3 == 0, 0.0, dense)):
        equal(KMeans(7, random_state=0).fit(sp.csr_array(x)), KMeans(7, random_state=0).fit(x))
    twice = sp.coo_array((np.array([1.0, 2.0, 0.0, 3.0]), ([0, 0, 1, 2], [1, 1, 0, 1])), shape=(4, 2)).tocsr()
    before = twice.copy()
    equal(KMeans(2, random_state=0).fit(twice), KMeans(2, random_state=0).fit(twice.toarray()))
    assert np.array_equal(twice.data, before.data)


@pytest.mark.filterwarnings("ignore:Number of distinct clusters")
@pytest.mark.parametrize("seed", range(40))
def test_equal_rows_and_ties(seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(-1, 2, (rng.integers(2, 60), rng.integers(1, 6))) * (rng.random() < 0.8)
    k = int(rng.integers(1, min(9, len(x)) + 1))
    options = {"init": ["k-means++", "k-means||", "random"][seed % 3], "random_state": seed}
    dense = KMeans(k, **options).fit(x.astype(float))
    equal(KMeans(k, **options).fit(sp.csr_array(x.astype(float))), dense)
    assert np.array_equal(dense.predict(sp.csr_array(x.astype(float))), dense.predict(x.astype(float)))


def test_no_label_is_wrong_where_float64_products_cannot_tell():
    """Rows next to the middle of two centers, by less than the rounding of |c|^2 - 2 x.c."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((2, 50)) * 1e4
    x = np.zeros((200, 50))
    x[:] = centers.mean(0)
    x[:, 7] += rng.standard_normal(200) * 1e-9
    model = KMeans(2, init=centers, max_iter=1).fit(centers)
    assert np.array_equal(model.predict(sp.csr_array(x)), model.predict(x))
    truth = ((x[:, None].astype(np.longdouble) - centers.astype(np.longdouble)) ** 2).sum(2).argmin(1)
    assert len(set(truth)) == 2


def test_distances_that_cancel_are_computed_from_rows():
    x = sp.csr_array(np.array([[1e8, 0.0, 1.0], [1e8, 0.0, 2.0], [0.0, 3.0, 0.0]]))
    model = KMeans(3, init=x.toarray() + 1e-3, max_iter=1, tol=0).fit(x)
    np.testing.assert_allclose(model.transform(x), model.transform(x.toarray()), rtol=1e-9)


def test_only_rows_in_doubt_are_made_dense(monkeypatch):
    seen = []
    take = sparse.SparseRows.take
    monkeypatch.setattr(sparse, "resolve", lambda name, x: pytest.fail(name) if name == "vq_assign" else None)
    monkeypatch.setattr(
        sparse.SparseRows, "take", lambda self, numbers: seen.append(len(numbers)) or take(self, numbers)
    )
    model = KMeans(9, random_state=0).fit(DATA)
    assert sum(seen) == 9  # the rows to begin with
    model.predict(DATA)
    assert sum(seen) == 9


def close(one, other):
    """Compare like ``equal``, with centers up to rounding."""
    np.testing.assert_allclose(one.cluster_centers_, other.cluster_centers_, rtol=1e-13, atol=1e-15)
    for name in ("labels_", "counts_", "n_iter_"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert one.inertia_ == pytest.approx(other.inertia_, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("case", OPTIONS)
def test_with_weights_too(case):
    weights = np.random.default_rng(1).random(400) * 7
    weights[3:60:7] = 0
    full = sp.csr_array(DATA + sp.eye_array(400, 60))  # a row of zeros is as far from all unit centers
    full = full[np.diff(full.indptr) > 0] if case.startswith("cosine") else DATA
    weights = weights[: full.shape[0]]
    for x in (full, full.astype(np.float32)):
        sparse_fit, dense_fit = (
            KMeans(9, random_state=0, **OPTIONS[case]).fit(rows, sample_weight=weights)
            for rows in (x, x.toarray())
        )
        close(sparse_fit, dense_fit)


def test_weights_keep_the_rows_sparse(monkeypatch):
    monkeypatch.setattr(sparse, "resolve", lambda name, x: pytest.fail(name) if name == "vq_assign" else None)
    take, seen = sparse.SparseRows.take, []
    monkeypatch.setattr(
        sparse.SparseRows, "take", lambda self, numbers: seen.append(len(numbers)) or take(self, numbers)
    )
    KMeans(9, random_state=0).fit(DATA, sample_weight=np.arange(1.0, 401.0))
    assert sum(seen) == 9  # the rows to begin with


def test_equal_weights_are_none():
    fits = [
        KMeans(9, random_state=0).fit(DATA, sample_weight=weights) for weights in (None, np.full(400, 4.0))
    ]
    np.testing.assert_allclose(fits[0].cluster_centers_, fits[1].cluster_centers_, rtol=1e-13, atol=1e-15)
    assert np.array_equal(fits[0].labels_, fits[1].labels_)


def test_empty_clusters_with_weights():
    x = sp.csr_array(np.repeat(np.eye(6, 30), 20, 0) * np.linspace(1, 2, 120)[:, None])
    weights = np.tile([0.0, 1.0, 2.5], 40)
    init = np.vstack([x[:2].toarray(), np.full((4, 30), 50.0)])
    sparse_fit, dense_fit = (
        KMeans(6, init=init, max_iter=4, tol=0).fit(rows, sample_weight=weights) for rows in (x, x.toarray())
    )
    close(sparse_fit, dense_fit)


def test_the_bits_do_not_depend_on_the_threads():
    expected = KMeans(9, random_state=0).fit(DATA)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            model = KMeans(9, random_state=0).fit(DATA)
            equal(model, expected)
            assert model.inertia_ == expected.inertia_
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200])
def test_what_cannot_be_clustered_is_refused(value):
    broken = DATA.copy()
    broken.data[17] = value
    model = KMeans(3, random_state=0).fit(DATA)
    for call in (KMeans(3).fit, model.predict, model.transform, model.score):
        with pytest.raises(ValueError, match=r"^KMeans: X holds"):
            call(broken)
    with pytest.raises(ValueError, match=r"X .*7 features.*KMeans.*60"):
        model.predict(DATA[:, :7])
