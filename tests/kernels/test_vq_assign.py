"""The compiled search agrees with the reference: zero wrong indices.

This holds for any data, shape, dtype and strides.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from uefl_kernels import COMPILED, backend, kmeans_step, vq, vq_assign

from .conftest import DTYPES, normal, wrong_indices

METRICS = ("l2", "cosine")
pytestmark = pytest.mark.every_variant
compiled = pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent")


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("k", [1, 2, 15, 16, 17, 31, 33, 255, 1000])
def test_odd_shapes(k, metric):
    for d in (1, 2, 3, 4, 5, 7, 16, 33, 100, 513):
        assert wrong_indices(normal(61, d), normal(k, d, seed=1), metric) == 0, f"d = {d}"


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("offset", [10.0, 1e3, 1e6])
def test_common_offset(offset, metric):
    assert wrong_indices(normal(2000, 24, offset=offset), normal(100, 24, seed=1, offset=offset), metric) == 0


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-30, 1e-19, 1e10, 1e19, 3e37])
def test_extreme_scale(scale, metric):
    assert wrong_indices(normal(200, 8, scale=scale), normal(40, 8, seed=1, scale=scale), metric) == 0
    assert wrong_indices(normal(200, 8, scale=scale), normal(40, 8, seed=1), metric) == 0


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e-100, 1e100, 1e140, 1e144])
def test_extreme_scale_float64(scale, metric):
    x, codebook = (
        normal(200, 8, scale=scale, dtype=torch.float64),
        normal(40, 8, seed=1, scale=scale, dtype=torch.float64),
    )
    assert wrong_indices(x, codebook.clamp(-(2.0**480), 2.0**480), metric) == 0
    if 1e-100 <= scale <= 1e140:  # no square overflows, or is zero
        assert torch.equal(
            vq_assign(x, codebook, metric=metric), vq_assign(x / scale, codebook / scale, metric=metric)
        )


@pytest.mark.parametrize("metric", METRICS)
def test_rows_beyond_the_squares_of_float64(metric):
    """Distances are infinite, and the first codeword wins.

    For the cosine only the sum must be finite.
    """
    x, codebook = normal(50, 8, dtype=torch.float64), normal(40, 8, seed=1, dtype=torch.float64)
    for scale in (1e200, 1e307):
        rows = (x * scale).clamp(-1.7e308, 1.7e308)
        assert wrong_indices(rows, codebook, metric) == 0
        if metric == "l2":
            assert not vq_assign(rows, codebook).any()
    assert metric == "l2" or torch.equal(
        vq_assign(x * 1e300, codebook, metric=metric), vq_assign(x, codebook, metric=metric)
    )


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", ["auto", "reference"])
def test_codewords_whose_squares_overflow(name, metric):
    x, codebook = normal(5, 3, dtype=torch.float64), normal(4, 3, seed=1, dtype=torch.float64)
    codebook[2, 1] = 2.0**480
    with backend(name):
        vq_assign(x, codebook, metric=metric)
        codebook[2, 1] *= 1.01
        for call in (vq_assign, vq):
            with pytest.raises(RuntimeError, match=rf"^{call.__name__}:.*codebook.*2\^480 \(3e144\)"):
                call(x, codebook, metric=metric)


@pytest.mark.parametrize("metric", METRICS)
def test_duplicate_codewords_give_the_lowest_index(metric):
    codebook = normal(50, 12)
    x = torch.cat([normal(300, 12, seed=1), codebook])
    doubled = torch.cat([codebook, codebook, codebook])
    assert wrong_indices(x, doubled, metric) == 0
    assert vq_assign(x, doubled, metric=metric).max() < 50


def test_midpoints_of_codewords():
    codebook = normal(40, 24, offset=5)
    x = (codebook[:, None] + codebook[None]).reshape(-1, 24) / 2
    assert wrong_indices(x, codebook) == 0
    assert wrong_indices(torch.nextafter(x, torch.tensor(9.0)), codebook) == 0


def test_all_codewords_equal():
    assert vq_assign(normal(100, 5), torch.full((33, 5), 0.1)).unique().tolist() == [0]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite(value, metric):
    x = normal(96, 7)
    for row in range(0, 96, 3):
        x[row, row % 7] = value
    x[95] = value
    codebook = normal(37, 7, seed=1)
    assert wrong_indices(x, codebook, metric) == 0
    if value != value:
        assert vq_assign(x, codebook, metric=metric)[:96:3].unique().tolist() == [0]


@pytest.mark.parametrize("metric", METRICS)
def test_zero_codeword(metric):
    codebook = normal(20, 6)
    codebook[7] = 0
    assert wrong_indices(torch.cat([normal(100, 6, seed=1), torch.zeros(5, 6)]), codebook, metric) == 0


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("codebook_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, codebook_dtype, metric):
    x, codebook = normal(500, 20, dtype=dtype), normal(70, 20, seed=1, dtype=codebook_dtype)
    assert wrong_indices(x, codebook, metric) == 0
    assert wrong_indices(x.T.contiguous().T, codebook, metric) == 0


def test_every_half_precision_value():
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        values = bits.view(dtype).reshape(-1, 1)
        codebook = values[values.isfinite()][::197].reshape(-1, 1)
        assert wrong_indices(values, codebook) == 0


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-segment"])
@pytest.mark.parametrize("segments", [1, 2, 5])
def test_segments(segments, shared, metric):
    codebook = normal(19, 9, seed=1) if shared else normal(segments, 19, 9, seed=1)
    x = normal(4, 30, segments * 9)
    assert vq_assign(x, codebook).shape == (4, 30, segments)
    assert wrong_indices(x, codebook, metric) == 0


VIEWS = {
    "transposed": lambda: normal(24, 50).T,
    "sliced": lambda: normal(100, 60)[::2, 3:51:2],
    "expanded": lambda: normal(1, 24).expand(50, 24),
    "expanded-elements": lambda: normal(50, 1).expand(50, 24),
    "channels-first": lambda: normal(3, 24, 5, 7).permute(0, 2, 3, 1),
    "three-strided-dimensions": lambda: normal(4, 24, 6, 10).permute(0, 2, 3, 1)[:, ::2, ::3],
    "swapped-rows": lambda: normal(6, 8, 24).transpose(0, 1),
    "flipped": lambda: normal(50, 24).flip(0)[:, 0:24],
    "offset": lambda: normal(1300)[7 : 7 + 1200].view(50, 24),
    "size-one-dimensions": lambda: normal(1, 50, 1, 24)[:, ::3],
    "one-dimension": lambda: normal(24),
}


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-segment"])
@pytest.mark.parametrize("view", VIEWS)
def test_strides(view, shared):
    x = VIEWS[view]()
    codebook = normal(21, 8, seed=1) if shared else normal(3, 21, 8, seed=1)
    assert wrong_indices(x, codebook) == 0
    assert torch.equal(vq_assign(x, codebook), vq_assign(x.contiguous(), codebook))


def test_strided_codebook():
    assert wrong_indices(normal(40, 8), normal(8, 33, seed=1).T) == 0
    assert wrong_indices(normal(40, 8), normal(1, 8, seed=1).expand(33, 8)) == 0


@pytest.mark.parametrize(
    ("op", "name"),
    [(vq_assign, "codebook"), (vq, "codebook"), (kmeans_step, "centers")],
    ids=["vq_assign", "vq", "kmeans_step"],
)
def test_codebook_larger_than_memory_is_one_line(op, name, capfd):
    named = rf"^{op.__name__}: .*{name} \[1099511627776, 8\] .*35,184,372,088,832.*\(.*allocate"
    with pytest.raises(RuntimeError, match=named) as error:
        op(torch.randn(4, 8), torch.randn(1, 8).expand(2**40, 8))
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("shape", [(0, 6), (3, 0, 6), (0, 4, 5, 6)], ids=str)
def test_no_rows(shape):
    assert vq_assign(torch.empty(shape), normal(5, 3)).shape == (*shape[:-1], 2)


def test_batch_size_does_not_matter():
    x, codebook = normal(333, 18, offset=100), normal(65, 18, seed=1, offset=100)
    whole = vq_assign(x, codebook)
    for size in (1, 5, 12, 47):
        assert torch.equal(whole, torch.cat([vq_assign(piece, codebook) for piece in x.split(size)]))


@compiled
def test_number_of_threads_does_not_matter():
    x, codebook = normal(20000, 32), normal(64, 32, seed=1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = vq_assign(x, codebook)
        torch.set_num_threads(2)
        assert torch.equal(one, vq_assign(x, codebook))
    finally:
        torch.set_num_threads(before)


def test_fast_precision_is_close():
    x, codebook = normal(1000, 16), normal(64, 16, seed=1)
    fast = vq_assign(x, codebook, precision="fast").squeeze(1)
    distance = (x - codebook[fast]).norm(dim=1)
    assert torch.allclose(distance, torch.cdist(x, codebook).amin(1), rtol=1e-4)


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001])
def test_row_with_any_nan_gets_index_0(bits, precision):
    """0x7fffffff is the NaN of NVIDIA GPUs.

    Rounding it to bfloat16 like a number gives zero.
    """
    x, codebook = normal(40, 64), normal(64, 64, seed=1)
    x[5:9].view(torch.int32)[[0, 1, 3], [3, 40, 63]] = bits
    x[7].view(torch.int32)[:] = bits
    assert vq_assign(x, codebook, precision=precision)[5:9].count_nonzero() == 0


def test_infinite_row_gets_index_0():
    x, codebook = normal(40, 64), normal(64, 64, seed=1)
    x[5, 3], x[6, 0], x[7, 63], x[7, 2] = (float(v) for v in ("inf", "-inf", "inf", "-inf"))
    assert vq_assign(x, codebook)[5:8].count_nonzero() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["auto", "reference"])
def test_codebook_that_is_not_finite(name, value):
    codebook = normal(5, 3)
    codebook[2, 1] = value
    with backend(name), pytest.raises(RuntimeError, match=r"^vq_assign:.*codebook.*NaN"):
        vq_assign(normal(4, 3), codebook)


X, C = torch.zeros(4, 6), torch.zeros(5, 3)
RAGGED = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)
with FakeTensorMode():
    ON_MPS = torch.empty(4, 6, device="mps")
ERRORS = {
    "x-type": (lambda: vq_assign([1.0], C), TypeError, r"x .*torch\.Tensor.*list"),
    "codebook-type": (lambda: vq_assign(X, None), TypeError, r"codebook.*torch\.Tensor.*NoneType"),
    "x-dtype": (lambda: vq_assign(X.int(), C), TypeError, r"x .*torch\.int32.*float32"),
    "codebook-dtype": (lambda: vq_assign(X, C.to(torch.complex64)), TypeError, r"codebook.*torch\.complex64"),
    "sparse": (lambda: vq_assign(X.to_sparse(), C), TypeError, r"x .*sparse_coo.*to_dense\(\)"),
    "nested": (lambda: vq_assign(RAGGED, C), TypeError, "x .*nested.*dense"),
    "mps": (lambda: vq_assign(ON_MPS, C), ValueError, "x .*mps:0.*float64.*CPU"),
    "metric": (lambda: vq_assign(X, C, metric="l1"), ValueError, "metric 'l1'"),
    "precision": (lambda: vq_assign(X, C, precision="high"), ValueError, "precision 'high'"),
    "device": (lambda: vq_assign(X, C.to("meta")), ValueError, "x .*cpu.*codebook.*meta"),
    "x-scalar": (lambda: vq_assign(torch.tensor(1.0), C), ValueError, r"x.*\[..., D\].*scalar"),
    "codebook-shape": (lambda: vq_assign(X, C[0]), ValueError, r"codebook.*\[K, d\].*\[S, K, d\].*\[3\]"),
    "codebook-empty": (lambda: vq_assign(X, C[:0]), ValueError, "codebook.*empty"),
    "segments": (
        lambda: vq_assign(X, C.expand(3, 5, 3)),
        ValueError,
        r"3 segments.*x \[..., 9\].*\[..., 6\]",
    ),
    "length": (lambda: vq_assign(X[:, :5], C), ValueError, "length 3.*D"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, error, message = ERRORS[case]
    with pytest.raises(error, match=f"^vq_assign: .*{message}"):
        call()


UNCHECKED = {
    "dtype": (X.int(), C, "l2", "x .*codebook .*float32, bfloat16, float16 .*float64"),
    "codebook-dtype": (X, C.int(), "l2", "x .*codebook .*float32, bfloat16, float16 .*float64"),
    "metric": (X, C, "l1", "metric.*'l2'.*'cosine'"),
    "scalar": (torch.tensor(1.0), C, "l2", r"x .*\[..., D\]"),
    "codebook-shape": (X, C[0], "l2", r"codebook.*\[K, d\].*\[S, K, d\]"),
    "codebook-empty": (X, C[:0], "l2", "codebook .*codeword"),
    "no-elements": (X[:, :0], C, "l2", r"D .*\bd\b.*\[K, d\]"),
    "length": (X[:, :5], C, "l2", r"D .*\bd\b.*\[K, d\]"),
    "segments": (X, C.expand(3, 5, 3), "l2", r"D .*S \* d .*\[S, K, d\]"),
}


@compiled
@pytest.mark.parametrize("case", UNCHECKED)
def test_direct_calls_are_guarded(case):
    x, codebook, metric, message = UNCHECKED[case]
    with pytest.raises(RuntimeError, match=f"^vq_assign: {message}"):
        torch.ops.uefl.vq_assign(x, codebook, metric, True)
    with pytest.raises(RuntimeError, match=f"^vq: {message}"):
        torch.ops.uefl.vq(x, codebook, metric, True, True, 1.0, 0.25, False)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-segment"])
def test_opcheck(shared):
    codebook = normal(5, 3, seed=1) if shared else normal(2, 5, 3, seed=1)
    torch.library.opcheck(torch.ops.uefl.vq_assign.default, (normal(4, 7, 6), codebook, "l2", True))


def test_compile_fullgraph(full_graph):
    x, codebook = normal(33, 8), normal(9, 8, seed=1)
    compiled_function = full_graph(lambda a, b: vq_assign(a + 1, b).float().mean())
    assert torch.equal(compiled_function(x, codebook), vq_assign(x + 1, codebook).float().mean())


VALUES = st.one_of(
    st.floats(-4, 4, width=32),
    st.sampled_from(
        [0.0, -0.0, 1.0, 1e-45, -1e-38, 1e-20, 1e15, 1e19, -3e38, float("inf"), float("-inf"), float("nan")]
    ),
)


@settings(max_examples=600 if os.environ.get("UEFL_CPU") else 150)
@given(
    data=st.data(),
    n=st.integers(1, 30),
    k=st.integers(1, 40),
    d=st.integers(1, 9),
    metric=st.sampled_from(METRICS),
)
def test_fuzz(data, n, k, d, metric):
    pool = torch.tensor(data.draw(st.lists(VALUES, min_size=1, max_size=8)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    x = pool[torch.randint(len(pool), (n, d), generator=generator)]
    finite = torch.cat([pool[pool.isfinite()], torch.zeros(1)])
    codebook = finite[torch.randint(len(finite), (k, d), generator=generator)]
    assert wrong_indices(x, codebook, metric) == 0
