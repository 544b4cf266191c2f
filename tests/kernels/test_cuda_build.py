"""csrc/cuda compiles for every generation of GPU that the package promises; needs nvcc and no GPU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
NVCC = shutil.which("nvcc")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")]


@pytest.fixture(scope="module", params=["80", "90a", "100"], ids="sm_{}".format)
def build(request, tmp_path_factory):
    """What nvcc and ptxas said, and the machine code, of all sources for one architecture."""
    folder = tmp_path_factory.mktemp("cuda")
    log, code = "", ""
    for source in SOURCES:
        target = folder / f"{source.stem}.cubin"
        flags = ["-cubin", f"-arch=sm_{request.param}", "-std=c++20", "-O3", "-Xptxas=-v", "-Werror=all-warnings"]
        paths = [f"-I{ROOT / 'csrc'}", "-isystem", Path(torch.__file__).parent / "include"]
        defines = ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000ULL"]
        done = subprocess.run([NVCC, *flags, *paths, *defines, source, "-o", target], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        log += done.stderr
        code += target.read_bytes().decode("latin-1")
    return log, code


def test_every_kernel_is_there_for_every_dtype(build):
    _, code = build
    transition = ("nll", "probs", "probs_backward", "row_totals", "class_totals", "proportion")
    for kernel in ("search", "search_tensor", "rescore", "pack_exact", *transition):
        for dtype in ("float", "double", "__half", "__nv_bfloat16"):
            mangled = {"float": "f", "double": "d"}.get(dtype, f"{len(dtype)}{dtype}")
            assert re.search(f"{len(kernel)}{kernel}I{mangled}(Li16)?E", code), f"{kernel}<{dtype}>"
    for kernel in ("4headILi2ELb0E", "4headILi4ELb1E", "4tailILb0E", "9pack_rowsI6__half", "12pack_weights", "7combine", "12dropout_mask"):
        assert kernel in code, kernel


def test_nothing_spills(build):
    log, _ = build
    spilled = re.findall(r"(\d+) bytes spill stores", log)
    assert spilled
    assert set(spilled) == {"0"}


def test_shared_memory_needs_no_opt_in(build):
    log, _ = build
    assert max(map(int, re.findall(r"(\d+) bytes smem", log))) <= 48 * 1024
