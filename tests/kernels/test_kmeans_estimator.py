"""``KMeans`` follows scikit-learn's conventions, on arrays and tensors.

Its front end also works without torch.
"""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse
import torch

from uefl_kernels import COMPILED, KMeans, ResidualKMeans, backend, collision_report, kmeans, vq_assign
from uefl_kernels._version import __version__

from .conftest import normal

DATA = np.random.default_rng(0).standard_normal((200, 5)).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_in_arrays_out(dtype):
    x = DATA.astype(dtype)
    model = KMeans(4, random_state=3).fit(x)
    expected = kmeans(torch.from_numpy(x), 4, seed=3)
    assert type(model.cluster_centers_) is np.ndarray
    assert model.cluster_centers_.dtype == dtype
    assert np.array_equal(model.cluster_centers_, expected.centers.numpy())
    assert np.array_equal(model.labels_, expected.labels.numpy())
    assert (model.inertia_, model.n_iter_) == (float(expected.inertia), int(expected.iterations))
    assert np.array_equal(model.predict(x), model.labels_)
    assert model.score(x) == pytest.approx(-model.inertia_)
    distances = model.transform(x)
    assert np.array_equal(distances.argmin(1), model.labels_)
    assert distances.dtype == dtype
    assert (distances.min(1) ** 2).sum() == pytest.approx(model.inertia_, rel=1e-5)
    assert np.array_equal(KMeans(4, random_state=3).fit_predict(x), model.labels_)
    assert np.array_equal(KMeans(4, random_state=3).fit_transform(x), distances)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tensors_in_tensors_out(dtype):
    x = torch.from_numpy(DATA).to(dtype)
    model = KMeans(4, random_state=3).fit(x)
    assert isinstance(model.cluster_centers_, torch.Tensor)
    assert isinstance(model.labels_, torch.Tensor)
    assert torch.equal(model.predict(x), model.labels_)
    assert torch.equal(model.labels_, vq_assign(x, model.cluster_centers_)[:, 0])
    assert model.transform(x).shape == (200, 4)


@pytest.mark.parametrize(
    "model", [KMeans(3, random_state=0), ResidualKMeans(2, 3, random_state=0)], ids=lambda m: type(m).__name__
)
def test_a_pickle_of_another_version_warns(model, recwarn):
    model.fit(DATA)
    for same in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), copy.copy(model)):
        assert vars(same).keys() == vars(model).keys()
        assert np.array_equal(same.predict(DATA), model.predict(DATA))
    assert not recwarn
    state = model.__getstate__()
    assert state.pop("_uefl_version") == __version__
    for version, said in ({"_uefl_version": "0.0.1"}, r"0\.0\.1"), ({}, "unknown"):
        other = type(model)()
        with pytest.warns(UserWarning, match=rf"{type(model).__name__} .*{said}.*{re.escape(__version__)}"):
            other.__setstate__(state | version)
        assert np.array_equal(other.predict(DATA), model.predict(DATA))


def test_lists_frames_and_strange_arrays():
    expected = KMeans(3, random_state=0).fit(DATA[:20].astype(np.float64)).labels_
    for x in (
        DATA[:20].tolist(),
        DATA[:20].astype(">f4").astype(np.float64),
        np.asfortranarray(DATA[:20].astype(np.float64)),
    ):
        assert np.array_equal(KMeans(3, random_state=0).fit(x).labels_, expected)
    reverse = KMeans(3, random_state=0).fit(DATA[:20].astype(np.float64)[::-1][::-1])
    assert np.array_equal(reverse.labels_, expected)
    assert KMeans(2, random_state=0).fit(np.arange(12).reshape(6, 2)).cluster_centers_.dtype == np.float64


def test_both_byte_orders_and_empty_masks():
    x, weights = DATA.astype(">f4"), np.arange(200.0)
    expected = KMeans(3, init=DATA[:3], random_state=0).fit(DATA, sample_weight=weights)
    model = KMeans(3, init=x[:3].astype(">f8"), random_state=0).fit(x, sample_weight=weights.astype(">f8"))
    assert np.array_equal(model.cluster_centers_, expected.cluster_centers_)
    assert np.array_equal(model.predict(np.ma.asarray(DATA)), expected.labels_)


def test_masked_values_are_refused():
    masked = np.ma.masked_less(DATA, -1.0)
    fitted = KMeans(3, random_state=0).fit(DATA)
    for name, call in {
        "X": lambda: fitted.predict(masked),
        "sample_weight": lambda: KMeans(3).fit(DATA, sample_weight=masked[:, 0]),
        "init": lambda: KMeans(3, init=masked[:3]).fit(DATA),
    }.items():
        with pytest.raises(TypeError, match=f"^KMeans: {name} .*masked"):
            call()


def test_metric_cosine_predicts_what_it_fitted():
    for x in (DATA, DATA.astype(np.float64)):
        model = KMeans(5, metric="cosine", random_state=0).fit(x)
        assert np.array_equal(model.predict(x), model.labels_)
        assert np.array_equal(model.predict(x * 8), model.labels_)
        assert model.score(x) == pytest.approx(-model.inertia_)


@pytest.mark.parametrize("kind", [np.array, scipy.sparse.csr_array])
def test_a_metric_set_later_is_for_the_next_fit(kind):
    x = kind(DATA + 3)
    for metric, other in (("l2", "cosine"), ("cosine", "l2")):
        model = KMeans(5, metric=metric, random_state=0).fit(x)
        before = model.predict(x), model.transform(x), model.score(x)
        model.set_params(metric=other)
        for value, found in zip(before, (model.predict(x), model.transform(x), model.score(x)), strict=True):
            assert np.array_equal(found, value)
        expected = KMeans(5, metric=other, random_state=0).fit(x).labels_
        assert np.array_equal(model.fit(x).labels_, expected)


def test_missing_dates_are_refused():
    days = np.arange(8).reshape(-1, 1).astype("M8[D]")
    assert KMeans(2, init=days[[0, 7]]).fit(days).cluster_centers_.tolist() == [[1.5], [5.5]]
    days[3] = np.datetime64("NaT")
    for x in (days, days - days[0], list(days)):
        with pytest.raises(ValueError, match=r"^KMeans: X .*NaN"):
            KMeans(2).fit(x)
    with pytest.raises(ValueError, match=r"^KMeans: init .*finite"):
        KMeans(2, init=days[2:4]).fit(days[:3])


def test_sample_weight_moves_the_centers():
    model = KMeans(1).fit(np.array([[0.0], [1.0]]), sample_weight=[3.0, 1.0])
    assert model.cluster_centers_.item() == 0.25
    assert model.score(np.array([[0.0], [1.0]]), sample_weight=np.array([3.0, 1.0])) == -(
        3 * 0.25**2 + 0.75**2
    )


def test_centers_of_integers():
    start = np.arange(10).reshape(2, 5)
    expected = KMeans(2, init=start.astype(np.float32)).fit(DATA)
    for init in (start, torch.from_numpy(start), start.tolist()):
        assert np.array_equal(KMeans(2, init=init).fit(DATA).cluster_centers_, expected.cluster_centers_)


def test_transform_does_not_overflow():
    x = DATA * np.float32(1e30)
    model = KMeans(2, random_state=0).fit(x)
    expected = np.linalg.norm(x[:, None].astype(float) - model.cluster_centers_[None].astype(float), axis=2)
    assert model.transform(x).dtype == np.float32
    np.testing.assert_allclose(model.transform(x), expected, rtol=1e-6)


def test_random_state():
    def centers(state):
        return KMeans(6, random_state=state).fit(DATA).cluster_centers_

    assert np.array_equal(centers(np.random.RandomState(1)), centers(np.random.RandomState(1)))
    assert np.array_equal(centers(np.random.default_rng(1)), centers(np.random.default_rng(1)))
    torch.manual_seed(5)
    first = centers(None)
    second = centers(None)
    torch.manual_seed(5)
    assert np.array_equal(centers(None), first)
    assert not np.array_equal(first, second)


def test_parameters():
    model = KMeans(3, init=DATA[:3])
    assert model.get_params() | {"init": None} == {
        "n_clusters": 3,
        "init": None,
        "n_init": "auto",
        "max_iter": 300,
        "tol": 1e-4,
        "random_state": None,
        "metric": "l2",
        "verbose": 0,
        "copy_x": True,
        "algorithm": "lloyd",
    }
    assert model.set_params(max_iter=5, tol=0.0) is model
    assert (model.max_iter, model.tol) == (5, 0.0)
    assert repr(KMeans(3, max_iter=5)) == "KMeans(max_iter=5, n_clusters=3)"
    assert model.fit(DATA).n_iter_ <= 5
    with pytest.raises(ValueError, match=r"(?s)'k'.*KMeans.*\['algorithm'"):
        model.set_params(k=3)


def test_scikit_learns_parameters_that_change_nothing():
    before = DATA.copy()
    expected = KMeans(6, random_state=0).fit(DATA)
    for options in ({"algorithm": "elkan"}, {"copy_x": False}, {"algorithm": "lloyd", "copy_x": True}):
        model = KMeans(6, random_state=0, **options).fit(DATA)
        assert np.array_equal(model.cluster_centers_, expected.cluster_centers_)
    assert np.array_equal(DATA, before)
    with pytest.warns(RuntimeWarning, match="algorithm='elkan'"):
        KMeans(1, algorithm="elkan").fit(DATA)


@pytest.mark.parametrize(
    "options",
    [{}, {"tol": 0.0}, {"tol": 0.01}, {"init": "random", "n_init": 2}, {"metric": "cosine"}, {"max_iter": 2}],
    ids=str,
)
def test_verbose_prints_the_inertia_and_changes_no_bit(options, capsys):
    expected = KMeans(6, random_state=3, **options).fit(DATA)
    assert capsys.readouterr().out == ""
    model = KMeans(6, random_state=3, verbose=1, **options).fit(DATA)
    printed = capsys.readouterr().out
    for name in ("cluster_centers_", "labels_", "inertia_", "n_iter_", "counts_"):
        assert np.array_equal(getattr(model, name), getattr(expected, name)), name
    assert printed.count("Initialization complete") == options.get("n_init", 1)
    found = [float(value) for value in re.findall(r"Iteration \d+, inertia (\S+)\.\n", printed)]
    if "n_init" not in options:
        assert len(found) == model.n_iter_
        assert found == sorted(found, reverse=True)
        assert min(found) >= model.inertia_
        first = kmeans(torch.from_numpy(DATA), 6, seed=3, metric=model.metric, max_iter=1).centers
        assert found[0] > -KMeans(6, init=first, max_iter=1, metric=model.metric).fit(DATA).score(DATA)
    ended = "Converged at iteration" in printed
    assert ended == (model.n_iter_ < model.max_iter)
    if ended:
        assert re.search(
            "strict convergence" if model.tol == 0 else "strict convergence|center shift .* within tolerance",
            printed,
        )


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("d", [7, 600])
def test_given_centers_are_neither_changed_nor_shared(d, dtype, metric):
    x = np.random.default_rng(0).standard_normal((50, d)).astype(dtype)
    init = x[:5].copy()
    for fit in (lambda model: model.fit(x), lambda model: model.fit_blocks([x[:20], x[20:]])):
        model = KMeans(5, init=init, metric=metric)
        fit(model)
        np.testing.assert_array_equal(init, x[:5])
        assert not np.shares_memory(init, model.cluster_centers_)


def test_init_by_a_function():
    asked = []

    def init(X, n_clusters, random_state):
        asked.append((X, n_clusters))
        return X[random_state.permutation(len(X))[:n_clusters]]

    model = KMeans(4, init=init, random_state=5).fit(DATA)
    assert [(X is DATA, k) for X, k in asked] == [(True, 4)] * 10
    state = np.random.RandomState(5)
    fits = [KMeans(4, init=DATA[state.permutation(200)[:4]]).fit(DATA) for _ in range(10)]
    best = min(fits, key=lambda fit: fit.inertia_)
    assert model.inertia_ == best.inertia_ < max(fit.inertia_ for fit in fits)
    assert np.array_equal(model.cluster_centers_, best.cluster_centers_)
    given = np.random.RandomState(5)
    assert np.array_equal(
        KMeans(4, init=init, random_state=given).fit(DATA).cluster_centers_, best.cluster_centers_
    )
    assert np.array_equal(
        KMeans(4, init=init, n_init=1, random_state=5).fit(DATA).cluster_centers_, fits[0].cluster_centers_
    )
    tensor = torch.from_numpy(DATA)
    assert torch.equal(
        KMeans(4, init=init, random_state=5).fit(tensor).cluster_centers_,
        torch.from_numpy(best.cluster_centers_),
    )


def test_default_device_other_than_the_device_of_the_data(tmp_path):
    """The default device is another one than the device of the rows, as with "cuda" and arrays."""
    x = DATA.astype(np.float64)
    x.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.float64, "r", shape=x.shape)
    expected = KMeans(3, random_state=0).fit(x, sample_weight=np.arange(200.0))
    codes = ResidualKMeans(2, 4, random_state=0).fit_predict(x)
    torch.set_default_device("meta")
    try:
        for fit in (
            lambda model: model.fit(x, sample_weight=np.arange(200.0)),
            lambda model: model.fit_blocks([x[:50], x[50:]], sample_weight=np.arange(200.0)),
            lambda model: model.fit(mapped, sample_weight=np.arange(200.0)),
            lambda model: model.fit(scipy.sparse.csr_matrix(x), sample_weight=np.arange(200.0)),
            lambda model: model.set_params(verbose=1).fit(x, sample_weight=np.arange(200.0)),
        ):
            model = fit(KMeans(3, random_state=0))
            assert np.array_equal(model.cluster_centers_, expected.cluster_centers_)
            assert np.array_equal(model.predict(x), expected.labels_)
            assert model.transform(x).shape == (200, 3)
            assert model.score(x) < 0
            model.partial_fit(x)
        KMeans(2).fit(x)  # this call draws a seed
        KMeans(3, init="k-means||").fit(scipy.sparse.csr_matrix(x))
        spherical = KMeans(3, metric="cosine").fit(scipy.sparse.csr_matrix(x))
        assert spherical.score(scipy.sparse.csr_matrix(x), sample_weight=np.arange(200.0)) < 0
        KMeans(2, init=x[:2].tolist()).fit(x)
        residual = ResidualKMeans(2, 4, random_state=0, balanced=True).fit(x)
        assert np.array_equal(ResidualKMeans(2, 4, random_state=0).fit_predict(x), codes)
        assert residual.decode(residual.predict(x)).shape == x.shape
        assert collision_report(codes).rows == 200
    finally:
        torch.set_default_device(None)


class LazyFrame:
    """A stand-in for polars' LazyFrame: no values before ``collect``."""

    def collect(self):
        return DATA

    @property
    def columns(self):
        raise AssertionError


def test_non_numeric_input_error_explains_itself():
    pandas = pytest.importorskip("pandas")
    for model in (KMeans(2), ResidualKMeans(2, 2)):
        with pytest.raises(TypeError, match=rf"^{type(model).__name__}: X .*LazyFrame.*collect\(\)"):
            model.fit(LazyFrame())
        for value in (["a", "b"], pandas.date_range("2020", periods=3)):
            with pytest.raises((TypeError, ValueError), match=f"^{type(model).__name__}: X .*numbers"):
                model.fit(pandas.DataFrame({"a": value, "b": 1}))
    ragged = np.empty(3, dtype=object)
    ragged[:] = [[1.0, 2.0], [3.0, 4.0], [5.0]]
    for value in (ragged, [[1.0, 2.0], [3.0]]):
        with pytest.raises(ValueError, match=r"^KMeans: X .*rows"):
            KMeans(2).fit(value)
    for kind in (list, np.array, torch.tensor):  # as a column of lists
        column = np.empty(3, dtype=object)
        for row in range(3):
            column[row] = kind([1.0, row])
        with pytest.raises(ValueError, match=r"^KMeans: X .*np.stack"):
            KMeans(2).fit(column)


REFUSED = {
    "too many clusters": (lambda: KMeans(9).fit(DATA[:8]), ValueError, r"^n_samples=8 .*n_clusters=9\.$"),
    "too many clusters for blocks": (
        lambda: KMeans(9).fit_blocks([DATA[:8]]),
        ValueError,
        "^n_samples=8 .*n_clusters=9",
    ),
    "NaN": (lambda: KMeans(2).fit(np.array([[1.0], [np.nan]])), ValueError, "^KMeans: X .*NaN"),
    "NaN later": (lambda: KMeans(2).fit(DATA).predict(DATA * np.inf), ValueError, "KMeans: X .*NaN"),
    "columns": (lambda: KMeans(2).fit(DATA).predict(DATA[:, :3]), ValueError, "X .*3 features.*KMeans.*5"),
    "one dimension": (lambda: KMeans(2).fit(DATA[0]), ValueError, "2D array.*1D array"),
    "no rows": (lambda: KMeans(2).fit(DATA[:0]), ValueError, r"0 sample\(s\)"),
    "no columns": (lambda: KMeans(2).fit(DATA[:, :0]), ValueError, r"0 feature\(s\)"),
    "not fitted": (lambda: KMeans(2).predict(DATA), AttributeError, "KMeans.*fitted"),
    "weights": (
        lambda: KMeans(2).fit(DATA, sample_weight=-np.ones(200)),
        ValueError,
        "^KMeans: sample_weight.*finite",
    ),
    "shape of weights": (
        lambda: KMeans(2).fit(DATA, sample_weight=np.ones(3)),
        ValueError,
        r"sample_weight.*\[200\]",
    ),
    "init by a function, blocks": (
        lambda: KMeans(2, init=max).fit_blocks([DATA]),
        TypeError,
        "^KMeans: fit_blocks.*init",
    ),
    "shape of what a function returns": (
        lambda: KMeans(2, init=lambda X, k, random_state: X[:3]).fit(DATA),
        ValueError,
        r"\(3, 5\).*clusters 2",
    ),
    "algorithm": (
        lambda: KMeans(2, algorithm="full").fit(DATA),
        ValueError,
        "^The 'algorithm'.*KMeans.*'full'",
    ),
    "complex": (lambda: KMeans(2).fit(DATA * 1j), ValueError, "Complex"),
    "seed": (
        lambda: KMeans(2, random_state="a").fit(DATA),
        TypeError,
        "^The 'random_state'.*KMeans.*Got 'a'",
    ),
    "n_clusters": (lambda: KMeans("a").fit(DATA), TypeError, "^The 'n_clusters'.*KMeans.*Got 'a'"),
    "no clusters": (lambda: KMeans(0).fit(DATA), ValueError, "^The 'n_clusters'.*KMeans.*Got 0"),
    "random_state": (
        lambda: KMeans(2, random_state=2**63).fit(DATA),
        ValueError,
        "^The 'random_state' .*KMeans",
    ),
    "init": (lambda: KMeans(2, init="best").fit(DATA), ValueError, "^The 'init' .*KMeans.*str"),
    "rows of init": (lambda: KMeans(2, init=DATA[:3]).fit(DATA), ValueError, r"\(3, 5\).*clusters 2\."),
    "columns of init": (lambda: KMeans(2, init=DATA[:2, :3]).fit(DATA), ValueError, r"\(2, 3\).*5\."),
    "init of text": (lambda: KMeans(2, init=["a"]).fit(DATA), TypeError, "^KMeans: init.*<U1"),
    "weights of text": (
        lambda: KMeans(2).fit(DATA, sample_weight=["a"] * 200),
        TypeError,
        "^KMeans: sample_weight.*<U1",
    ),
    "no tol": (lambda: KMeans(2, tol=None).fit(DATA), TypeError, "^The 'tol'.*KMeans.*Got None"),
    "tol": (lambda: KMeans(2, tol="x").fit(DATA), TypeError, "^The 'tol'.*KMeans.*Got 'x'"),
    "complex tensor": (lambda: KMeans(2).fit(torch.from_numpy(DATA * 1j)), ValueError, "^Complex"),
    "complex weights": (lambda: KMeans(2).fit(DATA, sample_weight=np.ones(200) * 1j), ValueError, "^Complex"),
    "score, negative weights": (
        lambda: KMeans(2).fit(DATA).score(DATA, sample_weight=-np.ones(200)),
        ValueError,
        "^KMeans: sample_weight.*negative",
    ),
    "weights that are next to zero": (
        lambda: KMeans(2).fit(DATA, sample_weight=np.full(200, 1e-300)),
        ValueError,
        "^KMeans: sample_weight.*zero",
    ),
    "rows without values": (
        lambda: KMeans(2).fit(torch.empty(200, 3, device="meta")),
        ValueError,
        "^KMeans: X.*meta",
    ),
    "one weight for blocks": (
        lambda: KMeans(2).fit_blocks([DATA], sample_weight=2.0),
        ValueError,
        r"^KMeans: sample_weight.*\[n_samples\]",
    ),
    "score, NaN as a weight": (
        lambda: KMeans(2).fit(DATA).score(DATA, sample_weight=np.full(200, np.nan)),
        ValueError,
        "^KMeans: sample_weight.*finite",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


NOT_DENSE = {
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "nested": lambda tensor: torch.nested.nested_tensor([tensor], layout=torch.jagged),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor.float(), 1, 0, torch.qint32),
    "masked": lambda tensor: torch.masked.masked_tensor(tensor, tensor > 0),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_tensors_that_are_not_dense_are_refused(kind):
    change, model = NOT_DENSE[kind], KMeans(2, random_state=0).fit(DATA)
    residual = ResidualKMeans(2, 4, random_state=0).fit(DATA)
    rows, weights, codes = (change(torch.as_tensor(given)) for given in (DATA, np.ones(200), residual.codes_))
    calls = [
        *(lambda f=f: f(rows) for f in (model.predict, model.transform, model.score, model.partial_fit)),
        *(lambda f=f: f(rows) for f in (KMeans(2).fit, ResidualKMeans(2).fit, residual.predict)),
        *(lambda f=f: f(codes) for f in (residual.decode, collision_report)),
        lambda: KMeans(2).fit_blocks([rows]),
        lambda: KMeans(2, init=change(torch.as_tensor(DATA[:2]))).fit(DATA),
        lambda: KMeans(2).fit(DATA, sample_weight=weights),
        lambda: KMeans(2).fit_blocks([DATA], sample_weight=weights),
    ]
    for call in calls:
        with pytest.raises((TypeError, ValueError), match=rf"^(Residual)?KMeans|^collision.*{kind}"):
            call()


def test_missing_backend_error_is_not_about_the_data(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with backend("triton"), pytest.raises(RuntimeError, match=r"'triton'.*kmeans"):
        KMeans(2).fit(DATA)


compiled = pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")

WITHOUT_TORCH = """
import sys
import numpy as np
from uefl_kernels import numpy
from uefl_kernels.numpy import kmeans, vq_assign
x = np.random.default_rng(0).standard_normal((50, 3))
assert np.array_equal(kmeans(x, 4).labels, vq_assign(x, kmeans(x, 4).centers)[:, 0])
assert "torch" not in sys.modules and "sklearn" not in sys.modules
"""


@compiled
def test_numpy_without_torch():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@compiled
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_equals_the_op(dtype):
    from uefl_kernels import numpy as front

    x, weights = DATA.astype(dtype), np.random.default_rng(1).random(200)
    for options in (
        {},
        {"init": "k-means||"},
        {"init": "random"},
        {"init": x[:6]},
        {"metric": "cosine"},
        {"weights": weights},
    ):
        tensors = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in options.items()
        }
        expected = kmeans(torch.from_numpy(x), 6, seed=2, **tensors)
        for threads in (None, 1, 2, 4):
            for view in (x, np.asfortranarray(x)):
                found = front.kmeans(view, 6, seed=2, threads=threads, **options)
                for name, a, b in zip(found._fields, found, expected, strict=True):
                    assert np.array_equal(a, b.numpy()), name
    assert np.array_equal(
        front.vq_assign(x, x[:7], metric="cosine"),
        vq_assign(torch.from_numpy(x), torch.from_numpy(x[:7]), metric="cosine"),
    )


@compiled
@pytest.mark.parametrize("dtype", [">f4", ">f8"])
def test_numpy_accepts_both_byte_orders(dtype):
    from uefl_kernels import numpy as front

    x, weights = DATA.astype(dtype), np.arange(200.0)
    native = x.astype(x.dtype.newbyteorder("="))
    found = front.kmeans(x, 3, init=x[:3], weights=weights.astype(">f8").astype(np.longdouble))
    expected = front.kmeans(native, 3, init=native[:3], weights=weights)
    assert found.centers.dtype == native.dtype
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(front.vq_assign(x, x[:7]), front.vq_assign(native, native[:7]))


MASKED = np.ma.masked_less(DATA, -1.0)
NUMPY_REFUSED = {
    "list": (lambda front: front.kmeans([[1.0]], 1), TypeError, "^kmeans: x .*NumPy.*list"),
    "dtype": (
        lambda front: front.kmeans(DATA.astype(np.float16), 1),
        TypeError,
        "^kmeans: x .*float16.*float32",
    ),
    "text": (lambda front: front.kmeans("x", 1), TypeError, "^kmeans: x .*NumPy.*str"),
    "text as weights": (
        lambda front: front.kmeans(DATA, 1, weights="x"),
        TypeError,
        "^kmeans: weights.*NumPy.*str",
    ),
    "complex": (lambda front: front.kmeans(DATA, 4, init=DATA[:4] * 1j), TypeError, "^kmeans: init.*complex"),
    "init not finite": (
        lambda front: front.kmeans(DATA, 1, init=np.full((1, 5), 1e300)),
        RuntimeError,
        "^kmeans: init.*finite",
    ),
    "shape": (lambda front: front.kmeans(DATA[0], 1), ValueError, r"^kmeans: x .*\[N, d\].*\[5\]"),
    "k": (lambda front: front.kmeans(DATA[:3], 4), ValueError, "^kmeans: 4 clusters.*got 3"),
    "threads of text": (lambda front: front.kmeans(DATA, 4, threads="2"), TypeError, "^kmeans: threads.*'2'"),
    "threads in parts": (
        lambda front: front.vq_assign(DATA, DATA, threads=2.5),
        TypeError,
        r"^vq_assign: threads.*got 2\.5",
    ),
    "threads of truth": (
        lambda front: front.kmeans(DATA, 4, threads=True),
        TypeError,
        "^kmeans: threads.*True",
    ),
    "tol of text": (lambda front: front.kmeans(DATA, 4, tol="a"), TypeError, "^kmeans: tol.*'a'"),
    "threads": (lambda front: front.kmeans(DATA, 4, threads=0), ValueError, "^kmeans: threads.*None.*got 0"),
    "weights": (
        lambda front: front.kmeans(DATA, 4, weights=DATA[0]),
        ValueError,
        r"^kmeans: weights.*\[200\].*\[5\]",
    ),
    "init": (
        lambda front: front.kmeans(DATA, 4, init=DATA),
        ValueError,
        r"^kmeans: init.*\[4, 5\].*\[200, 5\]",
    ),
    "method": (lambda front: front.kmeans(DATA, 4, init="best"), ValueError, "^kmeans: init 'best'"),
    "values": (lambda front: front.kmeans(DATA * np.nan, 4), RuntimeError, "^kmeans: x .*NaN"),
    "codebook dtype": (
        lambda front: front.vq_assign(DATA, DATA.astype(">f2")),
        TypeError,
        "^vq_assign: codebook.*>f2.*float32",
    ),
    "integers": (lambda front: front.vq_assign(DATA.astype(int), DATA), TypeError, "^vq_assign: x .*int64"),
    "list of codewords": (
        lambda front: front.vq_assign(DATA, [[1.0]]),
        TypeError,
        "^vq_assign: codebook.*NumPy.*list",
    ),
    "a codebook that no memory holds": (
        lambda front: front.vq_assign(DATA, np.broadcast_to(DATA[:1], (2**44, 5))),
        MemoryError,
        r"^vq_assign: .*\[17592186044416, 5\].* TiB ",
    ),
    "masked": (lambda front: front.kmeans(MASKED, 4), TypeError, "^kmeans: x .*masked"),
    "masked weights": (
        lambda front: front.kmeans(DATA, 4, weights=MASKED[:, 0]),
        TypeError,
        "^kmeans: weights .*masked",
    ),
    "masked rows": (lambda front: front.vq_assign(MASKED, DATA), TypeError, "^vq_assign: x .*masked"),
    "precision": (
        lambda front: front.vq_assign(DATA, DATA, precision="half"),
        ValueError,
        "^vq_assign: precision 'half'",
    ),
}


@compiled
@pytest.mark.parametrize("case", NUMPY_REFUSED)
def test_numpy_refuses(case):
    from uefl_kernels import numpy as front

    call, error, message = NUMPY_REFUSED[case]
    with pytest.raises(error, match=message):
        call(front)


def test_bfloat16_rows_are_clustered_as_float32():
    x = normal(80, 4, dtype=torch.bfloat16)
    assert torch.equal(
        KMeans(3, random_state=0).fit(x).cluster_centers_,
        KMeans(3, random_state=0).fit(x.float()).cluster_centers_,
    )
