"""``kmeans_step``: a step of Lloyd's algorithm, the same bits from every kernel, and its errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from uefl_kernels import COMPILED, KMeansUnits, backend, kmeans, kmeans_step
from uefl_kernels._library import triton_available

from .conftest import DTYPES, normal

compiled = pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")


def flat(step):
    return [*step[:-1], *step.units]


def assert_same(found, expected):
    for name, a, b in zip(
        (*expected._fields[:-1], *KMeansUnits._fields), flat(found), flat(expected), strict=True
    ):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


def assert_as_reference(x, centers, **options):
    with backend("reference"):
        expected = kmeans_step(x, centers, **options)
    assert_same(kmeans_step(x, centers, **options), expected)
    return expected


@pytest.mark.parametrize("weighted", [False, True])
def test_is_a_lloyd_step(weighted):
    x, centers = (
        normal(500, 7, offset=3.0, dtype=torch.float64),
        normal(9, 7, seed=1, offset=3.0, dtype=torch.float64),
    )
    weights = torch.rand(500).double() * 5 if weighted else None
    found = kmeans_step(x, centers, weights=weights)
    mass = torch.ones(500).double() if weights is None else weights
    labels = torch.cdist(x, centers).argmin(1)
    masses = torch.zeros(9).double().index_add_(0, labels, mass)
    sums = torch.zeros(9, 7).double().index_add_(0, labels, mass[:, None] * x)
    assert torch.equal(found.labels, labels)
    torch.testing.assert_close(found.masses, masses, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.sums, sums, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        found.inertia, (mass * (x - centers[labels]).square().sum(1)).sum(), rtol=1e-13, atol=0
    )
    torch.testing.assert_close(
        found.centers, torch.where(masses[:, None] > 0, sums / masses[:, None], centers)
    )
    if weights is None:
        assert torch.equal(found.masses, labels.bincount(minlength=9).double())


@pytest.mark.every_variant
@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference(dtype):
    for n, d, k in ((0, 3, 2), (1, 1, 1), (37, 3, 50), (300, 17, 12), (700, 70, 33)):
        x, centers = normal(n, d, seed=n, dtype=dtype), normal(k, d, seed=k, dtype=dtype)
        for weights in (None, torch.rand(n, generator=torch.Generator().manual_seed(n)) + 2.0**-40):
            first = assert_as_reference(x, centers, weights=weights)
            assert_same(kmeans_step(x, centers, weights=weights, units=first.units), first)
        for view in (x.T.contiguous().T, torch.stack([x, x], 1)[:, 0], torch.stack([x, x], 2)[:, :, 1]):
            assert_same(kmeans_step(view, centers), kmeans_step(x, centers))


@pytest.mark.every_variant
@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_2_to_the_14(dtype):
    """Then the integers of a row are below 2^51, and the kernels round with fewer operations."""
    x, centers = normal(2**14 + 3, 13, dtype=dtype), normal(5, 13, seed=1, dtype=dtype)
    for weights in (None, torch.rand(len(x), generator=torch.Generator().manual_seed(0))):
        assert_as_reference(x, centers, weights=weights)
        options = {"init": centers, "weights": weights, "max_iter": 3, "tol": 0.0}
        with backend("reference"):
            expected = kmeans(x, 5, **options)
        for found, right in zip(kmeans(x, 5, **options), expected, strict=True):
            assert torch.equal(found, right)


@pytest.mark.every_variant
@compiled
@settings(max_examples=40)
@given(
    st.integers(1, 90),
    st.integers(1, 20),
    st.integers(1, 40),
    st.sampled_from([1e-300, 1e-30, 1.0, 1e30]),
    st.integers(-3, 3),
    st.booleans(),
    st.integers(0, 99),
)
def test_odd_values(n, d, k, scale, steps, weighted, seed):
    """Distances tie, values are extremes of float64, and weights are zero."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(n, d, generator=generator).double() * 2.0**steps).round() * scale
    weights = 10.0 ** torch.randint(-30, 30, (n,), generator=generator) if weighted else None
    assert_as_reference(x, x[torch.randint(n, (k,), generator=generator)], weights=weights)


def test_steps_are_kmeans():
    """The bits are equal as long as no cluster is empty."""
    x = normal(400, 6, scale=2.0)
    fit = kmeans(x, 5, init=x[:5], tol=0.0)
    step = kmeans_step(x, x[:5])
    for _ in range(int(fit.iterations) - 1):
        step = kmeans_step(x, step.centers, units=step.units)
    assert torch.equal(step.centers, fit.centers)
    last = kmeans_step(x, step.centers, units=step.units)
    assert torch.equal(last.labels, fit.labels)
    assert torch.equal(last.inertia, fit.inertia)


def test_a_part_of_the_rows_in_the_units_of_all():
    x, centers, weights = normal(300, 4), normal(6, 4, seed=1), torch.rand(300)
    whole = kmeans_step(x, centers, weights=weights)
    pieces = [
        kmeans_step(x[i : i + 100], centers, weights=weights[i : i + 100], units=whole.units)
        for i in (0, 100, 200)
    ]
    assert torch.equal(torch.cat([piece.labels for piece in pieces]), whole.labels)
    assert torch.equal(sum(piece.masses for piece in pieces), whole.masses)
    torch.testing.assert_close(sum(piece.sums for piece in pieces), whole.sums, rtol=1e-14, atol=1e-14)


def test_an_empty_cluster_keeps_its_center():
    x = normal(20, 3)
    found = kmeans_step(x, torch.cat([x[:1], torch.full((1, 3), 1e4)]), weights=torch.ones(20).double())
    assert torch.equal(found.centers[1], torch.full((3,), 1e4))
    assert found.masses.tolist() == [20, 0]
    none = kmeans_step(x[:0], x[:2])
    assert torch.equal(none.centers, x[:2])
    assert float(none.inertia) == 0
    assert none.labels.shape == (0,)


@pytest.mark.every_variant
@compiled
def test_number_of_threads_does_not_matter():
    x, centers, weights = normal(5000, 9), normal(20, 9, seed=1), torch.rand(5000)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 4) * 7:
            torch.set_num_threads(threads)
            results.append(kmeans_step(x, centers, weights=weights))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available() or not triton_available(), reason="Triton is not interpreted here"
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_equals_the_reference(monkeypatch, dtype):
    """Triton is interpreted, as one kernel or as steps around the search."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for n, d, k in ((0, 3, 2), (90, 17, 7)):
        x, centers, weights = normal(n, d, dtype=dtype), normal(k, d, seed=1, dtype=dtype), torch.rand(n)
        for mass in (None, weights):
            expected = kmeans_step(x, centers, weights=mass)
            with backend("triton"):
                assert_same(kmeans_step(x, centers, weights=mass), expected)
                assert_same(kmeans_step(x.T.contiguous().T, centers, weights=mass), expected)


X, C, W = torch.randn(6, 3), torch.randn(2, 3), torch.ones(6)
UNITS = KMeansUnits(*torch.ops.uefl.kmeans_units(X[:, :2], None))
REFUSED = {
    "x not a tensor": (lambda: kmeans_step([[1.0]], C), TypeError, r"^kmeans_step: x .*torch\.Tensor.*list"),
    "centers not a tensor": (
        lambda: kmeans_step(X, [[1.0]]),
        TypeError,
        r"^kmeans_step: centers.*torch\.Tensor.*list",
    ),
    "x of integers": (
        lambda: kmeans_step(X.long(), C),
        TypeError,
        r"^kmeans_step: x .*torch\.int64.*float32, bfloat16",
    ),
    "weights of integers": (
        lambda: kmeans_step(X, C, weights=W.long()),
        TypeError,
        r"^kmeans_step: weights.*torch\.int64",
    ),
    "device": (lambda: kmeans_step(X, C.to("meta")), ValueError, "^kmeans_step: x .*cpu.*centers.*meta"),
    "x of one dimension": (lambda: kmeans_step(X[0], C), ValueError, r"^kmeans_step: x .*\[N, d\].*\[3\]"),
    "no columns": (
        lambda: kmeans_step(X[:, :0], C[:, :0]),
        ValueError,
        r"^kmeans_step: x .*\[N, d\].*\[6, 0\]",
    ),
    "no centers": (lambda: kmeans_step(X, C[:0]), ValueError, r"^kmeans_step: centers.*\[k, 3\].*\[0, 3\]"),
    "other columns": (
        lambda: kmeans_step(X, C[:, :2]),
        ValueError,
        r"^kmeans_step: centers.*\[k, 3\].*\[2, 2\]",
    ),
    "weights": (lambda: kmeans_step(X, C, weights=W[:5]), ValueError, r"^kmeans_step: weights.*\[6\].*\[5\]"),
    "units not units": (lambda: kmeans_step(X, C, units=X), TypeError, "^kmeans_step: units.*Tensor"),
    "units of others": (
        lambda: kmeans_step(X, C, units=UNITS),
        ValueError,
        r"^kmeans_step: units\.middle.*\[3\].*\[2\]",
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
        for bad in (float("nan"), float("inf")):
            x = torch.where(torch.arange(18).reshape(6, 3) == 17, bad, X)
            with pytest.raises(RuntimeError, match=r"kmeans_step: x .*NaN"):
                kmeans_step(x, C)
            with pytest.raises(RuntimeError, match=r"kmeans_step: centers.*finite.*2\^480 \(3e144\)"):
                kmeans_step(X, x[4:])
        with pytest.raises(RuntimeError, match=r"kmeans_step: x .*2\^480 \(3e144\)"):
            kmeans_step(-X.double() * 1e150, C)
        for weights in (-W, W * float("nan"), W * 0, W.double() * 1e305):
            with pytest.raises(RuntimeError, match=r"kmeans_step: weights.*2\^1000"):
                kmeans_step(X, C, weights=weights)


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_values_that_are_refused_in_units_given(name):
    """Masses would be negative or overflow, and NaN would count for the first cluster."""
    with backend(name):
        units = kmeans_step(X, C, weights=W).units
        for weights in (-W, W * float("nan"), W * 1e9, W * float("inf")):
            with pytest.raises(RuntimeError, match=r"^kmeans_step: weights.*units"):
                kmeans_step(X, C, weights=weights, units=units)
        for bad in (float("nan"), float("inf"), -float("inf")):
            x = torch.where(torch.arange(18).reshape(6, 3) == 17, bad, X)
            for given in (None, W):
                with pytest.raises(RuntimeError, match=r"^kmeans_step: x .*NaN"):
                    kmeans_step(x, C, weights=given, units=units)
        with pytest.raises(RuntimeError, match=r"^kmeans_step: units\b"):
            kmeans_step(X.repeat(2, 1), C, units=units)
        assert float(kmeans_step(X, C, weights=W * 0, units=units).masses.sum()) == 0


@compiled
def test_direct_calls_are_checked():
    """The op checks its arguments itself, in the form in which the public function passes them."""
    middle, scale, mass_scale, _ = torch.ops.uefl.kmeans_units(X, None)
    for arguments, message in (
        ((X, C.double(), None, middle, scale, mass_scale), r"kmeans_step: centers.*\[k, d\].*float64"),
        ((X, C, W, middle, scale, mass_scale), r"kmeans_step: weights.*float64.*\[N\]"),
        ((X, C, None, middle[:2], scale, mass_scale), r"kmeans_step: middle, scale.*float64.*\[d\]"),
        ((X, C, None, middle, scale.float(), mass_scale), r"kmeans_step: middle, scale.*float64.*\[d\]"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.uefl.kmeans_step(*arguments, True)


def test_gradients_stop():
    found = kmeans_step(X.clone().requires_grad_(), C.clone().requires_grad_())
    assert not any(tensor.requires_grad for tensor in flat(found))


def test_opcheck():
    x, centers, weights = normal(19, 3), normal(4, 3, seed=1), torch.rand(19).double()
    for mass in (None, weights):
        torch.library.opcheck(torch.ops.uefl.kmeans_units.default, (x, mass))
        units = torch.ops.uefl.kmeans_units(x, mass)[:3]
        for with_inertia in (False, True):
            torch.library.opcheck(
                torch.ops.uefl.kmeans_step.default, (x, centers, mass, *units, with_inertia)
            )


def test_compile_fullgraph(full_graph):
    counting = CompileCounterWithBackend(full_graph.keywords["backend"])
    step = full_graph(
        lambda x, c: kmeans_step(x * 2, c, weights=x[:, 0].abs()), dynamic=True, backend=counting
    )
    for n in (50, 60, 70):
        x, centers = normal(n, 4), normal(5, 4, seed=1)
        assert_same(step(x, centers), kmeans_step(x * 2, centers, weights=x[:, 0].abs()))
    assert counting.frame_count == 1, "a new N compiles again"


def test_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(kmeans_step(X, C), kmeans_step(X.clone(), C))
        assert kmeans_step(X.bfloat16(), C).centers.dtype == torch.float32
