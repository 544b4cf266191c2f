"""``kmeans`` gives the same bits from every kernel, thread count and front end.

The tests also cover errors, empty clusters, weights and batches.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from uefl_kernels import COMPILED, backend, kmeans, kmeans_batched, vq_assign
from uefl_kernels._dtypes import result_dtype
from uefl_kernels.ops.kmeans import composed
from uefl_kernels.ops.kmeans_step import composed as steps

from .conftest import DTYPES, normal

compiled = pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")
INITS = ("k-means++", "k-means||", "random")


def blobs(n, d, centers, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(centers, d, generator=generator) * 5
    return (
        means[torch.randint(centers, (n,), generator=generator)] + torch.randn(n, d, generator=generator)
    ).to(dtype)


def assert_same(found, expected):
    for name, a, b in zip(found._fields, found, expected, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


def assert_as_reference(x, k, **options):
    with backend("reference"):
        expected = kmeans(x, k, **options)
    assert_same(kmeans(x, k, **options), expected)


@pytest.mark.every_variant
@compiled
@pytest.mark.parametrize(
    ("dtype", "init", "metric"),
    [  # every pair of values
        (dtype, init, ("l2", "cosine")[(i + j) % 2])
        for i, dtype in enumerate(DTYPES)
        for j, init in enumerate(INITS)
    ],
    ids=str,
)
def test_equals_the_reference(dtype, init, metric):
    for number, (n, d, k) in enumerate(((1, 1, 1), (37, 3, 5), (300, 17, 12), (90, 70, 33))):
        x = blobs(n, d, 6, seed=n, dtype=dtype)
        weights = torch.rand(n, generator=torch.Generator().manual_seed(n))
        masses = (weights, None, (weights > 0.5).float() + (torch.arange(n) == 0))
        # a large problem has one kind of weights, which differs from one case to the next
        one = masses[(number + DTYPES.index(dtype)) % 3]
        for mass in masses if n < 50 else (one,):
            assert_as_reference(x, k, weights=mass, init=init, metric=metric, seed=n, n_init=2, max_iter=4)


@pytest.mark.every_variant
@compiled
def test_more_trials_than_fit_in_a_group():
    assert_as_reference(normal(900, 4), 450, max_iter=3)


@pytest.mark.every_variant
@compiled
@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_wide_rows(dtype, metric):
    # each dtype and each metric has both sizes
    n, d, k = ((41, 517, 20), (70, 1031, 7))[(DTYPES.index(dtype) + (metric == "l2")) % 2]
    x = blobs(n, d, 6, seed=n, dtype=dtype)
    x[n // 2 :] = x[: n - n // 2].clone()  # some of the drawn centers are then equal
    weights = torch.rand(n, generator=torch.Generator().manual_seed(n))
    for rows, mass in ((x, None), (x.T.contiguous().T, weights), ((x / 4).round(), None)):
        options = {"metric": metric, "max_iter": 4, "tol": 0.0}
        assert_as_reference(rows, k, weights=mass, seed=n, **options)
        # rows that are as far from one center as from another
        assert_as_reference(rows, k, init=rows[-k:].to(result_dtype(rows)), **options)


@pytest.mark.every_variant
@compiled
@pytest.mark.parametrize("scale", [1.0, 2.0**100, 2.0**-70, 2.0**-140])
def test_wide_rows_closer_than_float32_resolves(scale):
    # Up to rounding, ten rows are halfway between two centers.
    between, apart = normal(30, 600), normal(30, 600, seed=1)
    centers = torch.cat([between[:20] + apart[:20], between[:10] - apart[:10]])
    assert_as_reference(between * scale, 30, init=centers * scale, max_iter=1, tol=0.0)


@pytest.mark.every_variant
@compiled
def test_rows_too_long_for_float32():
    x = blobs(6, 65601, 3)
    assert_as_reference(x, 2, init=x[:2], max_iter=1)


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("step", [None, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_in_groups_with_separate_bounds(dtype, step):
    x = blobs(4200, 70, 12, dtype=dtype)
    # many rows are as far from one center as from another
    x = x if step is None else (x / step).round() * step
    weights = torch.rand(len(x), generator=torch.Generator().manual_seed(0))
    for mass in (None, weights):
        assert_as_reference(x, 20, weights=mass, seed=1, tol=0.0)


@pytest.mark.every_variant
@compiled
@settings(max_examples=60 if os.environ.get("UEFL_CPU") else 30)
@given(
    n=st.integers(1, 60),
    d=st.integers(1, 20),
    k=st.integers(1, 60),
    seed=st.integers(-(2**63), 2**63 - 1),
    init=st.sampled_from(INITS),
    scale=st.sampled_from([0.0, 1e-40, 1e-20, 1.0, 1e12, 1e30]),
    offset=st.sampled_from([0.0, 1.0, 1e6]),
    steps=st.sampled_from([None, 1.0, 0.01]),
    wide=st.booleans(),
    weighted=st.sampled_from([None, 1e-300, 1.0, 1e300]),
    n_init=st.integers(1, 3),
    tol=st.sampled_from([0.0, 1e-4, 0.1]),
)
def test_equals_the_reference_on_anything(
    n, d, k, seed, init, scale, offset, steps, wide, weighted, n_init, tol
):
    generator = torch.Generator().manual_seed(seed % 2**32)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    x = x if steps is None else (x / steps).round() * steps
    x = (x * scale + offset).to(torch.float64 if wide else torch.float32)
    weights = None
    if weighted:
        weights = torch.rand(n, generator=generator, dtype=torch.float64).round(decimals=1) * weighted
        weights[seed % n] = weighted
    assert_as_reference(
        x, min(n, k), weights=weights, init=init, seed=seed, n_init=n_init, tol=tol, max_iter=8
    )


@pytest.mark.every_variant
@compiled
def test_given_centers_and_strides():
    x = blobs(200, 12, 7)
    for init in (normal(9, 12, seed=1), normal(9, 12, seed=1, dtype=torch.float64)):
        assert_as_reference(x, 9, init=init)
        assert_as_reference(x, 9, init=init, metric="cosine")
    dense = kmeans(x, 9)
    for view in (x.T.contiguous().T, torch.stack([x, x], 1)[:, 0], torch.stack([x, x], 2)[:, :, 1]):
        assert_same(kmeans(view, 9), dense)
    assert_same(kmeans(x[:1].expand(50, 12), 3), kmeans(x[:1].repeat(50, 1), 3))


def test_lloyd_is_lloyd():
    """Compare with Lloyd's algorithm: labels from all distances, centers as means."""
    x, centers = blobs(400, 5, 8, dtype=torch.float64), normal(8, 5, seed=3, dtype=torch.float64)
    found = kmeans(x, 8, init=centers, tol=0.0)
    for _ in range(int(found.iterations)):
        labels = torch.cdist(x, centers).argmin(1)
        centers = torch.stack([x[labels == i].mean(0) for i in range(8)])
    torch.testing.assert_close(found.centers, centers, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.inertia, (x - found.centers[found.labels]).square().sum())
    assert torch.equal(found.labels, vq_assign(x, found.centers)[:, 0])
    assert torch.equal(kmeans(x, 8, init=found.centers, tol=0.0).centers, found.centers)


@pytest.mark.parametrize("max_iter", [1, 2, 300])
@pytest.mark.parametrize("tol", [0.0, 1e-2])
def test_labels_and_inertia_belong_to_the_centers(tol, max_iter):
    x = blobs(500, 6, 30, seed=1)
    found = kmeans(x, 12, tol=tol, max_iter=max_iter)
    assert torch.equal(found.labels, vq_assign(x, found.centers)[:, 0])
    expected = (x.double() - found.centers[found.labels].double()).square().sum()
    torch.testing.assert_close(found.inertia, expected, rtol=1e-13, atol=0)
    assert int(found.iterations) <= max_iter


def test_weights_are_repetitions():
    x, times = blobs(60, 4, 5), torch.arange(60) % 4
    init = x[:5]
    weighted, repeated = (
        kmeans(x, 5, init=init, weights=times.float(), tol=0.0),
        kmeans(x.repeat_interleave(times, 0), 5, init=init, tol=0.0),
    )
    torch.testing.assert_close(weighted.centers, repeated.centers)
    torch.testing.assert_close(weighted.inertia, repeated.inertia)


@pytest.mark.parametrize("init", INITS)
def test_rows_with_weight_zero_are_not_drawn(init):
    x = torch.cat([torch.zeros(30, 2) + 100, blobs(40, 2, 4)])
    weights = torch.cat([torch.zeros(30), torch.ones(40)])
    for seed in range(5):
        assert (kmeans(x, 4, weights=weights, init=init, seed=seed).centers < 99).all()


def test_empty_clusters_move_to_the_farthest_rows():
    x = torch.tensor([[0.0], [1.0], [2.0], [50.0], [100.0]])
    found = kmeans(x, 3, init=torch.tensor([[1.0], [1e4], [2e4]]))
    assert sorted(found.centers[:, 0].tolist()) == [1, 50, 100]
    assert float(found.inertia) == 2
    one = kmeans(x, 3, init=torch.tensor([[1.0], [1e4], [2e4]]), max_iter=1)
    assert one.centers[1:, 0].tolist() == [100, 50]  # the first empty cluster takes the farthest row


@pytest.mark.parametrize("init", INITS)
def test_fewer_different_rows_than_clusters(init):
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).repeat(10, 1)
    found = kmeans(x, 6, init=init)
    assert float(found.inertia) == 0
    assert torch.isfinite(found.centers).all()
    # rows that are equal on the grid of the seeding
    near = torch.tensor([[0.0], [1e-9], [2e-9], [3e-9], [1.0]])
    for seed in range(5):
        assert_as_reference(near, 5, init=init, seed=seed, max_iter=1)


def test_random_rows_are_different():
    x = torch.arange(50.0)[:, None]
    for seed in range(20):
        rows = composed.Problem(x, None, composed.Grid).grid.seeds("random", 50, seed, 0)
        assert rows.unique().numel() == 50
    first = [
        int(composed.Problem(x, None, composed.Grid).grid.seeds("random", 1, seed, 0)) for seed in range(600)
    ]
    assert np.bincount(first, minlength=50).max() < 30  # 12 on average


def test_metric_cosine():
    x = blobs(300, 8, 5) * torch.rand(300, 1).add(0.1)
    found, scaled = kmeans(x, 5, metric="cosine"), kmeans(x * 4, 5, metric="cosine")
    torch.testing.assert_close(found.centers.norm(dim=1), torch.ones(5))
    assert torch.equal(found.labels, scaled.labels)
    assert (vq_assign(x, found.centers, metric="cosine")[:, 0] == found.labels).float().mean() > 0.99
    zero = kmeans(torch.cat([x, torch.zeros(3, 8)]), 5, metric="cosine")
    assert torch.isfinite(zero.centers).all()
    opposite, center = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    for name in ("auto", "reference"):
        with backend(name):  # the mean has no direction
            assert torch.equal(kmeans(opposite, 1, init=center, metric="cosine").centers, center)


@pytest.mark.every_variant
@compiled
def test_number_of_threads_does_not_matter():
    problems = [
        blobs(3000, 9, 20, seed=1),
        blobs(2000, 9, 20, seed=2, dtype=torch.float32),
        blobs(70, 9, 20, seed=3),
    ]
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 4) * 7:
            torch.set_num_threads(threads)
            results.append(
                [kmeans(problems[0], 20, init=init) for init in INITS]
                + kmeans_batched(problems, [20, 7, 3], seed=[1, 2, 3])
            )
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        for found, expected in zip(result, results[0], strict=True):
            assert_same(found, expected)


def test_a_batch_is_its_problems():
    xs = [blobs(n, 5, 4, seed=n) for n in (30, 7, 200, 1)]
    ks, seeds = [4, 7, 9, 1], [3, 1, 4, 1]
    weights = [torch.rand(len(x)) + 0.1 for x in xs]
    for init in (*INITS, [x[:k].flip(0) for x, k in zip(xs, ks, strict=True)]):
        found = kmeans_batched(xs, ks, weights=weights, init=init, seed=seeds)
        for i, result in enumerate(found):
            one = init if isinstance(init, str) else init[i]
            assert_same(result, kmeans(xs[i], ks[i], weights=weights[i], init=one, seed=seeds[i]))
    stacked = kmeans_batched(torch.stack([xs[0], xs[0] + 1]), 3)
    assert_same(stacked[1], kmeans(xs[0] + 1, 3))
    assert kmeans_batched([], 3) == []


def test_integers_of_numpy():
    expected = kmeans(X, 2, max_iter=3, seed=5)
    assert_same(
        kmeans(
            X, np.int64(2), max_iter=np.int32(3), n_init=np.int64(1), seed=np.uint8(5), tol=np.float32(1e-4)
        ),
        expected,
    )
    for k in (np.int64(2), [np.int64(2)]):
        assert_same(kmeans_batched([X], k, max_iter=3, seed=np.int64(5))[0], expected)


def test_n_init_keeps_the_best():
    x = blobs(300, 3, 12)
    single = [float(kmeans(x, 12, init="random", n_init=1, seed=s).inertia) for s in range(6)]
    best = [float(kmeans(x, 12, init="random", seed=s).inertia) for s in range(6)]
    assert max(best) < max(single)
    assert float(kmeans(x, 12, init="random", n_init=1).inertia) >= float(
        kmeans(x, 12, init="random", n_init=2).inertia
    )


@pytest.mark.parametrize("init", ["k-means++", "k-means||"])
def test_quality_equals_scikit_learn(init):
    cluster = pytest.importorskip("sklearn.cluster")
    x = blobs(1500, 12, 25, seed=5) * 0.6 + normal(1500, 12, seed=6)
    ours = np.mean([float(kmeans(x, 40, init=init, seed=s).inertia) for s in range(10)])
    theirs = np.mean(
        [cluster.KMeans(40, n_init=1, random_state=s).fit(x.numpy()).inertia_ for s in range(10)]
    )
    assert ours < theirs * 1.005


def test_values_far_from_zero_and_far_apart():
    """An offset does not cost precision, an outlier does not hide the rest."""
    x = blobs(300, 4, 6, dtype=torch.float64)
    near, far = kmeans(x, 6, seed=2), kmeans(x + 1e9, 6, seed=2)
    assert torch.equal(near.labels, far.labels)
    torch.testing.assert_close(far.centers - 1e9, near.centers, atol=1e-6, rtol=0)
    outlier = kmeans(torch.cat([x, torch.full((1, 4), 1e4, dtype=torch.float64)]), 7, seed=2)
    assert float(outlier.inertia) < 1.2 * float(near.inertia)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_the_largest_values(metric):
    """Allowed inputs have finite sums, and squares of larger values overflow float64."""
    x = blobs(40, 3, 4, dtype=torch.float64)
    x = x / x.abs().max()
    weights = torch.rand(40, dtype=torch.float64)
    near, far = (kmeans(x * 2.0**power, 4, init=x[:4] * 2.0**power, metric=metric) for power in (0, 480))
    assert torch.equal(near.labels, far.labels)
    torch.testing.assert_close(
        far.inertia * 2.0 ** (-960 if metric == "l2" else 0), near.inertia, rtol=1e-12, atol=0
    )
    light, heavy = (kmeans(x, 4, weights=weights * 2.0**power) for power in (0, 1000))
    assert torch.equal(light.centers, heavy.centers)
    assert torch.equal(light.inertia * 2.0**1000, heavy.inertia)


X, W = torch.randn(6, 3), torch.ones(6)
REFUSED = {
    "x not a tensor": (
        lambda: kmeans([[1.0]], 1),
        TypeError,
        r"^kmeans: x .*torch\.Tensor.*list; uefl_kernels\.numpy",
    ),
    "x of integers": (
        lambda: kmeans(torch.ones(3, 2, dtype=torch.int64), 1),
        TypeError,
        r"^kmeans: x .*torch\.int64",
    ),
    "x of one dimension": (lambda: kmeans(X[0], 1), ValueError, r"^kmeans: x .*\[N, d\].*\[3\]"),
    "no columns": (lambda: kmeans(torch.ones(4, 0), 1), ValueError, r"^kmeans: x \[4, 0\]"),
    "too many clusters": (lambda: kmeans(X, 7), ValueError, "^kmeans: 7 clusters.*got 6"),
    "no clusters": (lambda: kmeans(X, 0), ValueError, "^kmeans: k .*got 0"),
    "k not an int": (lambda: kmeans(X, 2.0), TypeError, r"^kmeans: k .*int.*2\.0"),
    "k of many lines": (lambda: kmeans(X, torch.ones(9, 9)), TypeError, "^kmeans: k .*int.*Tensor$"),
    "seed too large": (lambda: kmeans(X, 2, seed=2**63), ValueError, r"^kmeans: seed.*-2\^63.*9223"),
    "n_init": (lambda: kmeans(X, 2, n_init=0), ValueError, "^kmeans: n_init.*'auto'.*got 0"),
    "n_init by name": (lambda: kmeans(X, 2, n_init="warn"), ValueError, "^kmeans: n_init.*'auto'.*'warn'"),
    "max_iter": (lambda: kmeans(X, 2, max_iter=0), ValueError, "^kmeans: max_iter.*got 0"),
    "tol": (lambda: kmeans(X, 2, tol=-1e-4), ValueError, r"^kmeans: tol.*-0\.0001"),
    "metric": (lambda: kmeans(X, 2, metric="l1"), ValueError, "^kmeans: metric .l1."),
    "init": (lambda: kmeans(X, 2, init="++"), ValueError, r"^kmeans: init '\+\+'.*centers"),
    "init an array": (lambda: kmeans(X, 2, init=X[:2].numpy()), TypeError, "^kmeans: init.*centers.*ndarray"),
    "init of another shape": (
        lambda: kmeans(X, 2, init=X[:3]),
        ValueError,
        r"^kmeans: init.*\[2, 3\].*\[3, 3\]",
    ),
    "init of integers": (
        lambda: kmeans(X, 2, init=X[:2].long()),
        TypeError,
        r"^kmeans: init.*torch\.int64.*float32",
    ),
    "weights of another shape": (
        lambda: kmeans(X, 2, weights=W[:5]),
        ValueError,
        r"^kmeans: weights.*\[6\].*\[5\]",
    ),
    "weights not a tensor": (
        lambda: kmeans(X, 2, weights=[1.0] * 6),
        TypeError,
        r"^kmeans: weights.*torch\.Tensor.*list",
    ),
    "device": (lambda: kmeans(X, 2, weights=W.to("meta")), ValueError, "^kmeans: x .*cpu.*weights.*meta"),
    "batch of lists": (
        lambda: kmeans_batched([[1.0]], 1),
        TypeError,
        r"^kmeans_batched: xs\[0\].*torch\.Tensor.*list",
    ),
    "batch of nothing": (lambda: kmeans_batched(5, 4), TypeError, r"^kmeans_batched: xs.*\[N, d\].*int"),
    "batch with k of text": (lambda: kmeans_batched([X], "a"), TypeError, "^kmeans_batched: k .*'a'"),
    "batch without seed": (
        lambda: kmeans_batched([X], 1, seed=None),
        TypeError,
        "^kmeans_batched: seed.*None",
    ),
    "batch with k of bool": (lambda: kmeans_batched([X], True), TypeError, "^kmeans_batched: k .*True"),
    "tol of text": (lambda: kmeans(X, 1, tol="a"), TypeError, "^kmeans: tol.*'a'"),
    "batch of one matrix": (
        lambda: kmeans_batched(X, 1),
        ValueError,
        r"^kmeans_batched: xs.*\[6, 3\]; kmeans",
    ),
    "batch of two dtypes": (
        lambda: kmeans_batched([X, X.double()], 1),
        ValueError,
        "^kmeans_batched: .*dtype.*device",
    ),
    "batch with too few k": (lambda: kmeans_batched([X, X], [1]), ValueError, "^kmeans_batched: k .*1.*2"),
    "batch, one too small": (
        lambda: kmeans_batched([X, X[:1]], 2),
        ValueError,
        "^kmeans_batched: problem 1: 2 clusters.*got 1",
    ),
    "batch with weights": (
        lambda: kmeans_batched([X], 2, weights=[W[:3]]),
        ValueError,
        r"^kmeans_batched: weights\[0\].*shape",
    ),
    "batch with weights in lists": (
        lambda: kmeans_batched([X], 2, weights=[[1.0]]),
        TypeError,
        r"weights\[0\].*torch\.Tensor",
    ),
    "batch with a weight": (
        lambda: kmeans_batched([X], 2, weights=1.0),
        TypeError,
        "^kmeans_batched: weights.*problem.*1.0",
    ),
    "batch without init": (
        lambda: kmeans_batched([X], 2, init=None),
        TypeError,
        "^kmeans_batched: init.*problem.*None",
    ),
    "starts in an array": (lambda: kmeans(X, 2, n_init=W.numpy()), ValueError, "^kmeans: n_init.*array"),
    "batch with centers": (
        lambda: kmeans_batched([X], 2, init=[X]),
        ValueError,
        r"^kmeans_batched: init\[0\].*\[2, 3\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_values_that_are_refused(name):
    with backend(name):
        for value in (float("nan"), float("inf"), float("-inf")):
            x = torch.ones(300, 70)
            x[299, 69] = value
            for metric in ("l2", "cosine"):
                with pytest.raises(RuntimeError, match=r"kmeans: x .*NaN"):
                    kmeans(x, 2, metric=metric)
        with pytest.raises(RuntimeError, match=r"kmeans: x .*2\^480 \(3e144\)"):
            kmeans(-X.double() * 1e150, 2)
        for bad in (float("nan"), float("inf"), 1e300):
            for dtype in (torch.float32, torch.float64):
                init = X[:2].double()
                init[1, 2] = bad
                with pytest.raises(RuntimeError, match=r"kmeans: init.*2\^480 \(3e144\)"):
                    kmeans(X.to(dtype), 2, init=init)
        for bad in (-1.0, float("nan"), float("inf"), 1e305):
            weights = torch.ones(6).double()
            weights[5] = bad
            with pytest.raises(RuntimeError, match=r"kmeans: weights.*2\^1000"):
                kmeans(X, 2, weights=weights)
        with pytest.raises(RuntimeError, match=r"kmeans: problem 1: weights.*zero"):
            kmeans_batched([X, X], 2, weights=[W, W * 0])
        broken = X * float("nan")
        for batch, options, what in (
            ([X, X, broken], {}, "2: x .*NaN"),
            ([X, broken, broken], {}, "1: x .*NaN"),
            ([X, X], {"init": [X[:2], broken[:2]]}, "1: init.*finite"),
        ):
            with pytest.raises(RuntimeError, match=f"^kmeans: problem {what}"):
                kmeans_batched(batch, 2, **options)


def test_gradients_stop():
    assert not kmeans(X.clone().requires_grad_(), 2).centers.requires_grad


def test_opcheck():
    for init in (None, normal(5, 3)):
        arguments = (
            normal(19, 3),
            torch.rand(19).double(),
            init,
            [9, 10],
            [2, 3],
            [0, 1],
            "k-means++",
            False,
            1,
            10,
            1e-4,
        )
        torch.library.opcheck(torch.ops.uefl.kmeans.default, arguments)


def test_opcheck_of_the_iterations():
    x, weights = normal(19, 3), torch.rand(19).double()
    for mass in (None, weights):
        units = torch.ops.uefl.kmeans_units(x, mass)[:3]
        for spherical in (False, True):
            arguments = x, x[:4], mass, *units, torch.zeros((), dtype=torch.float64), spherical, 5
            torch.library.opcheck(torch.ops.uefl.kmeans_lloyd.default, arguments)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("op", [torch.ops.uefl.kmeans_lloyd, torch.ops.uefl_reference.kmeans_lloyd], ids=str)
def test_a_fit_around_the_iterations_of_an_op(monkeypatch, op, metric):
    """The op replaces the kernel, as on a GPU.

    The weights are not multiples of a power of two.
    """
    monkeypatch.setattr(composed, "triton_available", lambda: False)
    x, weights = blobs(90, 4, 5), 3 * torch.rand(90)
    far = torch.cat([x[:3], 100 + normal(2, 4)])
    for method, init, starts in (("random", None, 2), ("given", far, 1)):
        first = method if init is None else init
        expected = kmeans(x, 5, weights=weights, init=first, n_init=2, seed=3, metric=metric)
        problem = x, weights.double(), init, [90], [5], [3]
        arguments = *problem, method, metric == "cosine", starts, 300, 1e-4
        found = composed.around(op.default, composed.Arguments(*arguments))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.reshape(other.shape), other)


def test_compile_fullgraph(full_graph):
    x = normal(50, 4)
    step = full_graph(lambda rows: kmeans(rows * 2, 3).centers + 1)
    assert torch.equal(step(x), kmeans(x * 2, 3).centers + 1)


def test_autocast():
    x = normal(50, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(kmeans(x, 3), kmeans(x.clone(), 3))
        assert kmeans(x.bfloat16(), 3).centers.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("method", ["k-means++", "k-means||", "random", "given"])
@pytest.mark.parametrize("spherical", [False, True])
def test_no_synchronization_with_the_host(monkeypatch, method, spherical):
    """Fake tensors have no values: code that reads one would synchronize with a GPU."""
    monkeypatch.setattr(composed, "_looks", lambda ended, i: False)
    monkeypatch.setattr(composed, "_require_valid", lambda *_: None)
    monkeypatch.setattr(composed, "square_root", torch.sqrt)

    def step(x, centers, weights, *units_and_inertia):
        labels = x[:, 0].long()  # labels of the right shape, because fake tensors cannot be searched
        return steps.after(steps.Arguments(x, centers, weights, *units_and_inertia), labels)

    with FakeTensorMode():
        x, weights, init = torch.empty(50, 4), torch.empty(50, dtype=torch.float64), torch.empty(6, 4)
        for mass in (None, weights):
            given = init if method == "given" else None
            arguments = composed.Arguments(
                x, mass, given, [20, 30], [2, 4], [0, 1], method, spherical, 2, 3, 1e-4
            )
            centers, labels, inertia, iterations = composed.batch(
                composed.Backend(composed.by_steps(step, composed.advance), composed.Grid), arguments
            )
            assert [tuple(t.shape) for t in (centers, labels, inertia, iterations)] == [
                (6, 4),
                (50,),
                (2,),
                (2,),
            ]
