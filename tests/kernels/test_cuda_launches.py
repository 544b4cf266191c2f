"""Count launches and allocations of each op in the source of its CUDA launcher.

Needs no GPU and no nvcc.

The time of a small batch is the time of its launches. docs/design/search-gpu.md quotes these numbers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from uefl_kernels.ops.rvq import composed
from uefl_kernels.ops.vq.forward.composed import Arguments, fallback

SOURCES = Path(__file__).parents[2] / "csrc" / "ops" / "cuda"


def code(name: str) -> str:
    """Return a source without its comments."""
    return re.sub(r"//.*", "", (SOURCES / name).read_text())


def body(source: str, begins: str) -> str:
    """Return a function, up to its closing brace at the beginning of a line."""
    start = source.index(begins)
    return source[start : source.index("\n}\n", start)]


def calls(text: str, pattern: str) -> list[str]:
    return re.findall(pattern, text)


def test_a_codebook_is_packed_by_one_launch():
    source = code("vq_assign.cu")
    packing = body(source, "void launch_pack(")
    assert calls(packing, r"cudaLaunch\w+") == ["cudaLaunchCooperativeKernel"]
    assert "<<<" not in packing
    # each search is one launch, and a call runs one of the searches
    for search in ("void launch_mma(", "void launch_wgmma("):
        assert calls(body(source, search), r"<<<|cudaLaunch\w+|cudaMemset\w*") == ["<<<"], search
    assert len(calls(source, r"<<<")) == 2
    searching = body(source, "Tensor assign(const char* op")
    assert calls(searching, r"(?:launch_|clear)\w*(?=\()") == [
        "clear",
        "launch_pack",
        "launch_wgmma",
        "launch_mma",
    ]
    empty = searching[searching.index("if (shape.outputs == 0)") :].partition("}")[0]
    assert "clear(cleared" in empty
    assert "return indices;" in empty
    assert "if (search == FirstPhase::wgmma) launch_wgmma(" in searching
    assert re.search(r"if \(search != FirstPhase::wgmma\)\s+launch_mma\(", searching)


@pytest.mark.parametrize(
    ("source", "function", "most"),
    [
        ("vq_assign.cu", "Tensor assign(const char* op", 1),  # the indices
        ("vq_assign.cu", "PackedCodebook carve(", 1),  # one workspace for the packed codebook
        ("vq_forward.cu", "VqResults run(", 5),  # the results of every call, and the units of the sums
        ("vq_forward.cu", "void quantize(", 1),  # the parts of the error
        ("vq_forward.cu", "vq_forward(const Tensor& x", 2),  # the error, and the counter of its parts
        ("kmeans.cu", "> kmeans_step(const Tensor& x", 3),  # in addition to the labels of the search
        ("kmeans.cu", "> kmeans_lloyd(const Tensor& x", 9),  # each iteration also has labels
    ],
)
def test_allocations(source, function, most):
    assert len(calls(body(code(source), function), r"(?:new_|\.)empty\(")) == most


def test_packing_launch_zeroes_the_sums():
    for source in ("vq_forward.cu", "kmeans.cu"):
        text = code(source)
        assert "<<<" not in body(text, "std::tuple<Tensor"), source
        assert len(calls(text, r"assign\([^;]*cleared")) == 1, source
        assert not calls(text, r"cudaMemset\w*|zero_|fill_"), source


def test_an_iteration_of_k_means_is_a_search_and_a_launch():
    fit = body(code("kmeans.cu"), "> kmeans_lloyd(const Tensor& x")
    each = fit[fit.index("for (int64_t i = 0; i < max_iter;") : fit.index("sum_squares(")]
    made = calls(each, r"\b(search|sum_rows|launch_\w+|has_ended)\(")
    assert made == ["sum_rows", "launch_advance", "search", "has_ended"]
    assert "if (i == 0) sum_rows(" in each
    assert "if (i % kLookEvery == kLookEvery - 1 && has_ended(" in each
    assert not calls(each, r"empty\(|copy_\(|contiguous\(")


def test_rvq_of_a_few_rows_is_one_launch():
    source = code("rvq.cu")
    assert calls(source, r"cudaLaunch\w+|<<<|cudaMemset\w*") == ["cudaLaunchCooperativeKernel"]
    made = body(source, "Results in_one_launch(")
    assert len(calls(made, r"new_empty\(")) == 6
    assert not calls(made, r"new_zeros\(|zero_|fill_|contiguous\(|stable::to\(")


class ElementOperations(TorchDispatchMode):
    """Counts operations on elements, outside of ``vq_forward``."""

    def __init__(self):
        super().__init__()
        self.counted, self.searches = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        joins_nothing = function is torch.ops.aten.cat.default and all(len(each) == 0 for each in args[0])
        if function not in (torch.ops.aten.view.default, torch.ops.aten.new_empty.default):
            self.counted += not joins_nothing
        return function(*args, **(kwargs or {}))

    def vq_forward(self, *given):
        self.searches += 1
        with torch.utils._python_dispatch._disable_current_modes():
            return fallback(Arguments(*given))


@pytest.mark.parametrize("stages", [1, 8])
def test_launches_of_rvq_by_stages(stages):
    """``vq_forward`` without sums has three launches."""
    codebooks = [torch.randn(32, 16) for _ in range(stages)]
    given = composed.Arguments(torch.randn(4, 16), codebooks, "l2", True, False, 0.0, 1.0, False)
    with ElementOperations() as seen:
        composed.around(seen.vq_forward, given)
    assert seen.searches == stages
    assert 3 * seen.searches + seen.counted == 7 * stages - 1 + 4


def test_vq_with_sums_is_five_launches():
    """Two more are in the search."""
    source = code("vq_forward.cu")
    names = r"(launch_expect_units|assign|quantize|launch_row_sums<true>|launch_finish_sums)\("
    assert calls(body(source, "VqResults run("), names) == ["launch_expect_units", "assign", "quantize"]
    _, made = body(source, "void quantize(").split("{", 1)
    assert calls(made, names) == ["launch_row_sums<true>", "launch_finish_sums"]
    assert calls(source, r"cudaLaunch\w+") == ["cudaLaunchCooperativeKernel"]
    assert "call_portable" not in source


def test_vq_is_three_launches():
    """Two are in the search, and the third one gathers the codewords."""
    source = code("vq_forward.cu")
    made = body(source, "VqResults run(")
    names = r"\b(launch_\w+|assign|quantize)\("
    assert "if (summed.in_float64) launch_expect_units(" in made
    assert re.search(r"= assign\(.*if \(shape\.outputs != 0\) quantize\(", made, re.S)
    assert calls(made, names) == ["launch_expect_units", "assign", "quantize"]
    without_sums = body(source, "void quantize(")
    without_sums = without_sums[without_sums.index("if (!summed.any()) {") :].partition("}\n")[0]
    assert calls(without_sums, names) == ["launch_gather"]
    assert "return launch_gather(" in without_sums
    assert calls(body(source, "void launch_gather("), r"<<<|cudaLaunch\w+|cudaMemset\w*") == ["<<<"]
    assert len(calls(source, r"\bquantize\(")) == 2  # its definition and this call


def test_no_python_is_between_an_op_and_its_kernel():
    """In a compiled graph, a Python function would choose the kernel of an op without a C++ one in uefl."""
    for path in SOURCES.glob("*.cu"):
        assert "UEFL_CUDA_OP(" in code(path.name), path.name
        assert "STABLE_TORCH_LIBRARY_IMPL" not in code(path.name), path.name


def test_driver_queries_are_in_one_place():
    for path in sorted(SOURCES.iterdir()):
        if path.name != "device.h":
            assert not calls(
                code(path.name), r"cudaFuncSetAttribute|cudaDeviceGetAttribute|cudaGetDeviceProperties"
            ), path.name
    shared = body(code("device.h"), "void allow_shared(")
    assert shared.index("if (bytes <= most) return;") < shared.index("cudaFuncSetAttribute"), (
        "a call repeats what was said before"
    )
    assert "static const std::vector<Device> devices = ask_devices();" in body(
        code("device.h"), "inline const Device& current_device()"
    )


PROBE = """
#include "tests/cpp/cuda/emulation.h"
#include "ops/cuda/search_launch.h"
const void* probe() { return reinterpret_cast<const void*>(&uefl::cuda::assign); }
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_source_can_call_the_search_of_another(tmp_path):
    """Types of the parameters have names.

    A function with a parameter type from an unnamed namespace differs in each source, and the library would
    not load.
    """
    (tmp_path / "probe.cpp").write_text(PROBE)
    root, torch_headers = SOURCES.parents[2], Path(torch.__file__).parent / "include"
    command = ["g++", "-std=c++20", "-Werror", f"-I{root}", f"-I{root / 'csrc'}"]
    command += ["-isystem", torch_headers, "-DTORCH_TARGET_VERSION=0x020a000000000000ULL"]
    done = subprocess.run([*command, "-c", "probe.cpp"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
