"""CUDA C++ and Triton on a GPU against the float64 reference.

Skipped without one.
"""

import contextlib

import pytest
import torch

from uefl_kernels import backend, kmeans, kmeans_step, rvq, vq, vq_assign, vq_with_sums
from uefl_kernels._library import call, resolve, triton_available

from .conftest import captured, cuda_built, no_waiting
from .search_cases import CASES, codebook_with

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def search_built():
    return cuda_built("vq_assign")


def sm_90_built():
    return search_built() and torch.cuda.get_device_capability() == (9, 0)


BACKENDS = {
    "cuda, wgmma": sm_90_built,
    "cuda, mma": search_built,
    "cuda, streamed": search_built,
    "triton": triton_available,
}


@pytest.fixture(params=BACKENDS, autouse=True)
def forced(request, monkeypatch):
    if not BACKENDS[request.param]():
        pytest.skip(f"the {request.param} kernels are not built here")
    torch.manual_seed(0)
    name, _, search = request.param.partition(", ")
    monkeypatch.setenv("UEFL_CUDA_SEARCH", search or "auto")
    with backend(name):
        yield name


def reference(x, codebook, metric="l2"):
    with backend("reference"):
        return vq_assign(x, codebook, metric=metric)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("case", CASES)
def test_small_equals_the_reference(case, metric):
    x, codebook = CASES[case]()
    found = vq_assign(x.to("cuda"), codebook.to("cuda"), metric=metric)
    assert torch.equal(found.cpu(), reference(x, codebook, metric))


def test_small_strides_survive_on_the_device():
    """Take the views on the device: ``.to`` makes some layouts dense."""
    x, codebook = (
        torch.randn(2, 12, 7, 5, device="cuda").permute(0, 2, 3, 1),
        torch.randn(3, 40, 4, device="cuda"),
    )
    assert torch.equal(vq_assign(x, codebook), reference(x, codebook))
    wide = torch.randn(50, 40, device="cuda")[::3, 1:37:3]
    assert torch.equal(vq_assign(wide, codebook), reference(wide, codebook))


@pytest.mark.parametrize("d", [4, 24, 200])
@pytest.mark.parametrize(("metric", "scale"), [("cosine", 1.0), ("l2", 2.0**62)])
def test_small_fast_precision_is_exact_beyond_float16(metric, scale, d):
    x, codebook = torch.randn(50, 3 * d) * 2.0**62, torch.randn(20, d) * scale
    found = vq_assign(x.to("cuda"), codebook.to("cuda"), metric=metric, precision="fast")
    assert torch.equal(found.cpu(), reference(x, codebook, metric))


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_small_codeword_that_is_not_finite_never_wins(value, metric):
    codebook, finite = codebook_with(value)
    x = torch.randn(30, 4)
    found = vq_assign(x.to("cuda"), codebook.to("cuda"), metric=metric)
    assert torch.equal(found.cpu(), finite[reference(x, codebook[finite], metric)])


@pytest.mark.parametrize(
    ("n", "d", "k"),
    [
        (9216, 512, 64),
        (20_000, 64, 256),
        (5_000, 64, 5_000),
        (4_000, 128, 1000),
        (4_000, 200, 70),
        (3_000, 700, 33),
        (900, 3000, 40),
    ],
)
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_full_tiles(n, d, k, offset):
    x, codebook = torch.randn(n, d, device="cuda") + offset, torch.randn(k, d, device="cuda") + offset
    assert torch.equal(vq_assign(x, codebook), reference(x, codebook))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "d", "k"), [(20_000, 64, 1024), (6_000, 256, 300), (3_000, 512, 200), (3_000, 24, 4_000)]
)
def test_full_tiles_of_16_bits(n, d, k, dtype):
    x, codebook = torch.randn(n, d, device="cuda").to(dtype), torch.randn(k, d, device="cuda").to(dtype)
    assert torch.equal(vq_assign(x, codebook), reference(x, codebook))


def test_small_rows_with_gaps_and_a_codebook_each():
    x, codebook = (
        torch.randn(3, 300, 56, device="cuda")[:, 10:210, :48],
        torch.randn(3, 140, 16, device="cuda"),
    )
    assert torch.equal(vq_assign(x, codebook), reference(x, codebook))
    assert torch.equal(vq_assign(x, codebook[0]), reference(x, codebook[0]))


def test_small_path_that_is_not_known_is_refused(forced, monkeypatch):
    monkeypatch.setenv("UEFL_CUDA_SEARCH", "fastest")
    if forced != "cuda":
        pytest.skip("read by the CUDA C++ kernels only")
    with pytest.raises(RuntimeError, match=r"UEFL_CUDA_SEARCH=fastest.*auto, wgmma"):
        vq_assign(torch.randn(4, 6, device="cuda"), torch.randn(5, 6, device="cuda"))


def test_small_wgmma_elsewhere_is_refused(forced, monkeypatch):
    monkeypatch.setenv("UEFL_CUDA_SEARCH", "wgmma")
    if forced != "cuda" or sm_90_built():
        pytest.skip("read by the CUDA C++ kernels only, and fine on sm_90")
    with pytest.raises(RuntimeError, match=r"UEFL_CUDA_SEARCH=wgmma.*9\.0"):
        vq_assign(torch.randn(4, 6, device="cuda"), torch.randn(5, 6, device="cuda"))


def test_small_graph_replays_with_new_data():
    """No launch waits for the host or depends on the data.

    Open rows and the middle of the codebook change at every replay.
    """
    x, codebook = torch.randn(700, 12, device="cuda"), torch.randn(50, 12, device="cuda")
    graph, found = captured(lambda: vq_assign(x, codebook))
    for scale, offset in ((1.0, 0.0), (1e3, 0.0), (1.0, 5.0)):
        x.copy_(torch.randn_like(x) * scale + offset)
        codebook.copy_(torch.randn_like(codebook) + offset)
        graph.replay()
        assert torch.equal(found, reference(x, codebook))


WRONG = {
    "codebook on the CPU": (
        lambda: (torch.zeros(4, 6, device="cuda"), torch.zeros(5, 3), "l2"),
        "codebook.*device",
    ),
    "x on the CPU": (lambda: (torch.zeros(4, 6), torch.zeros(5, 3, device="cuda"), "l2"), "codebook.*device"),
    "length": (
        lambda: (torch.zeros(4, 5, device="cuda"), torch.zeros(5, 3, device="cuda"), "l2"),
        r"\[K, d\]",
    ),
    "no codewords": (
        lambda: (torch.zeros(4, 6, device="cuda"), torch.zeros(0, 3, device="cuda"), "l2"),
        "codebook.*codeword",
    ),
    "scalar": (lambda: (torch.zeros((), device="cuda"), torch.zeros(5, 3, device="cuda"), "l2"), "x.*shape"),
    "codebook of one dimension": (
        lambda: (torch.zeros(4, 6, device="cuda"), torch.zeros(3, device="cuda"), "l2"),
        "codebook.*shape",
    ),
    "metric": (
        lambda: (torch.zeros(4, 6, device="cuda"), torch.zeros(5, 3, device="cuda"), "l1"),
        "metric.*'l2'",
    ),
    "dtype": (
        lambda: (torch.zeros(4, 6, device="cuda"), torch.zeros(5, 3, device="cuda").int(), "l2"),
        "codebook.*float32",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_small_direct_calls_are_guarded(case, forced):
    if forced != "cuda":
        pytest.skip("the Triton kernel is reached by the checked functions")
    make, message = WRONG[case]
    with pytest.raises(RuntimeError, match=f"vq_assign: .*{message}"):
        torch.ops.uefl_cuda.vq_assign(*make(), True)


def test_batch_size_does_not_matter():
    x, codebook = torch.randn(1000, 32, device="cuda"), torch.randn(100, 32, device="cuda")
    whole = vq_assign(x, codebook)
    assert torch.equal(whole, torch.cat([vq_assign(piece, codebook) for piece in x.split([1, 130, 869])]))


def test_more_than_2_31_elements():
    rows = (1 << 25) + 3
    x = torch.randint(-4, 5, (rows, 64), device="cuda", dtype=torch.int8).to(torch.bfloat16)
    codebook = torch.randn(5, 64, device="cuda")
    found = vq_assign(x, codebook)
    for piece in (slice(0, 500), slice(rows - 500, rows)):
        assert torch.equal(found[piece], reference(x[piece], codebook))


def test_never_waits_for_the_device():
    x, codebook = torch.randn(500, 16, device="cuda"), torch.randn(40, 16, device="cuda")
    vq_assign(x, codebook)
    with no_waiting():
        vq_assign(x, codebook)


def test_a_new_shape_does_not_recompile(forced):
    if forced != "triton":
        pytest.skip("CUDA C++ is compiled ahead of time")
    from uefl_kernels.ops.vq_assign import triton

    compiled = []
    for n, k in ((256, 32), (257, 33), (1000, 1), (1, 64)):
        vq_assign(torch.randn(n, 16, device="cuda"), torch.randn(k, 16, device="cuda"))
        compiled.append(len(triton._search.device_caches[torch.cuda.current_device()][0]))
    assert len(set(compiled)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vq_agrees_with_the_cpu(dtype):
    results = []
    start, codewords = torch.randn(300, 12, dtype=dtype), torch.randn(20, 4)
    for device in ("cpu", "cuda"):
        x, codebook = (
            start.to(device).detach().requires_grad_(),
            codewords.to(device).detach().requires_grad_(),
        )
        with backend("reference") if device == "cpu" else contextlib.nullcontext():
            out = vq(x, codebook)
        (out.loss + out.quantized.float().sum()).backward()
        results.append([t.detach().cpu() for t in (*out, x.grad, codebook.grad)])
    quantized, indices, loss, counts, x_grad, codebook_grad = zip(*results, strict=True)
    for expected, found in (quantized, indices, counts):
        assert torch.equal(found, expected)
    for expected, found in (loss, x_grad, codebook_grad):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("step", "unit"), [(0.2, False), (0.5, True), (1.0, False)])
def test_small_moving_averages_equal_the_cpu(forced, step, unit):
    state = torch.rand(3, 300), torch.randn(3, 300, 33), torch.randn(3, 300, 33)
    counts, sums = torch.randint(0, 2, (3, 300)), torch.randn(3, 300, 33, dtype=torch.float64)
    sums[1, 2, 3] = torch.nan
    found = call(
        "ema_update",
        torch.empty(0, device="cuda"),
        [*(tensor.cuda() for tensor in (*state, counts, sums)), None, step, 1e-5, unit],
        False,
    )
    expected = torch.ops.uefl.ema_update(*state, counts, sums, None, step, 1e-5, unit)
    for one, other in zip(found, expected, strict=True):
        if forced == "triton":  # this backend composes torch's operations, which round in another order
            torch.testing.assert_close(one.cpu(), other)
        else:
            assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("init", ["k-means++", "k-means||", "random", "far"])
@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_small_kmeans_equals_the_cpu(init, metric):
    x, weights = torch.randn(900, 20), torch.rand(900)
    given = torch.cat([x[:5], 100 + torch.randn(7, 20)])  # seven empty clusters
    step = kmeans_step(x.cuda(), given.cuda(), weights=weights.cuda())
    found = kmeans(
        x.cuda(), 12, weights=weights.cuda(), init=given.cuda() if init == "far" else init, metric=metric
    )
    with backend("auto"):
        expected_step = kmeans_step(x, given, weights=weights)
        expected = kmeans(x, 12, weights=weights, init=given if init == "far" else init, metric=metric)
    for one, other in zip(
        (*found, *step[:-1], *step.units), (*expected, *expected_step[:-1], *expected_step.units), strict=True
    ):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("rows", [1, 30, 3000])  # few rows take one launch, many rows one for each stage
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("segments", [1, 3])
def test_small_stages_equal_the_reference(segments, dtype, rows):
    x = torch.randn(24, rows).to(dtype).T
    codebooks = [torch.randn(segments, k, 24 // segments).squeeze(0) for k in (70, 9, 300)]
    codebooks[2][..., 4, :] = codebooks[2][..., 2, :]  # ties
    with backend("reference"):
        expected = rvq(x, codebooks)
    found = rvq(x.to("cuda"), [codebook.to("cuda") for codebook in codebooks])
    assert torch.equal(found.quantized.cpu(), expected.quantized)
    assert torch.equal(found.indices.cpu(), expected.indices)
    for one, other in zip(found.counts, expected.counts, strict=True):
        assert torch.equal(one.cpu(), other)
    torch.testing.assert_close(found.losses.cpu(), expected.losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("spherical", [False, True])
def test_small_iterations_of_k_means_equal_the_reference(dtype, spherical):
    """The cases have elements of a row apart, empty clusters, and more clusters than a block moves."""
    x, weights = torch.randn(30, 2000).to(dtype).T, torch.rand(2000).double()
    units = torch.ops.uefl_reference.kmeans_units(x, weights)[:3]
    centers = torch.cat([x[:300], 100 + x[:9]]).to(torch.promote_types(dtype, torch.float32))
    limit = torch.zeros((), dtype=torch.float64)
    for mass in (None, weights):
        given = x, centers, mass, *units, limit
        expected = torch.ops.uefl_reference.kmeans_lloyd(*given, spherical, 20)
        on_device = [None if tensor is None else tensor.to("cuda") for tensor in given]
        found = resolve("kmeans_lloyd", on_device[0])(*on_device, spherical, 20)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other)


def test_small_kmeans_in_a_cuda_graph():
    x = torch.randn(3000, 16, device="cuda")
    graph, found = captured(lambda: kmeans(x, 8, max_iter=40))
    x.copy_(torch.randn_like(x))
    graph.replay()
    for one, other in zip(found, kmeans(x, 8, max_iter=40), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("value", [0.0, 1e30, float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["rows", "channels first", "per segment"])
def test_small_outputs_of_the_search_equal_the_reference(layout, dtype, value):
    x = torch.randn(2, 12, 700).transpose(1, 2) if layout == "channels first" else torch.randn(1400, 12)
    x, codebook = x.to(dtype), torch.randn(3, 9, 4) if layout == "per segment" else torch.randn(9, 4)
    # ties: rows that the first phase leaves open, and a codeword that gets none
    codebook[..., 0, :] = codebook[..., 3, :]
    x[(0,) * x.dim()] = value
    with backend("reference"):
        expected, expected_sums = vq_with_sums(x, codebook)
    on_device = x.to("cuda") if layout != "channels first" else x.transpose(1, 2).to("cuda").transpose(1, 2)
    found, sums = vq_with_sums(on_device, codebook.to("cuda"))
    for name in ("quantized", "indices", "counts"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    torch.testing.assert_close(sums.cpu(), expected_sums, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found.loss.cpu(), expected.loss, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("weighted", [False, True])
def test_small_step_of_k_means_has_the_bits_of_the_reference(weighted):
    x, weights = torch.randn(3000, 40) + 5, torch.rand(3000) if weighted else None
    centers = torch.randn(60, 40) + 5
    centers[4] = centers[2]
    with backend("reference"):
        expected = kmeans_step(x, centers, weights=weights)
    found = kmeans_step(
        x.to("cuda"), centers.to("cuda"), weights=None if weights is None else weights.to("cuda")
    )
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0)


def test_small_graph_of_vq_replays_on_new_data():
    x, codebook = torch.randn(700, 12, device="cuda"), torch.randn(50, 12, device="cuda")
    graph, (found, sums) = captured(lambda: vq_with_sums(x, codebook))
    for scale in (1.0, 1e3):  # units are chosen for rows of the codewords' size, which 1e3 exceeds
        x.copy_(torch.randn_like(x) * scale)
        codebook.copy_(torch.randn_like(codebook))
        graph.replay()
        with backend("reference"):
            expected, expected_sums = vq_with_sums(x.cpu(), codebook.cpu())
        assert torch.equal(found.quantized.cpu(), expected.quantized)
        assert torch.equal(sums.cpu(), expected_sums)


def test_small_gradient_reads_nothing_for_an_index_out_of_range(forced):
    x, codebook = torch.randn(3, 4, device="cuda"), torch.randn(5, 4, device="cuda")
    indices, pull = torch.tensor([[1], [5], [-7]], device="cuda"), torch.ones((), device="cuda")
    namespace = torch.ops.uefl_cuda if forced == "cuda" else torch.ops.uefl_triton
    found = namespace.vq_backward(x, codebook, indices, None, pull, False)
    assert found.isnan().all(1).tolist() == [False, True, True]
