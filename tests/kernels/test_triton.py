"""The Triton kernel: interpreted on CPU tensors against the reference, and compiled ahead of time for three generations of GPU.

``tests/conftest.py`` has imported Triton for interpretation. With a GPU, ``test_cuda.py`` runs the kernel natively instead.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

import uefl_kernels
from uefl_kernels import backend, vq, vq_assign

from .search_cases import CASES, codebook_with

if torch.cuda.is_available():
    pytest.skip("the kernel runs natively here (test_cuda.py)", allow_module_level=True)
pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.manual_seed(0)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case, metric):
    x, codebook = CASES[case]()
    with backend("reference"):
        expected = vq_assign(x, codebook, metric=metric)
    with backend("triton"):
        found = vq_assign(x, codebook, metric=metric)
    assert torch.equal(found, expected), f"{int((found != expected).sum())} of {expected.numel()} indices differ"


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
    assert torch.equal(found, vq_assign(x, codebook))  # far enough apart here for float32


def test_only_uncertain_rows_are_rescored(monkeypatch):
    """The first pass alone: certain rows already hold the answer, and the others, here the exact ties, are marked."""
    kernel = sys.modules["uefl_kernels.ops.vq_assign.triton"]
    rescored = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda rows, codes, indices, *shape, **options: rescored.append(indices.clone())

    monkeypatch.setattr(kernel, "_rescore", Recorder())
    codebook = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [5.0, 0.0]])
    x = torch.tensor([[-0.5, 3.0], [0.0, 3.0], [0.5, 3.0], [3.0, 0.0], [4.0, 0.0], [float("nan"), 0.0]])
    kernel.vq_assign(x, codebook, "l2", True)
    assert rescored[0].flatten().tolist() == [0, -1, 1, -1, 2, -1]


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


COMPILE = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import uefl_kernels.ops.vq_assign.triton as kernels

TYPES = {"mu": "*fp32", "half_norms": "*fp32", "bounds": "*fp64", "indices": "*i64", "squares": "*fp64", "d": "i32", "k": "i32"}
CONSTANTS = {"EXACT": True, "L2": True, "ELEMENTS": kernels._ELEMENTS}
report = []
for kernel, x, codes, rows, codewords in (
    (kernels._search, "*fp32", "*fp32", kernels._ROWS, kernels._CODES),
    (kernels._search, "*fp64", "*fp32", kernels._ROWS, kernels._CODES),
    (kernels._rescore, "*fp32", "*fp64", None, kernels._CANDIDATES),
    (kernels._square_norms, None, "*fp64", kernels._CANDIDATES, None),
):
    constants = {**CONSTANTS, "ROWS": rows, "CODES": codewords, "SCAN": kernels._SCAN}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {**TYPES, "x": x, "codes": codes}
    signature = {name: "constexpr" if name in constants else types.get(name, "i64") for name in kernel.arg_names}
    for architecture in (80, 90, 100):
        options = {} if kernel is kernels._search else {"enable_fp_fusion": False}
        built = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", architecture, 32), options=options)
        ptx = built.asm["ptx"]
        report.append({
            "kernel": kernel.__name__,
            "architecture": architecture,
            "code": len(built.asm["cubin"]),
            "shared": built.metadata.shared,
            "tensor_cores": "mma" in ptx,
            "flushes": ".ftz" in ptx,
            "fused_doubles": ptx.count("fma.rn.f64"),
        })
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    root = os.path.dirname(os.path.dirname(uefl_kernels.__file__))
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_compiles_for_every_generation(compiled):
    assert {row["architecture"] for row in compiled if row["code"] > 0} == {80, 90, 100}
    assert len(compiled) == 12
    assert max(row["shared"] for row in compiled) < 99 * 1024


@pytest.mark.slow
def test_scores_are_float32_as_the_certificate_assumes(compiled):
    """No TF32, which rounds to 11 bits, and no flush to zero of what the certificate bounds."""
    searches = [row for row in compiled if row["kernel"] == "_search"]
    assert [row for row in searches if row["tensor_cores"] or row["flushes"]] == []


@pytest.mark.slow
def test_the_definition_is_not_contracted(compiled):
    assert [row for row in compiled if row["kernel"] != "_search" and row["fused_doubles"]] == []
