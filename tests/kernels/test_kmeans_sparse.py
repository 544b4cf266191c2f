"""Sparse rows give the same bits of centers and labels as dense rows, and few rows are made dense."""

from __future__ import annotations

import types

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from uefl_kernels import COMPILED, KMeans, ResidualKMeans, backend
from uefl_kernels.estimator import _data
from uefl_kernels.estimator._data import sparse_rows_of
from uefl_kernels.ops import kmeans_sparse
from uefl_kernels.ops.kmeans_sparse import composed, reference

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
    """The columns are full, of one sign, far from zero, constant or empty, and some rows are zero.

    Entries repeat or are zero.
    """
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


def test_labels_are_right_if_float64_products_are_too_close():
    """Rows lie so close to the middle of two centers that rounding exceeds the difference.

    This is the rounding of |c|^2 - 2 x.c.
    """
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
    rows = *map(torch.from_numpy, (x.data, x.indices)), torch.from_numpy(x.indptr).long()
    centers = torch.from_numpy(x.toarray()) + 8.3
    found = composed.distances(composed.SearchArguments(*rows, centers))
    np.testing.assert_allclose(found.diagonal(), [3**0.5 * 8.3] * 3, rtol=1e-7)


def without_kernels(monkeypatch):
    """Run the ops in plain PyTorch, and return a list of how many rows become dense at a time.

    A search of dense rows fails the test.
    """
    seen, take = [], composed.SparseRows.take
    names = {
        "kmeans_sparse": lambda *args: composed.fallback(composed.Arguments(*args)),
        "kmeans_sparse_labels": lambda *args: composed.labels(composed.SearchArguments(*args)),
        "kmeans_sparse_products": lambda *args: composed.products(composed.SearchArguments(*args)),
    }
    monkeypatch.setattr(composed, "kernels", lambda: types.SimpleNamespace(**names))
    monkeypatch.setattr(composed, "resolve", lambda name, x: pytest.fail(name))
    monkeypatch.setattr(
        composed.SparseRows, "take", lambda self, numbers: seen.append(len(numbers)) or take(self, numbers)
    )
    return seen


def test_only_open_rows_are_made_dense(monkeypatch):
    seen = without_kernels(monkeypatch)
    model = KMeans(9, init=CENTERS).fit(DATA)
    model.predict(DATA)
    assert seen == []
    KMeans(9, random_state=0, max_iter=2).fit(DATA)
    assert sum(seen) == 9 + 1 + 8 * 4  # the centers, the first seed, and 4 candidates for each other seed


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
    seen = without_kernels(monkeypatch)
    KMeans(9, init=CENTERS).fit(DATA, sample_weight=np.arange(1.0, 401.0))
    assert seen == []


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


def test_complex_input_is_refused():
    """SciPy would discard the imaginary parts."""
    model = KMeans(3, random_state=0).fit(DATA)
    for call in (KMeans(3).fit, model.predict, model.transform, model.score):
        with pytest.raises(ValueError, match=r"Complex .*KMeans"):
            call(DATA.astype(complex))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200])
def test_invalid_input_is_refused(value):
    broken = DATA.copy()
    broken.data[17] = value
    model = KMeans(3, random_state=0).fit(DATA)
    for call in (KMeans(3).fit, model.predict, model.transform, model.score):
        with pytest.raises(ValueError, match=r"^KMeans: X "):
            call(broken)
    with pytest.raises(ValueError, match=r"X .*7 features.*KMeans.*60"):
        model.predict(DATA[:, :7])


def implementations(op):
    """Yield the kernel, plain PyTorch and the definition of an op, as functions of its arguments."""
    kind = composed.Arguments if op == "kmeans_sparse" else composed.SearchArguments
    plain = {
        "kmeans_sparse": composed.fallback,
        "kmeans_sparse_labels": composed.labels,
        "kmeans_sparse_distances": composed.distances,
        "kmeans_sparse_products": composed.products,
    }
    yield getattr(torch.ops.uefl, op)
    yield lambda *args: plain[op](kind(*args))
    yield lambda *args: getattr(reference, op)(kind(*args))


def random_rows(seed, n=90, d=37, integers=False):
    """Return rows of which some are empty, some equal and some full, with zeros among their entries."""
    rng = np.random.default_rng(seed)
    dense = (rng.integers(-2, 3, (n, d)) if integers else rng.standard_normal((n, d))).astype(float)
    dense[rng.random((n, d)) < rng.random((n, 1))] = 0
    dense[::7], dense[3::11] = 0, dense[5]
    matrix = sp.csr_array(dense)
    matrix.data[::13] = 0
    return matrix


@pytest.mark.every_variant
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("k", [1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 65, 90])
def test_implementations_agree(k, dtype):
    for seed in range(4):
        matrix = random_rows(seed, integers=seed % 2 == 1).astype(dtype)
        rows = sparse_rows_of("KMeans", matrix)
        centers = rows.take(torch.randperm(90, generator=torch.Generator().manual_seed(seed))[:k])
        if seed > 1:
            centers = centers + torch.randn(centers.shape, generator=torch.Generator().manual_seed(9)) / 8
        centers = centers.to(rows.dtype)
        truth = ((matrix.toarray()[:, None].astype(float) - centers.double().numpy()) ** 2).sum(2)
        for op in implementations("kmeans_sparse_labels"):
            labels, squares = op(*rows.format, centers.double())
            assert np.array_equal(labels, truth.argmin(1))
            np.testing.assert_allclose(squares, truth.min(1), rtol=1e-10, atol=1e-12)
        for op in implementations("kmeans_sparse_distances"):
            found = op(*rows.format, centers.double())
            assert found.dtype == rows.dtype
            rtol = 1e-6 if dtype is np.float32 else 1e-8
            np.testing.assert_allclose(found, np.sqrt(truth), rtol=rtol)
        for op in implementations("kmeans_sparse_products"):
            found = op(*rows.format, centers.double())
            assert found.dtype == torch.float64
            np.testing.assert_allclose(
                found, matrix.toarray().astype(float) @ centers.double().numpy().T, atol=1e-9
            )


@pytest.mark.every_variant
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("spherical", [False, True])
@pytest.mark.parametrize("tol", [0.0, 1e-3])
def test_implementations_of_a_fit_agree(tol, spherical, weighted):
    for seed in range(6):
        rows = sparse_rows_of("KMeans", random_rows(seed, integers=seed % 2 == 1))
        rows = rows.unit() if spherical else rows
        init = rows.take(torch.arange(6)).clone()
        if seed > 3:
            init[3:] += 40  # empty clusters
        weights = torch.rand(90, generator=torch.Generator().manual_seed(seed)).double() if weighted else None
        given = (*rows.format, init, weights, spherical, 30, tol)
        kernel, plain, definition = (op(*given) for op in implementations("kmeans_sparse"))
        for one, other in ((kernel, plain), (kernel, definition)):
            if weighted and spherical and other is definition:
                continue  # a row of zeros is as far from all centers, up to their rounding
            if weighted and other is definition:
                np.testing.assert_allclose(one[0], other[0], rtol=1e-12, atol=1e-14)
            else:
                assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
            assert float(one[2]) == pytest.approx(float(other[2]), rel=1e-12, abs=1e-12)
            assert int(one[3]) == int(other[3])


def test_formats_of_the_indices():
    expected = KMeans(9, random_state=3).fit(DATA.toarray())
    wide = DATA.copy()
    wide.indices, wide.indptr = wide.indices.astype(np.int64), wide.indptr.astype(np.int64)
    mixed = DATA.copy()
    for row in range(0, 400, 3):
        piece = slice(*mixed.indptr[row : row + 2])
        mixed.indices[piece], mixed.data[piece] = (
            mixed.indices[piece][::-1].copy(),
            mixed.data[piece][::-1].copy(),
        )
    mixed.has_sorted_indices = mixed.has_canonical_format = False
    locked = DATA.copy()
    for array in (locked.data, locked.indices, locked.indptr):
        array.flags.writeable = False
    swapped = DATA.copy()
    swapped.data = swapped.data.astype(">f8")
    for matrix in (wide, mixed, locked, swapped):
        equal(KMeans(9, random_state=3).fit(matrix), expected)
        assert np.array_equal(expected.predict(matrix), expected.labels_)


def test_flags_that_are_no_longer_true():
    """A matrix remembers that it has no duplicates, also after its arrays have changed."""
    x = np.kron(np.eye(4), np.ones((3, 1))) + 1
    halves = np.repeat(x.ravel() / 2, 2), np.repeat(np.tile(np.arange(4), 12), 2), np.arange(0, 97, 8)
    matrix = sp.csr_matrix(halves, shape=x.shape)
    matrix.has_sorted_indices = matrix.has_canonical_format = True
    found, expected = (KMeans(3, init=x[:9:3], n_init=1).fit(rows) for rows in (matrix, x))
    assert found.inertia_ == pytest.approx(expected.inertia_)
    for name in ("auto", "reference"):
        with backend(name):
            assert np.array_equal(expected.predict(matrix), expected.labels_)
            assert np.allclose(expected.transform(matrix), expected.transform(x), atol=1e-7)
    assert matrix.nnz == 96


@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
def test_only_the_op_reads_the_columns_of_rows_in_order(monkeypatch):
    model = KMeans(5, n_init=1, random_state=0).fit(DATA)
    monkeypatch.setattr(_data, "_in_order", None)
    for method in ("predict", "transform", "score"):
        getattr(model, method)(DATA)


@pytest.mark.parametrize("method", ["fit", "predict", "transform", "score"])
@pytest.mark.parametrize("kind", ["csr", "csc", "bsr"])
@pytest.mark.parametrize(
    ("part", "place", "value"), [("indices", 0, 9), ("indices", 3, -2), ("indptr", 1, -3), ("indptr", -1, 99)]
)
def test_a_damaged_matrix_is_refused(part, place, value, kind, method):
    """SciPy would read outside of its arrays."""
    x = np.arange(24.0).reshape(6, 4) + 1
    for model in (KMeans(2, random_state=0), ResidualKMeans(2, 2)):
        matrix = sp.csr_array(x).asformat(kind)
        getattr(matrix, part)[place] = value
        if hasattr(model, method):
            with pytest.raises(ValueError, match=rf"^{type(model).__name__}: X .*sparse"):
                getattr(model.fit(x), method)(matrix)


def test_ties_go_to_the_lowest_center():
    """Rows of zeros have the same distance to all centers of length 1.

    Other rows have the same distance to two equal centers.
    """
    centers = np.eye(6, 40)
    centers[4] = centers[1]
    x = np.zeros((30, 40))
    x[10:20, 1], x[20:, 30] = 2.0, np.arange(10)
    model = KMeans(6, init=np.eye(6, 40), max_iter=1).fit(np.eye(6, 40))
    model.cluster_centers_ = centers
    labels = model.predict(sp.csr_array(x))
    assert np.array_equal(labels, model.predict(x))
    assert np.array_equal(labels[:20], np.repeat([0, 1], 10))


def test_tiny_and_large_values():
    rng = np.random.default_rng(0)
    for size in (1e-161, 1e-155, 1e-40, 1e140):
        x = rng.integers(-3, 4, (60, 9)) * (rng.random((60, 9)) < 0.4) * size
        rows, centers = sparse_rows_of("KMeans", sp.csr_array(x)), torch.from_numpy(x[:7].copy())
        with backend("reference"):
            expected = kmeans_sparse.kmeans_sparse_labels(rows, centers)[0]
        assert torch.equal(kmeans_sparse.kmeans_sparse_labels(rows, centers)[0], expected)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (3, 5)])
def test_matrices_without_entries(shape):
    for x in (sp.csr_array(shape), sp.csr_array(np.ones(shape))):
        equal(KMeans(1, random_state=0).fit(x), KMeans(1, random_state=0).fit(x.toarray()))


@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
def test_indices_out_of_range_are_refused():
    rows = sparse_rows_of("KMeans", DATA)
    values, columns, offsets = rows.format
    centers = torch.from_numpy(CENTERS)
    high, low, long = columns.clone(), columns.clone(), offsets.clone()
    high[offsets[1] - 1], low[0], long[7] = 60, -1, 10**6  # the last and the first column of a row
    for broken in ((values, high, offsets), (values, low, offsets), (values, columns, long)):
        with pytest.raises(RuntimeError, match=r"^kmeans_sparse: columns .*\b0\b.*\bd - 1\b.*offsets"):
            torch.ops.uefl.kmeans_sparse_labels(*broken, centers)
    with pytest.raises(RuntimeError, match=r"^kmeans_sparse: .*\[k, d\]"):
        torch.ops.uefl.kmeans_sparse(values, columns, offsets, centers.float(), None, False, 3, 0.0)


@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
def test_opcheck():
    rows, centers = sparse_rows_of("KMeans", random_rows(0)), torch.randn(3, 37).double()
    torch.library.opcheck(torch.ops.uefl.kmeans_sparse.default, (*rows.format, centers, None, False, 3, 0.0))
    for kind in ("labels", "distances", "products"):
        op = getattr(torch.ops.uefl, f"kmeans_sparse_{kind}")
        torch.library.opcheck(op.default, (*rows.format, centers))


def test_order_of_the_columns():
    """Random matrices, of which some have empty rows, equal or falling columns, or columns out of range."""
    rng, found = np.random.default_rng(0), set()
    for _ in range(400):
        sizes, d = rng.integers(0, 4, rng.integers(1, 6)), int(rng.integers(3, 6))
        columns = [np.sort(rng.choice(d, min(size, d), replace=False)) for size in sizes]
        offsets = np.cumsum([0, *map(len, columns)])
        indices = np.concatenate([*columns, np.empty(0)]).astype(np.int32)
        if len(indices) and rng.random() < 0.6:
            indices[rng.integers(len(indices))] = rng.integers(-1, d + 1)
        matrix = sp.csr_array((np.ones(len(indices)), indices, offsets), shape=(len(sizes), d))
        inside = len(indices) == 0 or (indices.min() >= 0 and indices.max() < d)
        assert _data._in_order(matrix) == (inside and bool(matrix.has_canonical_format))
        found.add((inside, bool(matrix.has_canonical_format)))
    assert len(found) == 4


@pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("method", ["fit", "predict", "transform", "score", "fit_predict"])
def test_the_matrix_is_never_made_dense(method, metric, monkeypatch):
    model, made, dense = KMeans(9, random_state=0, metric=metric).fit(DATA), [0], type(DATA).toarray
    monkeypatch.setattr(type(DATA), "toarray", lambda self: made.append(self.shape[0]) or dense(self))
    getattr(model, method)(DATA)
    assert max(made) <= 9  # centers


@pytest.mark.parametrize("method", ["fit", "predict", "transform", "score"])
def test_a_sound_matrix_is_not_checked_by_scipy(method, monkeypatch):
    """SciPy's full check and its test of the order take longer than 5 % of a search."""
    model, full = KMeans(9, random_state=0).fit(DATA), []
    check = type(DATA).check_format
    monkeypatch.setattr(
        type(DATA),
        "check_format",
        lambda self, full_check=True: (full.append(full_check), check(self, False)),
    )
    getattr(model, method)(DATA)
    assert full == [False] * len(full)
    assert full
