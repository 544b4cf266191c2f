"""The Triton kernel agrees with the reference.

It is interpreted on CPU tensors, and compiled ahead of time for three generations of GPU.

``tests/conftest.py`` has imported Triton for interpretation. With a GPU, ``test_cuda.py`` runs the kernel
natively instead.
"""

import sys

import numpy as np
import pytest
import torch

from uefl_kernels import backend, kmeans_step, rvq_with_sums, vq, vq_assign, vq_with_sums

from . import ahead
from .search_cases import CASES, FLOATS, codebook_with

if torch.cuda.is_available():
    pytest.skip("the kernel runs natively here (test_cuda.py)", allow_module_level=True)
pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.manual_seed(0)


METRICS = ("l2", "cosine")


def metrics_of(number: int, case: str) -> tuple[str, ...]:
    """Return both metrics, or one of them for some layouts and pairs of dtypes.

    Metrics only differ after the numbers have been read.
    """
    read = " by " in case or case.endswith(("shared", "per segment"))
    return (METRICS[(number + number // 4 + number // 8) % 2],) if read else METRICS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "metric"), [(case, metric) for i, case in enumerate(CASES) for metric in metrics_of(i, case)]
)
def test_equals_the_reference(case, metric):
    x, codebook = CASES[case]()
    with backend("reference"):
        expected = vq_assign(x, codebook, metric=metric)
    with backend("triton"):
        found = vq_assign(x, codebook, metric=metric)
    assert torch.equal(found, expected), (
        f"{int((found != expected).sum())} of {expected.numel()} indices differ"
    )


def _widened_by_bits(input, input_dtype, output_dtype, rounding, otherwise=interpreter._convert_float):
    if (input_dtype, output_dtype) == (tl.bfloat16, tl.float32):  # the hardware does the same
        return input.view(np.uint16).astype(np.uint32) << 16
    return otherwise(input, input_dtype, output_dtype, rounding)


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize(
    "convert",
    [
        pytest.param(
            interpreter._convert_float,
            marks=pytest.mark.xfail(
                strict=True,
                reason="Triton 3.6's interpreter widens subnormal bfloat16 wrongly: 2^-127 becomes zero",
            ),
        ),
        _widened_by_bits,
    ],
    ids=["interpreter", "bits"],
)
def test_subnormal_bfloat16(monkeypatch, convert, metric):
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    x, codebook = ((torch.randn(shape) * 2.0**-128).bfloat16() for shape in ((60, 12), (20, 6)))
    with backend("reference"):
        expected = vq_assign(x, codebook, metric=metric)
    with backend("triton"):
        assert torch.equal(vq_assign(x, codebook, metric=metric), expected)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_codeword_that_is_not_finite_never_wins(value, metric):
    codebook, finite = codebook_with(value)
    x = torch.randn(30, 4)
    with backend("triton"):
        found = vq_assign(x, codebook, metric=metric)
    assert torch.equal(found, finite[vq_assign(x, codebook[finite], metric=metric)])


def test_fast_precision_skips_the_certificate():
    x, codebook = torch.randn(50, 8), torch.randn(20, 8)
    with backend("triton"):
        found = vq_assign(x, codebook, precision="fast")
    assert torch.equal(found, vq_assign(x, codebook))  # the distances differ by enough for float32


@pytest.mark.slow
@pytest.mark.parametrize("per_segment", [False, True])
def test_fast_precision_is_exact_beyond_the_range_of_float16(per_segment):
    x, codebook = torch.randn(50, 12), torch.randn(3, 20, 4) if per_segment else torch.randn(20, 4)
    x[::4] *= 2.0**70
    x[1::4] *= 2.0**110
    x[7], x[9, 5] = float("nan"), float("inf")
    # far from a short codebook all codewords are the same to l2
    for metric, scale in (("cosine", 1.0), ("l2", 2.0**62)):
        rows = x if metric == "cosine" else x.clamp(-5, 5) * scale
        expected, _ = vq_with_sums(rows, codebook * scale, metric=metric)
        with backend("triton"):
            assert torch.equal(
                vq_assign(rows, codebook * scale, metric=metric, precision="fast"), expected.indices
            )
            found, _ = vq_with_sums(rows, codebook * scale, metric=metric, precision="fast")
        assert torch.equal(found.counts, expected.counts)
        torch.testing.assert_close(found.quantized, expected.quantized, rtol=0, atol=0, equal_nan=True)
        assert len(expected.indices.unique()) > 10


@pytest.fixture
def passes(monkeypatch):
    """Return the list of open outputs after the first and the second phase.

    An output that the second phase settled is -1.
    """
    kernel, left = sys.modules["uefl_kernels.ops.vq_assign.triton"], {}

    class Watched:
        def __init__(self, launcher, name, after):
            self.launcher, self.name, self.after = launcher, name, after

        def __getitem__(self, grid):
            def launch(*arguments, **options):
                if self.after:
                    self.launcher[grid](*arguments, **options)
                header, indices, listed = arguments[2:5] if self.name == "rescored" else arguments[4:7]
                left[self.name] = listed[: header[0, 0]].clone()
                left[self.name + " of"] = indices.clone()
                if not self.after:
                    self.launcher[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(kernel, "_search", Watched(kernel._search, "listed", True))
    monkeypatch.setattr(kernel, "_rescore", Watched(kernel._rescore, "rescored", False))
    return left


def test_only_uncertain_rows_are_rescored(passes):
    """Certain rows have their answer after the first phase.

    The others, here exact ties, stay on the list until the last.
    """
    codebook = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [5.0, 0.0]])
    x = torch.tensor([[-0.5, 3.0], [0.0, 3.0], [0.5, 3.0], [3.0, 0.0], [4.0, 0.0], [float("nan"), 0.0]])
    with backend("triton"):
        found = vq_assign(x, codebook)
    assert sorted(passes["listed"].tolist()) == sorted(passes["rescored"].tolist()) == [1, 3, 5]
    assert passes["listed of"].flatten()[[0, 2, 4]].tolist() == [0, 1, 2]
    assert found.flatten().tolist() == [0, 0, 1, 1, 2, 0]


OFFSETS, SIZES = (0.0, 100.0), ((3, 40), (32, 300), (300, 20))


@pytest.mark.parametrize(
    ("size", "offset", "metric"),
    [  # every pair of values; every value once or twice in the fast tests
        pytest.param(
            SIZES[i], OFFSETS[j], METRICS[(min(i, 1) + j) % 2], marks=() if i % 2 == j else pytest.mark.slow
        )
        for i in range(3)
        for j in range(2)
    ],
    ids=str,
)
def test_each_pass_certifies_most_rows_and_only_right_ones(passes, size, offset, metric):
    """The certificate accepts no wrong row, and sends few rows to the slow pass."""
    d, k = size
    # far from the origin all directions are nearly one: every row goes to the slow pass
    alike = metric == "cosine" and offset > 0
    rows = 20 if alike else 60 if d == 300 else 300
    x, codebook = torch.randn(rows, d) + offset, torch.randn(k, d) + offset
    with backend("reference"):
        expected = vq_assign(x, codebook, metric=metric).flatten()
    with backend("triton"):
        vq_assign(x, codebook, metric=metric)
    listed, rescored = passes["listed"], passes["rescored"]
    certain = torch.ones(rows, dtype=torch.bool)
    certain[listed] = False
    assert torch.equal(passes["listed of"].flatten()[certain], expected[certain])
    settled = listed[~torch.isin(listed, rescored)]
    assert torch.equal(passes["rescored of"].flatten()[settled], expected[settled])
    if not alike:
        assert 0 < len(listed) < 30
        assert int((rescored >= 0).sum()) <= 6


@pytest.mark.parametrize("shape", [(10, 4), (3, 10, 4)], ids=["shared", "per segment"])
def test_vq_and_its_gradients(shape):
    results = []
    start, weight = torch.randn(7, 12), torch.randn(7, 12)
    codes = torch.randn(shape)
    for name in ("reference", "triton"):
        x, codebook = start.clone().requires_grad_(), codes.clone().requires_grad_()
        with backend(name):
            out = vq(x, codebook)
        (out.loss + (out.quantized * weight).sum()).backward()
        results.append([*out, x.grad, codebook.grad])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


LAYOUTS, VALUES = ("rows", "channels first", "per segment"), (0.0, 1e-30, 1e30, float("nan"), float("inf"))


@pytest.mark.parametrize(
    ("layout", "dtype", "value"),
    [  # every pair of values; every value at least once in the fast tests
        pytest.param(
            LAYOUTS[(j + k) % len(LAYOUTS)],
            FLOATS[j],
            VALUES[k],
            marks=() if j == k % len(FLOATS) else pytest.mark.slow,
        )
        for j in range(len(FLOATS))
        for k in range(len(VALUES))
    ],
    ids=str,
)
def test_steps_after_the_search_equal_the_reference_bits(layout, dtype, value):
    """Results quantized, counts and fixed-point sums are equal, also after a change of the unit.

    The loss adds in another order.
    """
    n = 20 if value == 1e-30 else 35  # all rows are scored again then, one by one
    x = torch.randn(2, 12, n).transpose(1, 2) if layout == "channels first" else torch.randn(2 * n, 12)
    x, codebook = x.to(dtype), torch.randn(3, 9, 4) if layout == "per segment" else torch.randn(9, 4)
    # ties: rows that the first phase leaves open, and a codeword that gets none
    codebook[..., 0, :] = codebook[..., 3, :]
    x[(0,) * x.dim()] = value
    if value == 1e-30:  # all rows, far below their codewords
        x *= 1e-30 if dtype in (torch.float32, torch.float64, torch.bfloat16) else 1e-4
    results = []
    for name in ("reference", "triton"):
        with backend(name):
            out, sums = vq_with_sums(x, codebook)
        results.append([*out, sums])
    for name, expected, found in zip(
        ("quantized", "indices", "loss", "counts", "sums"), *results, strict=True
    ):
        assert found.dtype == expected.dtype, name
        assert found.shape == expected.shape, name
        tolerance = 1e-6 if name == "loss" else 0
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize(
    ("dtype", "weighted"), [(dtype, bool(i % 2)) for i, dtype in enumerate(FLOATS)], ids=str
)
def test_a_step_of_k_means_has_the_bits_of_the_reference(dtype, weighted):
    x = (torch.randn(80, 13) + 5).to(dtype).T.contiguous().T
    centers, weights = (torch.randn(9, 13) + 5).to(dtype), torch.rand(80) if weighted else None
    centers[4] = centers[2]
    results = []
    for name in ("reference", "triton"):
        with backend(name):
            step = kmeans_step(x, centers, weights=weights)
        results.append([*step[:-1], *step.units])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


COMPILE = """
import json, re, subprocess, sys, triton
from pathlib import Path
from tests.kernels.ahead import build
import uefl_kernels.ops.vq_assign.triton as kernels
import uefl_kernels.ops.vq_assign.triton_pack as packing
import uefl_kernels.ops.vq_assign.triton_epilogue as epilogues
import uefl_kernels.ops.vq.forward.triton as forward
import uefl_kernels.ops.kmeans_step.triton as steps

PRODUCTS = r"wgmma.mma_async[.\\w]*|mma.sync[.\\w]*|tcgen05.mma[.\\w:]*"
TYPES = {"mu": "*fp32", "packed_codebook": "*fp16", "half_norms": "*fp32", "header": "*i64",
         "indices": "*i64", "listed": "*i64", "exact": "*fp64", "k": "i32",
         "errors": "*fp64",
         "counts": "*i64", "codewords": "*fp32", "largest": "*i64", "scales": "*fp64", "fixed": "*i64",
         "opened": "*i8", "sums": "*i64", "wanted": "*i32", "centers": "*fp32",
         "labels": "*i64", "squares": "*fp64", "middle": "*fp64", "weights": "*fp64", "mass_scale": "*fp64"}
# The results that an epilogue computes: none, all of vq, or all of a step of k-means.
VQ = ("counts", "codewords", "quantized", "sums", "scales", "largest")
STEP = ("counts", "sums", "scales", "middle", "weights", "mass_scale")
EPILOGUE = {*VQ, *STEP, "rounded", "opened", "errors"}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
report = []
for name, dtype, d, architectures, wanted in (
    ("_search", "*fp32", 64, (80, 90, 100), ()),
    ("_search", "*fp16", 128, (80, 90), ()),
    ("_search", "*fp64", 32, (90,), ()),
    ("_search", "*bf16", 256, (80, 90), ()),
    ("_search", "*fp32", 700, (80, 90), ()),
    ("_search", "*fp32", 64, (80, 90, 100), VQ),
    ("_search", "*fp32", 64, (80, 90), STEP),
    ("_search", "*fp16", 256, (80, 90), VQ),
    ("_search", "*fp64", 700, (80, 90), VQ),
    ("_finish_open", "*fp32", 64, (80, 90), VQ),
    ("_search_listed", "*fp32", 64, (80, 90, 100), ()),
    ("_rescore", "*fp32", 64, (80, 90, 100), ()),
    ("_center", None, 64, (90,), ()),
    ("_pack", None, 64, (80, 90, 100), ()),
    ("_add", "*fp32", 64, (80, 90), ()),
    ("_squares", "*fp32", 64, (80, 90), ()),
):
    kernel = next(getattr(m, name) for m in (kernels, packing, epilogues, forward, steps) if hasattr(m, name))
    width = packing._width(d)
    for architecture in architectures:
        first = name == "_search"
        config = kernels.config((architecture // 10, 0), width) if first else kernels.config_listed(width)
        constants = {"EXACT": True, "L2": True, "FLAT": True, "D": d, "WIDTH": width,
                     "ROWS": config.rows, "CODES": config.codewords,
                     "CHUNK": config.chunk, "SCAN": kernels._SCAN, "ELEMENTS": 16, "stride_d": 1}
        if not name.startswith("_search"):
            constants["CODES"] = kernels._CANDIDATES if name == "_rescore" else 16
        if name in ("_search", "_finish_open"):
            absent = EPILOGUE - {*wanted, *(("opened", "errors") if wanted else ())}
            constants |= dict.fromkeys(absent)
        if name == "_finish_open":
            constants["ROWS"] = epilogues._OPEN_ROWS
        types = TYPES | {"x": dtype, "quantized": dtype}
        if name == "_add":
            types["k"] = "i64"
        search = {"num_warps": config.warps, "num_stages": config.stages}
        options = search if name.startswith("_search") else {"enable_fp_fusion": False}
        built = build(kernel, architecture, constants, types, aligned=("stride_a", "stride_b"), **options)
        code = Path(sys.argv[1], "cubin")
        code.write_bytes(built.asm["cubin"])
        dump = [TOOLS / "cuobjdump", "-res-usage", code]
        usage = subprocess.run(dump, capture_output=True, text=True).stdout
        report.append({
            "kernel": name,
            "wanted": bool(wanted),
            "architecture": architecture,
            "d": d,
            "code": len(built.asm["cubin"]),
            "shared": built.metadata.shared,
            "stack": int(re.search(r"STACK:(\\d+)", usage)[1]) if name.startswith("_search") else 0,
            "products": sorted(set(re.findall(PRODUCTS, built.asm["ptx"]))),
            "flushes": bool(re.search(r"^(?!.*sqrt).*[.]ftz", built.asm["ptx"], re.M)),
            "fused_doubles": built.asm["ptx"].count("fma.rn.f64"),
        })
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return ahead.report(COMPILE, tmp_path_factory.mktemp("triton"))


@pytest.mark.slow
def test_compiles_for_every_generation(compiled):
    assert {row["architecture"] for row in compiled if row["code"] > 0} == {80, 90, 100}
    # KB of shared memory; 99 on the smaller chips that run code for sm_80
    limits = {80: 99, 90: 227, 100: 227}
    assert [row for row in compiled if row["shared"] > limits[row["architecture"]] * 1024] == []


@pytest.mark.slow
def test_searches_spill_nothing(compiled):
    assert [row for row in compiled if row["stack"] > 0] == []


@pytest.mark.slow
def test_float16_products_are_summed_in_float32(compiled):
    """Products run on the matrix unit of each generation.

    There is no TF32, bfloat16 or flush to zero (except in roots of normal numbers).
    """
    unit = {
        80: "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        90: "wgmma.mma_async.sync.aligned",
        100: "tcgen05.mma",
    }
    for row in compiled:
        if row["kernel"].startswith("_search"):
            assert row["products"], row
            assert all(product.startswith(unit[row["architecture"]]) for product in row["products"]), row
            assert all("f16" in product and "bf16" not in product for product in row["products"]), row
            assert not row["flushes"], row


@pytest.mark.slow
def test_the_definition_is_not_contracted(compiled):
    assert [
        row for row in compiled if row["kernel"] in ("_rescore", "_pack", "_squares") and row["fused_doubles"]
    ] == []


@pytest.mark.parametrize("shape", [(3, 12, 6), (2, 2, 12, 3)])
def test_stages_of_a_residual_quantizer(shape):
    x, codebooks = torch.randn(50, 6), torch.randn(shape)
    found = []
    for name in ("reference", "triton"):
        with backend(name):
            found.append(rvq_with_sums(x, codebooks))
    (want, want_sums), (got, sums) = found
    assert torch.equal(got.indices, want.indices)
    assert torch.equal(got.quantized, want.quantized)
    assert all(map(torch.equal, (*got.counts, *sums), (*want.counts, *want_sums)))
    torch.testing.assert_close(got.losses, want.losses)
