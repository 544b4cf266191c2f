"""``KMeans`` works with scikit-learn's tools, and without scikit-learn.

The tests cover its checks, data frames, containers of results, metadata and warnings.
"""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import scipy.sparse
import torch

from tests.fresh import python
from uefl_kernels import KMeans, ResidualKMeans

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn", minversion="1.6")
import joblib  # noqa: E402
import sklearn  # noqa: E402
from sklearn.exceptions import ConvergenceWarning, NotFittedError  # noqa: E402
from sklearn.pipeline import Pipeline, make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_param_validation, parametrize_with_checks  # noqa: E402

DATA = np.random.default_rng(0).standard_normal((60, 3))
FRAME = pd.DataFrame(DATA, columns=["a", "b", "c"])

# Checks of scikit-learn that cannot pass, with the reason.
REASON = (
    "a seed draws positions of rows, so other rows are drawn if the order changes or a row is repeated;"
    " scikit-learn excludes its own KMeans from these checks, too"
)
EXPECTED = {f"check_sample_weight_equivalence_on_{kind}_data": REASON for kind in ("dense", "sparse")}


@parametrize_with_checks(
    [KMeans(n_clusters=2, random_state=0), KMeans(n_clusters=2, metric="cosine", random_state=0)],
    expected_failed_checks=lambda estimator: EXPECTED,
)
def test_scikit_learns_checks(estimator, check):
    check(estimator)


def test_parameters_are_checked_as_scikit_learns():
    check_param_validation("KMeans", KMeans(n_clusters=2))


def test_columns_in_another_order_are_an_error():
    model = KMeans(2, random_state=0).fit(FRAME)
    assert model.feature_names_in_.tolist() == ["a", "b", "c"]
    for call in (model.predict, model.transform, model.score):
        with pytest.raises(ValueError, match=r"Feature names .*order"):
            call(FRAME[["c", "a", "b"]])
    with pytest.raises(ValueError, match=r"(?s)unseen.*\n- d\n.*missing.*\n- c\n"):
        model.predict(FRAME.rename(columns={"c": "d"}))


def interrupted(X, k, random_state):
    raise KeyboardInterrupt


WIDE = pd.DataFrame(np.ones((60, 5)), columns=list("vwxyz"))
FAILED = {
    "NaN": (lambda model: model.fit(WIDE * np.nan), ValueError),
    "few rows": (lambda model: model.fit(WIDE[:1]), ValueError),
    "text": (lambda model: model.fit(WIDE.astype(str) + "a"), ValueError),
    "weights": (lambda model: model.fit(WIDE, sample_weight=-np.ones(60)), ValueError),
    "warning": (lambda model: model.fit(WIDE), ConvergenceWarning),
}
FAILED_KMEANS = {
    "sparse": (lambda model: model.fit(scipy.sparse.csr_matrix(WIDE[:1])), ValueError),
    "sparse, warning": (lambda model: model.fit(scipy.sparse.csr_matrix(WIDE)), ConvergenceWarning),
    "blocks": (lambda model: model.fit_blocks([WIDE[:1]]), ValueError),
    "interrupted": (lambda model: model.set_params(init=interrupted).fit(WIDE), KeyboardInterrupt),
    "more rows": (lambda model: model.partial_fit(FRAME * np.nan), ValueError),
}


@pytest.mark.filterwarnings("error:Number of distinct clusters")
@pytest.mark.parametrize(
    ("kind", "case"),
    [*((KMeans, case) for case in FAILED | FAILED_KMEANS), *((ResidualKMeans, case) for case in FAILED)],
)
def test_a_refit_that_fails_changes_nothing(kind, case):
    """WIDE has other columns than the first fit."""
    model = kind(n_clusters=2, random_state=0).fit(FRAME)
    before = {name: value for name, value in vars(model).items() if name.endswith("_")}
    expected = model.predict(FRAME)
    fit, error = (FAILED | FAILED_KMEANS)[case]
    with pytest.raises(error):
        fit(model)
    assert all(vars(model)[name] is value for name, value in before.items())
    assert np.array_equal(model.predict(FRAME), expected)


def test_names_on_one_side_only_are_a_warning():
    with pytest.warns(UserWarning, match="X .*valid.*KMeans"):
        KMeans(2, random_state=0).fit(FRAME).predict(DATA)
    with pytest.warns(UserWarning, match="X .*KMeans.*without"):
        KMeans(2, random_state=0).fit(DATA).predict(FRAME)


def test_column_names_that_are_not_all_strings():
    with pytest.raises(TypeError, match=r"Feature names .*\['int', 'str'\]"):
        KMeans(2).fit(FRAME.rename(columns={"c": 3}))
    assert not hasattr(KMeans(2).fit(pd.DataFrame(DATA)), "feature_names_in_")


def test_names_of_the_columns_of_transform():
    model = KMeans(2, random_state=0).fit(FRAME)
    assert (
        model.get_feature_names_out().tolist()
        == model.get_feature_names_out(["a", "b", "c"]).tolist()
        == ["kmeans0", "kmeans1"]
    )
    with pytest.raises(ValueError, match=r"input_features .*feature_names_in_"):
        model.get_feature_names_out(["b", "a", "c"])
    with pytest.raises(ValueError, match=r"input_features .*length"):
        KMeans(2).fit(DATA).get_feature_names_out(["a"])
    with pytest.raises(NotFittedError):
        KMeans(2).get_feature_names_out()


def test_set_output():
    model = make_pipeline(StandardScaler(), KMeans(2, random_state=0)).set_output(transform="pandas")
    found = model.fit_transform(FRAME.set_index(FRAME.index + 5))
    assert found.columns.tolist() == ["kmeans0", "kmeans1"]
    assert found.index[0] == 5
    assert np.array_equal(model.transform(FRAME), found)
    assert isinstance(
        KMeans(2)
        .set_output(transform="pandas")
        .fit(torch.from_numpy(DATA))
        .transform(torch.from_numpy(DATA)),
        pd.DataFrame,
    )


def test_metadata_routing():
    weights = np.arange(60.0)
    expected = KMeans(2, random_state=0).fit(DATA, sample_weight=weights).cluster_centers_
    with sklearn.config_context(enable_metadata_routing=True):
        model = (
            KMeans(2, random_state=0)
            .set_fit_request(sample_weight=True)
            .set_score_request(sample_weight=True)
        )
        pipeline = Pipeline([("kmeans", model)]).fit(DATA, sample_weight=weights)
    assert np.array_equal(pipeline["kmeans"].cluster_centers_, expected)


def test_fewer_different_rows_than_clusters_is_a_warning():
    for x in (np.ones((10, 2)), torch.ones(10, 2), np.array([[0.0], [0.0], [1.0], [1.0]])):
        different = len(np.unique(np.asarray(x), axis=0))
        with pytest.warns(ConvergenceWarning, match=rf"\({different}\).*n_clusters \(3\)"):
            assert len(set(KMeans(3, random_state=0).fit(x).labels_.tolist())) == different
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KMeans(3, random_state=0).fit(DATA)


def test_more_starts_than_one_from_given_centers_are_a_warning():
    with pytest.warns(RuntimeWarning, match="KMeans.*n_init=4"):
        KMeans(2, init=DATA[:2], n_init=4).fit(DATA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KMeans(2, init=DATA[:2], n_init=1).fit(DATA)
        KMeans(2, init=DATA[:2]).fit(DATA)


def test_columns_of_pandas_own_types():
    nullable = FRAME.convert_dtypes().astype("Float64")
    expected = KMeans(2, random_state=0).fit(DATA)
    assert np.array_equal(KMeans(2, random_state=0).fit(nullable).cluster_centers_, expected.cluster_centers_)
    nullable.iloc[3, 1] = pd.NA
    with pytest.raises(ValueError, match=r"^KMeans: X .*NaN"):
        KMeans(2).fit(nullable)
    with pytest.raises(ValueError, match=r"^KMeans: X .*NaN"):
        KMeans(2).fit(pd.DataFrame({"a": [1, 2, pd.NA]}, dtype="Int64"))
    with pytest.raises(ValueError, match=r"^KMeans: sample_weight.*finite"):
        KMeans(2).fit(DATA, sample_weight=pd.Series([pd.NA] + [1.0] * 59, dtype="Float64"))


def test_centers_in_a_read_only_file(tmp_path):
    model = KMeans(2, random_state=0).fit(DATA)
    joblib.dump(model, tmp_path / "model")
    loaded = joblib.load(tmp_path / "model", mmap_mode="r")
    assert not loaded.cluster_centers_.flags.writeable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(loaded.predict(DATA), model.labels_)
        assert np.array_equal(loaded.transform(DATA), model.transform(DATA))
        assert loaded.score(DATA) == model.score(DATA)


def test_scikit_learn_is_not_imported_for_the_kernels():
    code = "import sys; from uefl_kernels import kmeans; assert 'sklearn' not in sys.modules"
    assert python(code).returncode == 0


WITHOUT = """
import sys, warnings
warnings.simplefilter("error", FutureWarning)
sys.modules["sklearn"] = None
import numpy as np
from uefl_kernels import KMeans, ResidualKMeans
x = np.random.default_rng(0).standard_normal((60, 3))
model = KMeans(2, random_state=0)
try:
    model.predict(x)
except AttributeError as error:
    print(error)
model.fit(x)
assert np.array_equal(model.predict(x), model.labels_)
print(model.set_params(max_iter=5), *model.get_feature_names_out(["a", "b", "c"]))
calls = lambda: model.set_params(k=3), lambda: model.get_feature_names_out(["a"]), lambda: KMeans(0).fit(x)
for call in calls:
    try:
        call()
    except ValueError as error:
        print(error)
with warnings.catch_warnings(record=True) as caught:
    KMeans(2).fit(np.ones((5, 1)))
print(caught[0].category.__name__)
"""


def test_without_scikit_learn():
    done = python(WITHOUT)
    assert done.returncode == 0, done.stderr
    expected = (
        r".*KMeans.*fitted.*'fit'.*",
        r"KMeans\(max_iter=5, n_clusters=2, random_state=0\) kmeans0 kmeans1",
        (
            r".*'k'.* KMeans\(max_iter=5, n_clusters=2, random_state=0\).*\['algorithm', 'copy_x', 'init',"
            r" 'max_iter', 'metric', 'n_clusters', 'n_init', 'random_state', 'tol', 'verbose'\]\."
        ),
        r"input_features .*\(3\).*1",
        r"KMeans: n_clusters .*0",
        r"ConvergenceWarning",
    )
    for pattern, line in zip(expected, done.stdout.splitlines(), strict=True):
        assert re.fullmatch(pattern, line)
