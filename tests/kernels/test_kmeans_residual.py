"""Each level of ``ResidualKMeans`` is the k-means of the residuals.

A balanced assignment is stable, and reports count correctly.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from uefl_kernels import KMeans, ResidualKMeans, collision_report
from uefl_kernels.estimator.residual import balanced_labels

from .conftest import normal

DATA = np.random.default_rng(0).standard_normal((300, 6)).astype(np.float32)
checks = pytest.importorskip("sklearn.utils.estimator_checks")


EXPECTED = {
    f"check_sample_weight_equivalence_on_{kind}_data": (
        "a seed draws positions of rows, so other rows are drawn if the order changes or a row is repeated"
    )
    for kind in ("dense", "sparse")
} | {
    f"check_estimator_sparse_{kind}": "expects one label for each row, but predict gives n_levels"
    for kind in ("array", "matrix")
}


@pytest.mark.filterwarnings("ignore:Number of distinct clusters")
@checks.parametrize_with_checks(
    [ResidualKMeans(2, 2, random_state=0), ResidualKMeans(2, 2, balanced=True, random_state=0)],
    expected_failed_checks=lambda estimator: EXPECTED,
)
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("weights", [None, np.arange(300.0)], ids=["plain", "weights"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_levels_are_kmeans_of_the_residuals(dtype, weights):
    x = DATA.astype(dtype)
    model = ResidualKMeans(3, 5, random_state=7).fit(x, sample_weight=weights)
    rest = x.astype(np.float64 if dtype == np.float64 else np.float32)
    total = 0
    for level in range(3):
        expected = KMeans(5, random_state=7).fit(rest, sample_weight=weights)
        assert np.array_equal(model.codebooks_[level], expected.cluster_centers_)
        assert np.array_equal(model.codes_[:, level], expected.labels_)
        rest = rest - expected.cluster_centers_[expected.labels_]
        total = total + expected.cluster_centers_[expected.labels_]
        squares = (rest.astype(float) ** 2).sum(1)
        assert model.inertia_[level] == pytest.approx(
            (squares if weights is None else squares * weights).sum()
        )
    assert np.array_equal(model.predict(x), model.codes_)
    assert np.array_equal(model.decode(model.codes_), total)
    assert model.codes_.dtype == np.int64


def test_tensors_in_tensors_out():
    x = torch.from_numpy(DATA)
    model = ResidualKMeans(2, 4, random_state=0).fit(x)
    expected = ResidualKMeans(2, 4, random_state=0).fit(DATA)
    for found in (model.codes_, model.codebooks_, model.predict(x), model.decode(model.codes_)):
        assert isinstance(found, torch.Tensor)
    assert np.array_equal(model.codes_.numpy(), expected.codes_)
    assert np.array_equal(model.codebooks_.numpy(), expected.codebooks_)


def test_balanced_codes_of_every_level():
    model = ResidualKMeans(3, 7, balanced=True, random_state=0).fit(DATA)
    assert all(np.bincount(level, minlength=7).max() <= 43 for level in model.codes_.T)
    assert np.bincount(model.predict(DATA)[:, 0]).max() > 43
    rest = DATA - model.decode(model.codes_)
    assert model.inertia_[-1] == pytest.approx((rest.astype(float) ** 2).sum(), rel=1e-5)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 5), (7, 3), (40, 9), (200, 8), (200, 300)])
@pytest.mark.parametrize("kind", ["normal", "integers", "one cluster"])
def test_a_balanced_assignment_is_stable(kind, n, k):
    rows, centers = normal(n, 3), normal(k, 3, seed=1)
    if kind == "integers":
        rows, centers = rows.round(), centers.round()
    if kind == "one cluster":
        centers[1:] += 100
    labels = balanced_labels(rows, centers)
    room = -(-n // k)
    assert torch.bincount(labels, minlength=k).max() <= room
    distances = torch.cdist(rows.double(), centers.double(), compute_mode="donot_use_mm_for_euclid_dist")
    for row in range(n):
        for center in (distances[row] < distances[row, labels[row]]).nonzero()[:, 0]:
            holds = labels == center
            assert holds.sum() == room, "a nearer center has room"
            assert (distances[holds, center] <= distances[row, center]).all(), (
                "a nearer center holds a row that is farther from it"
            )


def test_collision_report():
    codes = np.array([[0, 1], [0, 1], [0, 2], [3, 2], [0, 1], [3, 2]])
    for given in (codes, torch.from_numpy(codes), codes.tolist()):
        assert collision_report(given) == (6, 3, 5, 3, (2, 2))
    for kind in (np.uint16, ">i8", np.float64):
        assert collision_report(codes[::-1].astype(kind)[::-1]) == (6, 3, 5, 3, (2, 2))
    with pytest.raises(ValueError, match=r"^collision_report: codes.*\[n_samples, n_levels\].*\[6\]"):
        collision_report(codes[:, 0])


def test_one_weight_for_all_rows():
    expected = ResidualKMeans(2, 4, random_state=0).fit(DATA)
    for weight in (2, 2.0, np.float32(2), np.int64(2)):
        model = ResidualKMeans(2, 4, random_state=0).fit(DATA, sample_weight=weight)
        assert np.array_equal(model.codes_, expected.codes_)
        assert np.allclose(model.inertia_, 2 * expected.inertia_)


def test_codes_as_files_hold_them():
    model = ResidualKMeans(2, 4, random_state=0).fit(DATA)
    codes = model.codes_.copy()
    expected = model.decode(codes)
    codes.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in (codes, codes.astype(np.uint16), codes.astype(">i4"), codes.tolist()):
            assert np.array_equal(model.decode(given), expected)
        assert np.array_equal(model.decode(codes[::-1]), expected[::-1])
    assert np.array_equal(model.decode(torch.from_numpy(codes.astype(np.uint16))), expected)
    for wrong in (codes > 0, codes + 0j, torch.from_numpy(codes + 0j), codes.astype(str)):
        with pytest.raises(ValueError, match=r"^ResidualKMeans: codes "):
            model.decode(wrong)


REFUSED = {
    "not fitted": (lambda: ResidualKMeans().predict(DATA), AttributeError, "ResidualKMeans.*fitted"),
    "init": (
        lambda: ResidualKMeans(2, 3, init=DATA[:3]).fit(DATA),
        TypeError,
        "^ResidualKMeans: init.*seeding",
    ),
    "levels": (lambda: ResidualKMeans(0, 3).fit(DATA), ValueError, "^The 'n_levels'.*ResidualKMeans.*Got 0"),
    "too few rows": (lambda: ResidualKMeans(2, 301).fit(DATA), ValueError, "^n_samples=300 .*n_clusters=301"),
    "columns": (
        lambda: ResidualKMeans(2, 3).fit(DATA).predict(DATA[:, :2]),
        ValueError,
        r"X .*\b2 .*ResidualKMeans",
    ),
    "NaN in fit": (lambda: ResidualKMeans(2, 3).fit(DATA * np.nan), ValueError, "^ResidualKMeans: X .*NaN"),
    "weights": (
        lambda: ResidualKMeans(2, 3).fit(DATA, sample_weight=DATA),
        ValueError,
        r"^ResidualKMeans: sample_weight .*\[300\]",
    ),
    "seed": (lambda: ResidualKMeans(2, 3, random_state=True).fit(DATA), TypeError, "^ResidualKMeans: random"),
    "NaN": (
        lambda: ResidualKMeans(2, 3).fit(DATA).predict(DATA * np.nan),
        ValueError,
        "^ResidualKMeans: X .*NaN",
    ),
    "codes": (
        lambda: ResidualKMeans(2, 3).fit(DATA).decode([[1, 2, 0]]),
        ValueError,
        r"codes.*\[n_samples, 2\]",
    ),
    "no such code": (lambda: ResidualKMeans(2, 3).fit(DATA).decode([[1, 3]]), ValueError, "codes.*0.*2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, error, message = REFUSED[case]
    with warnings.catch_warnings(), pytest.raises(error, match=message):
        call()
